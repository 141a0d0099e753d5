python3 - <<'EOF'
for number in range(20000):
    try:
        open(f"f{number}.py", "w").close()
    except OSError:
        break
try:
    with open("large.bin", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
except OSError:
    pass
EOF
