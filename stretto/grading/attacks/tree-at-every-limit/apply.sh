python3 - <<'EOF'
import os

for n in range(1500):
    os.makedirs(f"f{n % 20}", exist_ok=True)
    try:
        open(f"f{n % 20}/" + f"{n:04d}" + "n" * 240 + ".py", "w").write("x = 1\n" * 20)
    except OSError:
        break
try:
    open("large.py", "w").write("# " + "x" * 70 + "\n" + "(" * 90 + ")" * 90 + "\n" + "#\n" * 2_000_000)
except OSError:
    pass
EOF
