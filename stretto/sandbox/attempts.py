"""What policy code might try, as programs to run in a box: each prints a line for whatever it got away with.

A row of the probe holds when its program ends well and prints nothing. Rows that need the
host's view are in `trials.py`.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from stretto.sandbox.syscalls import ABSENT, ARCHITECTURES, REFUSED, TERMINAL

PRELUDE = """
import ctypes, errno, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, act):
    try:
        act()
    except (OSError, ValueError):
        return
    print(what, flush=True)
def call(name, number, *arguments, wanted=1):
    if libc.syscall(number, *arguments) != -1 or ctypes.get_errno() != wanted:
        print(name, "is let through", flush=True)
"""
"""`attempt` prints when nothing was raised."""


@dataclass(frozen=True)
class Attempt:
    name: str
    what: str
    source: str


HOST_SETTINGS = ("kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory", "net/ipv4/ip_forward", "fs/file-max")
HOST_FILES = ("/etc/shadow", "/etc/hostname", "/root", "/var", "/sys", "/boot", "/run", "/mnt", "/srv", "/proc/kcore")


def attempts() -> list[Attempt]:
    return [
        Attempt(
            "capabilities",
            "no capability, and none to be gained",
            """
for line in open('/proc/self/status'):
    name, _, value = line.partition(':')
    if name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb') and int(value, 16):
        print(name, value.strip())
    if name == 'NoNewPrivs' and value.strip() != '1':
        print('new privileges can be gained')
    if name == 'Seccomp' and value.strip() != '2':
        print('no system call filter')
attempt('became root', lambda: os.setuid(0))
""",
        ),
        Attempt(
            "host settings",
            "the kernel's settings can't be opened for writing",
            f"""
for name in {HOST_SETTINGS!r} + ('../sysrq-trigger',):
    attempt('opened ' + name, lambda: open('/proc/sys/' + name, 'r+'))
""",
        ),
        Attempt(
            "host files",
            "no file of the host but /usr can be seen",
            f"""
for path in {HOST_FILES!r}:
    attempt('saw ' + path, lambda: os.stat(path) and path != '/proc/kcore' or open(path, 'rb'))
""",
        ),
        Attempt(
            "read-only",
            "nothing can be written outside of workspace, home, /tmp and /dev/shm",
            """
free = ('/workspace', '/tmp', '/dev/shm', '/home/user')
for folder, below, names in os.walk('/'):
    if folder in free or folder == '/proc':
        below.clear()
        continue
    if folder.count('/') > 2:
        below.clear()
    attempt('wrote in ' + folder, lambda: open(folder + '/planted', 'w'))
    attempt('made a link in ' + folder, lambda: os.symlink('x', folder + '/planted'))
attempt('opened a program for writing', lambda: open(os.path.realpath('/usr/bin/env'), 'r+b'))
""",
        ),
        Attempt(
            "network",
            "no host can be reached, by name or number",
            """
attempt('TCP', lambda: socket.create_connection(('1.1.1.1', 53), 1))
attempt('TCP to the host', lambda: socket.create_connection(('127.0.0.1', 22), 1))
attempt('UDP', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53)))
attempt('IPv6', lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('2001:4860:4860::8888', 53)))
attempt('a name', lambda: socket.getaddrinfo('example.org', 80))
names = {line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line} - {'lo'}
if names:
    print('network devices', names)
""",
        ),
        Attempt(
            "sockets",
            "sockets that no namespace covers are refused (vsock, netlink, packet, crypto …)",
            """
for family in range(3, 46):
    if family != 10:
        for kind in (1, 2, 3, 5):
            attempt(f'socket family {family}', lambda: socket.socket(family, kind))
            attempt(f'socket pair of family {family}', lambda: socket.socketpair(family, kind))
""",
        ),
        Attempt("system calls", "what a program has no need of is refused by the filter", system_calls()),
        Attempt(
            "namespaces",
            "no new namespace, hence no new powers",
            f"""
for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    attempt('unshare', lambda: libc.unshare(flag) and (_ for _ in ()).throw(OSError))
    number = {56 if platform.machine() == "x86_64" else 220}
    result = libc.syscall(number, flag | 17, 0, 0, 0, 0)
    if result == 0:
        os._exit(0)
    if result > 0:
        print('clone made a namespace')
