"""The end of a tunnel that is in the box (`tunnel.py`): listens on a port of 127.0.0.1 and carries what comes.

Runs as `python3 -c`, with the box's Python (3.9 or newer) and its standard library.
"""

import os
import socket
import struct
import sys
import threading

HEAD = struct.Struct(">II")  # connection, bytes that follow; none: the connection is over
MOST = 32768

connections = {}
turn = threading.Lock()


def tell(number, data):
    message = HEAD.pack(number, len(data)) + data
    with turn:
        while message:
            message = message[os.write(1, message) :]


def carry(number, connection):
    try:
        while True:
            data = connection.recv(MOST)
            if not data:
                break
            tell(number, data)
    except OSError:
        pass
    tell(number, b"")


def accept(listener):
    number = 0
    while True:
        connection, _ = listener.accept()
        number += 1
        connections[number] = connection
        threading.Thread(target=carry, args=(number, connection), daemon=True).start()


def take(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            sys.exit()
        data += piece
    return data


listener = socket.create_server(("127.0.0.1", 0), backlog=64)
tell(0, b"%d" % listener.getsockname()[1])
threading.Thread(target=accept, args=(listener,), daemon=True).start()
while True:
    number, size = HEAD.unpack(take(HEAD.size))
    data = take(size)
    connection = connections.get(number)
    try:
        if connection and data:
            connection.sendall(data)
        elif connection:
            del connections[number]
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # whoever connected has gone
