# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that can withhold the server's answers: from open connections, or from all of them, as a hung server does. It can
also be cut: then nothing passes either way, as without a network.

Real: both ends and every byte, TLS included, which the proxy does not decode. Not real: the silence. Unless the proxy is cut, requests
still reach the server: it acts on them, but no client gets an answer.
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
    """A proxy in front of the server that a kubeconfig names; a context manager with threads of its own, so that the test may block."""

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
        """An event for each connection; answers pass while it is set."""

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.resume()

    def stall(self) -> None:
        """Withhold the server's answers from the connections that are open now; new connections still get theirs."""
        with self.lock:
            for flowing in self.flowing:
                flowing.clear()

    def silence(self) -> None:
        """Withhold the server's answers from all connections, new ones included."""
        self.silent = True
        self.stall()

    def cut(self) -> None:
        """Forward nothing in either direction, on any connection."""
        self.connected.clear()
        self.silence()

    def resume(self) -> None:
        """Forward everything again, including the bytes that were withheld."""
        self.connected.set()
        with self.lock:
            self.silent = False
            for flowing in self.flowing:
                flowing.set()

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig that connects through the proxy into `folder`, and return its path.

        The server's certificate is valid for every port of its address.
        """
        self._document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.server_address[1]}"
        made = folder / "kubeconfig-through-proxy"
        made.write_text(json.dumps(self._document))
        return made


class _Connection(socketserver.BaseRequestHandler):
    """A forwarded connection, which lasts until either side ends it."""

    server: StallingProxy

    def handle(self) -> None:
        flowing = threading.Event()
        with self.server.lock:
            self.server.flowing.add(flowing)
            if not self.server.silent:
                flowing.set()
        # A server that refuses ends the connection.
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
