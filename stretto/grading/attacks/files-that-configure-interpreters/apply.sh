printf 'home = /workspace\ninclude-system-site-packages = true\n' > pyvenv.cfg
printf '/workspace\nimport site\n' | tee python3._pth python._pth > python311._pth
printf 'build\n' > pybuilddir.txt
for name in __main__.py __init__.py __hello__.py site.py encodings.py codecs.py zipimport.py _bootlocale.py start.py; do
    printf 'import os\nos._exit(0)\n' > "$name"
done
mkdir -p encodings lib/python3.11/site-packages site-packages .local/bin __pypackages__/3.11/lib
printf 'import os\nos._exit(0)\n' | tee encodings/__init__.py lib/python3.11/os.py site-packages/evil.py > __pypackages__/3.11/lib/pytest.py
printf '#!/bin/sh\nexit 0\n' > python3 && chmod +x python3
printf 'PYTHONPATH=/workspace\nPYTHONOPTIMIZE=2\nPYTHONBREAKPOINT=os._exit\n' | tee .env > .pythonrc
