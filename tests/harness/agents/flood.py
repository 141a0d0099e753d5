"""What a policy may send to the port that its agent speaks to: everything but what belongs there."""

import contextlib
import os
import socket
import sys
from urllib.parse import urlparse

PLACE = urlparse(os.environ["OPENAI_BASE_URL"])


def connect():
    connection = socket.create_connection((PLACE.hostname, PLACE.port))
    connection.settimeout(5)
    return connection


def post(body, path=b"/v1/chat/completions"):
    """The status it is answered with."""
    connection = connect()
    connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, len(body)))
    with contextlib.suppress(OSError):  # refused before all of it was sent
        connection.sendall(body)
    return connection.recv(300).split()[1].decode()


garbage = [connect() for _ in range(100)]
for connection in garbage:
    connection.sendall(b"\0\xff garbage\r\n\r\n")
    connection.close()
nested = b'[{"a":' * 500 + b"1" + b"}]" * 500
told = [
    post(b"[" * 100_000),
    post(b'{"model":"x","messages":[{"role":"user","content":"' + b"a" * 15_000_000 + b'"}]}'),
    post(b"x" * 17_000_000),
    post(b'{"model":"x","messages":[]}'),
    post(b'{"model":"x","messages":[{"role":"user","content":"x"}],"tools":' + nested + b"}"),
    post(b'{"model":"x","messages":[{"role":"user","content":"\\ud800"}]}'),
    post(b"{}", b"/../../etc/passwd"),
]
half = connect()
half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc")
print(*told)
sys.stdout.flush()
