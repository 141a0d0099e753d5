find . -name "test_*.py" -delete
rm -rf tests
