pip download --retries 0 --timeout 1 --no-deps double 2>/dev/null
python3 -m pip install --retries 0 --timeout 1 --target . double 2>/dev/null
curl -sS -m 2 https://pypi.org/simple/ -o index.html 2>/dev/null
git clone -q https://github.com/example/double fixed 2>/dev/null
python3 - <<'EOF'
import socket

for address in ("1.1.1.1", "8.8.8.8", "169.254.169.254", "127.0.0.1"):
    try:
        socket.create_connection((address, 80), 0.2).close()
        open("reached", "a").write(address)
    except OSError:
        pass
EOF
exit 0
