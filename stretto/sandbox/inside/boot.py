"""How the modules of PID 1 get into a box: compiled once on the host, sent over its control socket, run in order."""

import marshal
from pathlib import Path

MODULES = ("wire", "files", "processes", "commands", "residents", "server")
"""Each may import from those before it, by its full name."""
PACKAGE = "stretto.sandbox.inside"

BOOT = (
    "import posix,marshal,sys\nd=b''\n"
    "while len(d)<4 or len(d)<4+int.from_bytes(d[:4],'big'):d+=posix.read(0,65536)or posix._exit(1)\n"
    "p=marshal.loads(d[4:])\n"
    "for n,c in p:\n"
    "  m=sys.modules[n]=type(sys)(n)\n"
    "  exec(c,m.__dict__)\n"
    "for n,c in p:del sys.modules[n]\n"
    "m.serve()"
)
"""What `python -c` runs in the box: read one length-prefixed list of (name, code), run it, and serve."""

COMPILE = (
    "import sys,marshal;i=marshal.loads(sys.stdin.buffer.read());"
    "sys.stdout.buffer.write(marshal.dumps([(n,compile(s,'inside','exec',optimize=2))for n,s in i]))"
)
"""Run by the interpreter of the boxes on the host: its bytecode is its own."""


BOOT_FROM_SOURCE = BOOT.replace("exec(c,m.__dict__)", "exec(compile(c,'inside','exec',optimize=2),m.__dict__)").replace(
    "m.serve()", "m.serve(1)"
)
"""The same where the interpreter is not of the host's version: it compiles. Answers go to stdout."""


def bundle() -> bytes:
    """What `BOOT_FROM_SOURCE` reads."""
    return marshal.dumps(sources(), 2)


def sources() -> list[tuple[str, bytes]]:
    here = Path(__file__).parent
    return [(f"{PACKAGE}.{name}", (here / f"{name}.py").read_bytes()) for name in MODULES]
