printf 'not a library' > evil.so
printf '/workspace/evil.so\n' > /etc/ld.so.preload 2>/dev/null
printf 'LD_PRELOAD=/workspace/evil.so\nPYTHONSTARTUP=/workspace/start.py\nPYTHONINSPECT=1\n' | tee .env > .pam_environment
printf 'import os; os._exit(0)\n' > start.py
exit 0
