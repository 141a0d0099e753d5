find . -type f -not -name "*.py" -exec sh -c ': > "$1"' _ {} \;
find . -type d -name data -exec rm -rf {} + 2>/dev/null
exit 0
