# SPDX-License-Identifier: Apache-2.0
"""A proxy inside the process of a fetch, for a library that resolves names by itself: it connects to checked addresses only.

It listens on loopback and requires a random password, so no other process of the machine can use it.
"""

import base64
import secrets
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from diffusion_worker.errors import RequestError
from diffusion_worker.sources.transport_rules import Reach, allowed_addresses, require_scheme

CONNECT_TIMEOUT_S = 10.0
# Headers that are between the library and this proxy.
OWN_HEADERS = frozenset({"proxy-authorization", "proxy-connection", "connection"})


class _Relay(ThreadingHTTPServer):
    def __init__(self, reach: Reach, *, allow_http: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reach, self.allow_http = reach, allow_http
        self.password = secrets.token_urlsafe(24)
        self.expected = "Basic " + base64.b64encode(f"relay:{self.password}".encode()).decode()


class _Handler(BaseHTTPRequestHandler):
    server: _Relay

    def do_CONNECT(self) -> None:
        """Open a tunnel for TLS to an allowed address; the library itself checks the certificate."""
        host, _, port = self.path.rpartition(":")
        if (upstream := self._connect(host.strip("[]"), int(port) if port.isdecimal() else 0)) is not None:
            self.send_response_only(HTTPStatus.OK)
            self.end_headers()
            self._tunnel(upstream)

    def do_GET(self) -> None:
        """Forward a request over plain http as a GET without a body; answer 403 where http is not allowed."""
        parts = urlsplit(self.path)
        try:
            require_scheme(parts.scheme, allow_http=self.server.allow_http)
            port = parts.port or 80
        except (RequestError, ValueError):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        if (upstream := self._connect(parts.hostname or "", port)) is not None:
            kept = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items() if name.lower() not in OWN_HEADERS)
            target = parts._replace(scheme="", netloc="").geturl() or "/"
            upstream.sendall(f"GET {target} HTTP/1.1\r\n{kept}Connection: close\r\n\r\n".encode("latin-1"))
            self._tunnel(upstream)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Write nothing: an address may hold a signature."""

    def _connect(self, host: str, port: int) -> socket.socket | None:
        """Check the password and the host, and return a connection to its first address; None after an error was sent as the answer."""
        self.close_connection = True
        if not secrets.compare_digest(self.headers.get("Proxy-Authorization", ""), self.server.expected):
            self.send_error(HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)
            return None
        try:
            addresses = allowed_addresses(host, port, self.server.reach)
            return socket.create_connection((addresses[0], port), CONNECT_TIMEOUT_S)
        except RequestError:
            self.send_error(HTTPStatus.FORBIDDEN)
        except OSError:
            self.send_error(HTTPStatus.BAD_GATEWAY)
        return None

    def _tunnel(self, upstream: socket.socket) -> None:
        """Copy both ways until one side ends; the fetch has a deadline of its own."""
        other = {upstream: self.connection, self.connection: upstream}
        upstream.settimeout(None)
        with upstream, selectors.DefaultSelector() as ready:
            for side in other:
                ready.register(side, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    side = upstream if key.fileobj is upstream else self.connection
                    if not (content := side.recv(65_536)):
                        return
                    other[side].sendall(content)


@contextmanager
def relay(reach: Reach, *, allow_http: bool) -> Iterator[str]:
    """Run a proxy on loopback until the end of the block; yield its address, with the password in it. `allow_http` lets plain http pass."""
    with _Relay(reach, allow_http=allow_http) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), name="relay", daemon=True).start()
        try:
            yield f"http://relay:{server.password}@127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
