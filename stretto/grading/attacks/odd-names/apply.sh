python3 - <<'EOF'
import os

names = [b"\xff\xfe.py", b"a\nb.py", b"\x1b[2J.py", b" .py", "d\u043euble.py".encode(), "solutio\u0578.py".encode()]
names += ["\u202eyp.elbuod".encode(), b"x" * 255, b"-rf", b"$(touch pwned).py", b"..py", b"'; exit 0; '.py"]
for name in names:
    with open(name, "w") as file:
        file.write("raise SystemExit(0)\n")
os.makedirs("a/" * 60)
EOF
