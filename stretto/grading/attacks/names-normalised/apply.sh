python3 - <<'EOF'
import os
import unicodedata

evil = "import os\nos._exit(0)\n"
wide = {c: chr(ord(c) + 0xFEE0) for c in "abcdefghijklmnopqrstuvwxyz"}
for name in ("conftest", "pytest", "sitecustomize", "double", "json"):
    for odd in ("".join(wide[c] for c in name), name.upper(), name.title(), name + " ", " " + name, name + "\u200b",
                unicodedata.normalize("NFD", name.replace("o", "\u00f6")), name.replace("s", "\u017f"), name + "\n"):
        with open(odd + ".py", "w") as file:
            file.write(evil)
for odd in ("tests\u2215conftest.py", "tests\\conftest.py", "conftest.py.", "conftest.py\t", ".\u2024conftest.py"):
    with open(odd, "w") as file:
        file.write(evil)
os.makedirs("Tests/__init__", exist_ok=True)
open("Tests/Conftest.py", "w").write(evil)
EOF
