# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that can stop forwarding what the server says: to the connections that there are, as a load balancer that
lost them, or to all of them, as a server that stands still. It can also be cut: then nothing goes either way, as without a network.

Real: both ends and every byte, TLS included, which it does not understand. Not real: the silence. Unless it is cut, clients are
heard: the server does what it is asked for, and nobody gets an answer.
"""

import contextlib
import json
import socket
import socketserver
import threading
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

CHUNK = 65536


class StallingProxy(socketserver.ThreadingTCPServer):
    """In front of the server that a kubeconfig names; a context manager with threads of its own, so that the test may block."""

    daemon_threads = True
    request_queue_size = 100

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self._document = json.loads(kubeconfig.read_text())
        parts = urlsplit(self._document["clusters"][0]["cluster"]["server"])
        self.target = (parts.hostname, parts.port)
        self.lock = threading.Lock()
        self.silent = False
        self.connected = threading.Event()
        self.connected.set()
        self.flowing: set[threading.Event] = set()
        """A connection each."""

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.resume()

    def stall(self) -> None:
        """The connections that there are hear no more from the server; new ones do."""
        with self.lock:
            for flowing in self.flowing:
                flowing.clear()

    def silence(self) -> None:
        """No connection hears from the server any more, new ones included."""
        self.silent = True
        self.stall()

    def cut(self) -> None:
        """Nothing goes either way, of no connection."""
        self.connected.clear()
        self.silence()

    def resume(self) -> None:
        """All go on, with what was kept back."""
        self.connected.set()
        with self.lock:
            self.silent = False
            for flowing in self.flowing:
                flowing.set()

    def kubeconfig(self, folder: Path) -> Path:
        """Write the kubeconfig of a client that connects through here; the server's certificate is valid for every port of its address."""
        self._document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.server_address[1]}"
        made = folder / "kubeconfig-through-proxy"
        made.write_text(json.dumps(self._document))
        return made


class _Connection(socketserver.BaseRequestHandler):
    """Lasts until either side ends it."""

    server: StallingProxy

    def handle(self) -> None:
        flowing = threading.Event()
        with self.server.lock:
            self.server.flowing.add(flowing)
            if not self.server.silent:
                flowing.set()
        # A server that is not there ends the connection.
        with contextlib.suppress(OSError), socket.create_connection(self.server.target) as to_server:
            threading.Thread(target=_pump, args=(to_server, self.request, flowing), daemon=True).start()
            _pump(self.request, to_server, self.server.connected)
        with self.server.lock:
            self.server.flowing.remove(flowing)
        flowing.set()


def _pump(source: socket.socket, target: socket.socket, flowing: threading.Event | None = None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            if flowing is not None:
                flowing.wait()
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
