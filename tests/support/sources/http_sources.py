# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on loopback with files that it serves well, badly, or not at all; it counts what it is asked for."""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Served:
    """One path: its bytes, and what is wrong with how it is served."""

    content: bytes = b""
    ranges: bool = True
    if_range: bool = True
    # Sends so many bytes of each answer, then closes the connection, or waits for `gate` and sends the rest.
    break_after: int | None = None
    gate_after: int | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    # What it says its length is; False says none at all.
    length: int | bool | None = None
    redirect: str | None = None
    status: int | None = None
    etag: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    # What it serves at the next request.
    then: "Served | None" = None

    @property
    def sha256(self) -> str:
        """Of its bytes, in hex."""
        return hashlib.sha256(self.content).hexdigest()


class SourceServer:
    """Serves `files` by their paths; with a token it wants that as a bearer's."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.token: str | None = None
        self.asked: Counter[str] = Counter()
        self.ranges: list[str | None] = []
        self.authorizations: list[str | None] = []
        # Reached when an answer waits at its gate.
        self.at_gate = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def find(self, method: str, path: str) -> Served | None:
        """What is at a path."""
        return self.files.get(path)

    @contextmanager
    def running(self) -> Iterator["SourceServer"]:
        """Serve until the end of the block."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            for served in self.files.values():
                served.gate.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join(5)


def _handler(server: SourceServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = urlsplit(self.path).path
            server.asked[path] += 1
            server.authorizations.append(self.headers.get("Authorization"))
            if server.token is not None and self.headers.get("Authorization") != f"Bearer {server.token}":
                return self._say(401)
            served = server.find(self.command, path)
            if served is None:
                return self._say(404)
            for _ in range(server.asked[path] - 1):
                served = served.then or served
            if served.status is not None:
                return self._say(served.status)
            if served.redirect is not None:
                return self._say(302, {"Location": served.redirect})
            return self._send(served, body=body)

        def _say(self, status: int, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": "0", **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()

        def _send(self, served: Served, *, body: bool) -> None:
            etag = served.etag or f'"{served.sha256[:16]}"'
            begin = self._begin(served, etag)
            content = served.content[begin:]
            self.send_response(206 if begin else 200)
            self.send_header("ETag", etag)
            for name, value in served.headers.items():
                self.send_header(name, value)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(served.content) - 1}/{len(served.content)}")
            if served.length is False:
                self.send_header("Connection", "close")
            else:
                self.send_header("Content-Length", str(len(content) if served.length is None else served.length))
            self.end_headers()
            if body:
                self._send_body(served, content)
            self.close_connection = True

        def _begin(self, served: Served, etag: str) -> int:
            asked = self.headers.get("Range")
            server.ranges.append(asked)
            if not asked or not served.ranges or (served.if_range and self.headers.get("If-Range", etag) != etag):
                return 0
            return int(asked.removeprefix("bytes=").rstrip("-"))

        def _send_body(self, served: Served, content: bytes) -> None:
            try:
                if served.break_after is not None:
                    self.wfile.write(content[: served.break_after])
                    return
                if served.gate_after is not None:
                    self.wfile.write(content[: served.gate_after])
                    self.wfile.flush()
                    server.at_gate.set()
                    served.gate.wait(60)
                    content = content[served.gate_after :]
                self.wfile.write(content)
            except OSError:
                pass  # whoever asked is gone

    return Handler