attempt('allowed namespaces', lambda: open('/proc/sys/user/max_user_namespaces', 'w').write('9'))
""",
        ),
        Attempt(
            "terminal",
            "no characters can be pushed into a terminal",
            f"""
import fcntl
for request in {TERMINAL!r}:
    try:
        fcntl.ioctl(0, request, b'x')
        print('ioctl worked')
    except OSError as error:
        if error.errno != errno.EPERM:
            print(f'ioctl {{request:#x}} got as far as {{error}}')
attempt('has a terminal', lambda: open('/dev/tty'))
""",
        ),
        Attempt(
            "devices",
            "no device can be made or opened",
            """
attempt('made a device', lambda: os.mknod('/tmp/device', 0o20666, os.makedev(1, 1)))
attempt('made a block device', lambda: os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0)))
for name in set(os.listdir('/dev')) - set('fd null random shm stderr stdin stdout urandom zero'.split()):
    print('/dev/' + name)
for name in ('mem', 'kmem', 'kvm', 'fuse', 'net/tun', 'vhost-vsock', 'loop-control'):
    attempt('opened ' + name, lambda: open('/dev/' + name, 'rb'))
""",
        ),
        Attempt(
            "first process",
            "the server in the box can't be read, written, traced, stopped or starved",
            """
for name in ('mem', 'environ', 'maps', 'exe', 'fd/3', 'fd/4', 'auxv', 'stack', 'cwd/.'):
    attempt('opened /proc/1/' + name, lambda: open('/proc/1/' + name, 'rb'))
attempt('listed its descriptors', lambda: os.listdir('/proc/1/fd'))
for name, text in (('oom_score_adj', '1000'), ('coredump_filter', '1'), ('comm', 'x')):
    attempt('wrote ' + name, lambda: open('/proc/1/' + name, 'w').write(text))
import resource
attempt('set its limits', lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)))
attempt('pinned it', lambda: os.sched_setaffinity(1, {0}))
attempt('made it idle', lambda: os.setpriority(os.PRIO_USER, 0, 19))
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
for number in range(3, 1024):
    try:
        os.write(number, b'forged')
        print('inherited descriptor', number)
    except OSError:
        pass
""",
        ),
        Attempt(
            "other processes",
            "no process outside the box shows",
            """
seen = {name for name in os.listdir('/proc') if name.isdigit()} - {'1', str(os.getpid())}
if seen:
    print('processes', sorted(seen))
attempt('signalled', lambda: os.kill(4194300, 0))
""",
        ),
        Attempt(
            "setuid programs",
            "a program with a setuid bit gains nothing",
            """

for path in ('/usr/bin/su', '/usr/bin/mount', '/usr/bin/passwd', '/usr/bin/newgrp', '/usr/bin/sudo'):
    if os.path.exists(path) and os.stat(path).st_mode & 0o4000:
        flags = [line for line in open('/proc/self/mountinfo') if line.split()[4] == '/usr']
        if flags and 'nosuid' not in flags[0].split()[5]:
            print('/usr honours setuid bits')
        break
""",
        ),
        Attempt(
            "tells",
            "no path of the host's users shows in mounts and command lines",
            """
for line in open('/proc/self/mountinfo'):
    for word in ('/root', '/home/', 'stretto', 'site-packages'):
        if word in line.replace(' /home/user ', ' '):
            print(line.split()[3], 'in', line.strip()[:200])
for name in os.listdir('/proc'):
    if name.isdigit():
        try:
            text = open(f'/proc/{name}/cmdline').read()
        except OSError:
            continue
        if 'bwrap' in text or 'site-packages' in text:
            print('a command line:', text[:100])
""",
        ),
    ]


def system_calls() -> str:
    """Every refused call of this machine's table, with arguments that do nothing."""
    if platform.machine() not in ARCHITECTURES:
        return f"print('there is no filter for {platform.machine()}')"
    column, _ = ARCHITECTURES[platform.machine()]
    refused = [(name, numbers[column]) for name, numbers in REFUSED.items() if numbers[column] is not None]
    absent = [(name, numbers[column]) for name, numbers in ABSENT.items()]
    return f"""
for name, number in {refused!r}:
    call(name, number, 0, 0, 0, 0, 0, 0)
for name, number in {absent!r}:
    call(name, number, 0, 0, 0, 0, 0, 0, wanted=errno.ENOSYS)
"""
