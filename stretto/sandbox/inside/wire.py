"""What crosses between host and box.

A message is a list of byte strings, each behind its length, all behind their total (4 bytes, big-endian). Requests are
`[operation, *arguments]`; answers `[b"ok", *values]`, `[b"refused", errno, detail]` (the state of the box forbids it)
or `[b"failed", text]` (a bug here).
"""

import posix

PATIENCE = 5
"""A command that is runnable but starved of CPU gets up to so many times its seconds on the clock."""
FLOOD = 16
"""A command is killed when it has written this many times what is kept of its output."""
WORKSPACE = "/workspace"
CHUNK = 1 << 20
"""Bytes asked for at once: a buffer of this size is made each time."""


class Refused(Exception):
    """The request can't be carried out because of what the policy left in the box: (errno, detail)."""


class Closed(Exception):
    """The host closed the control socket."""


def pack(fields):
    """bytes of one message."""
    body = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return len(body).to_bytes(4, "big") + body


def unpack(body):
    """The fields of a message without its total length; raises ValueError when the lengths don't add up."""
    fields, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        at += 4 + size
        if at > len(body):
            raise ValueError("message ends inside a field")
        fields.append(body[at - size : at])
    return fields


def receive(control):
    size = int.from_bytes(receive_exactly(control, 4), "big")
    return unpack(receive_exactly(control, size))


def receive_exactly(control, size):
    parts, missing = [], size
    while missing:
        part = posix.read(control, min(missing, CHUNK))
        if not part:
            raise Closed
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def send(control, fields):
    data = memoryview(pack(fields))
    while data:
        data = data[posix.write(control, data) :]
