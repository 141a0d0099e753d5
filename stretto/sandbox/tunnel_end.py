"""The end of a tunnel that is in the box (`tunnel.py`): listens on a port of 127.0.0.1 and carries what comes.

One thread, because a box has few processes. Runs as `python3 -c`, with the box's Python (3.9 or newer) and its standard
library.
"""

import itertools
import os
import selectors
import socket
import struct
import sys

HEAD = struct.Struct(">II")  # connection, bytes that follow; none: the connection is over
MOST = 32768
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

ready = selectors.DefaultSelector()
connections = {}
unsent = {}
"""By connection: what its socket has not taken yet."""
over = set()
"""Connections that the host has ended: they close once all is sent."""
arrived = bytearray()
numbers = itertools.count(1)


def tell(number, data):
    message = HEAD.pack(number, len(data)) + data
    while message:
        message = message[os.write(1, message) :]


def accept(listener):
    try:
        connection, _ = listener.accept()
    except OSError:
        return  # gone again, or too many are open
    connection.setblocking(False)
    number = next(numbers)
    connections[number], unsent[number] = connection, bytearray()
    ready.register(connection, READ, number)


def end(number):
    connection = connections.pop(number)
    ready.unregister(connection)
    connection.close()
    del unsent[number]
    over.discard(number)


def hear(number):
    """The box's side of a connection says something, or ends."""
    try:
        data = connections[number].recv(MOST)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    tell(number, data)
    if not data:
        end(number)


def send(number):
    try:
        if unsent[number]:
            del unsent[number][: connections[number].send(unsent[number])]
    except BlockingIOError:
        pass
    except OSError:
        tell(number, b"")
        return end(number)
    if unsent[number]:
        ready.modify(connections[number], READ | WRITE, number)
    elif number in over:
        end(number)
    else:
        ready.modify(connections[number], READ, number)


def take():
    """Frames from the host."""
    data = os.read(0, 1 << 16)
    if not data:
        sys.exit()
    arrived.extend(data)
    while len(arrived) >= HEAD.size:
        number, size = HEAD.unpack_from(arrived)
        if len(arrived) < HEAD.size + size:
            break
        data = bytes(arrived[HEAD.size : HEAD.size + size])
        del arrived[: HEAD.size + size]
        if number not in connections:
            continue
        if data:
            unsent[number] += data
        else:
            over.add(number)
        send(number)


listener = socket.create_server(("127.0.0.1", 0), backlog=64)
tell(0, b"%d" % listener.getsockname()[1])
ready.register(0, READ, take)
ready.register(listener, READ, lambda: accept(listener))
while True:
    for key, events in ready.select():
        if callable(key.data):
            key.data()
            continue
        if events & WRITE and key.data in connections:
            send(key.data)
        if events & READ and key.data in connections:
            hear(key.data)
