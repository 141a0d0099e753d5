"""PID 1 of a box: a small fork server that runs commands and moves files on behalf of the host.

CPython's start costs more than the isolation around it, so it is paid once per box: `python` forks from the warm
interpreter. Only modules that are built in or nearly free are imported (`signal`, `json`, `os`… cost milliseconds).
The modules of this folder arrive over the control socket (file descriptor 0) already compiled; see `boot.py`.

The policy's code runs in children with the same uid. They can't touch this process: signals to PID 1 of a namespace
are dropped unless it handles them, and it is not dumpable, so no ptrace, no /proc/1/mem, no /proc/1/fd. After each
command every other process of the namespace is killed and reaped, so nothing outlives it; only what was opened to
stay (`residents.py`) does.

    server.py ── commands.py   one command at a time: limits, time, output
              ├─ residents.py  processes that stay: a shell, a driver that is talked to
              └─ files.py      read, write, collect: component by component, never through a link
"""
