# SPDX-License-Identifier: Apache-2.0
"""HTTP over plain sockets for P10: a client costs as little as it can, as it runs on the cores of the server it measures.

`python -m benchmarks.stand_ins.http_load PORT SIZE` asks for twenty images at once for every line it reads. It says "waiting" when the
server has all of the requests, and "done" when it has read all of the answers.
"""

import json
import os
import re
import selectors
import socket
import sys
import time

CLIENTS = 20
DEADLINE_S = 600.0
# The clients stand for other machines: what they do with an answer is not to take the core that the server needs.
NICENESS = 10
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
IN_FLIGHT = re.compile(rb"^diffusion_worker_requests_(?:queued|in_flight) ([0-9.]+)$", re.MULTILINE)


def connect(port: int) -> socket.socket:
    """Open a TCP connection to a port on loopback, without Nagle's delay. Each call on it may take `DEADLINE_S` seconds."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def ask(connection: socket.socket, request: bytes) -> bytes:
    """Send one request and return the body of the answer.

    Raises:
        RuntimeError: the answer is no 200.
    """
    connection.sendall(request)
    answer = Answer()
    while not answer.complete:
        answer.read(connection)
    return bytes(answer.body)


class Answer:
    """An HTTP response that is read piece by piece. `body` is the content received so far, without the pieces read with `keep` false."""

    def __init__(self) -> None:
        self.body = bytearray()
        self._head = bytearray()
        self._length: int | None = None
        self._read = 0

    @property
    def complete(self) -> bool:
        """True once the head was read and as many bytes of the body as its `content-length` announced."""
        return self._read == self._length

    def read(self, connection: socket.socket, *, keep: bool = True) -> None:
        """Receive once from the connection, and block until data comes. If `keep` is false, the body's bytes are counted but not stored.

        Raises:
            RuntimeError: the server closed the connection, or answered with another status than 200 or without a `content-length`.
        """
        data = connection.recv(1 << 18)
        if not data:
            raise RuntimeError("the server closed a connection")
        if self._length is None:
            self._head += data
            head, end, data = bytes(self._head).partition(b"\r\n\r\n")
            if not end:
                return
            found = LENGTH.search(head)
            if b" 200 " not in head.split(b"\r\n", 1)[0] or found is None:
                raise RuntimeError(f"expected 200 and a length, found {head[:200]!r}")
            self._length = int(found[1])
        self._read += len(data)
        if keep:
            self.body += data


def burst(connections: list[socket.socket], request: bytes, control: socket.socket) -> None:
    """Ask on all connections at once, and drop each answer while it is read.

    `waiting` on stdout says that the server has all requests; `done` says that every answer is complete.

    Raises:
        RuntimeError: an answer is no 200 or late, the server closed a connection, or its metrics never showed all requests.
    """
    for connection in connections:
        connection.sendall(request)
    _wait_for_requests(control, len(connections))
    print("waiting", flush=True)
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, (connection, Answer()))
        ends = time.monotonic() + DEADLINE_S
        while selector.get_map():
            if time.monotonic() > ends:
                raise RuntimeError(f"{len(selector.get_map())} of {len(connections)} images did not arrive within {DEADLINE_S:g} s")
            for key, _ in selector.select(1.0):
                connection, answer = key.data
                answer.read(connection, keep=False)
                if answer.complete:
                    selector.unregister(connection)
    print("done", flush=True)


def _wait_for_requests(control: socket.socket, wanted: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while sum(float(count) for count in IN_FLIGHT.findall(ask(control, METRICS))) != wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server has not got {wanted} requests within {DEADLINE_S:g} s")
        time.sleep(0.01)


def main(port: int, size: int) -> None:
    """Open all connections, and ask for twenty images at once for every line of standard input, until it ends."""
    os.nice(NICENESS)
    body = json.dumps({"prompt": "an image", "size": f"{size}x{size}"}).encode()
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST /v1/images/generations HTTP/1.1\r\n{fields}\r\n\r\n"
    connections, control = [connect(port) for _ in range(CLIENTS)], connect(port)
    for _ in sys.stdin:
        burst(connections, head.encode() + body, control)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
