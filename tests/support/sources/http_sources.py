# SPDX-License-Identifier: Apache-2.0
"""A server of files on loopback that counts what it is asked for.

Real: HTTP and its sockets. Not real: the files, each of which it serves well, badly or not at all, as a test says.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "SourceServer"

    def do_GET(self) -> None:
        served = self._served(urlsplit(self.path).path, self.headers.get("Authorization"))
        if served.status is not None:
            self._send_head(served.status, {"Content-Length": "0"})
        elif served.redirect is not None:
            self._send_head(302, {"Content-Length": "0", "Location": served.redirect})
        else:
            self._send_file(served)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _served(self, path: str, authorization: str | None) -> Served:
        self.server.asked[path] += 1
        self.server.authorizations.append(authorization)
        if self.server.token is not None and authorization != f"Bearer {self.server.token}":
            return Served(status=401)
        served = self.server.find(path) or Served(status=404)
        for _ in range(self.server.asked[path] - 1):
            served = served.then or served
        return served

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_file(self, served: Served) -> None:
        etag = served.etag or f'"{served.sha256[:16]}"'
        begin, size = self._begin(served, etag), len(served.content)
        headers = {"ETag": etag, **served.headers}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{size - 1}/{size}"
        if served.length is False:
            headers["Connection"] = "close"
        else:
            headers["Content-Length"] = str(size - begin if served.length is None else served.length)
        self._send_head(206 if begin else 200, headers)
        if self.command == "GET":
            self._send_body(served, served.content[begin:])
        self.close_connection = True

    def _begin(self, served: Served, etag: str) -> int:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        if not asked or not served.ranges or (served.if_range and self.headers.get("If-Range", etag) != etag):
            return 0
        return int(asked.removeprefix("bytes=").rstrip("-"))

    def _send_body(self, served: Served, content: bytes) -> None:
        with suppress(OSError):  # the client is gone
            if served.gate_after is not None and served.break_after is None:
                self.wfile.write(content[: served.gate_after])
                self.wfile.flush()
                self.server.at_gate.set()
                served.gate.wait(60)
                content = content[served.gate_after :]
            self.wfile.write(content[: served.break_after])


class SourceServer(ThreadingHTTPServer):
    """Serves `files` by their paths; with a token it wants that as a bearer's."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, Served] = {}
        self.token: str | None = None
        self.asked: Counter[str] = Counter()
        self.ranges: list[str | None] = []
        self.authorizations: list[str | None] = []
        # Reached when an answer waits at its gate.
        self.at_gate = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def find(self, path: str) -> Served | None:
        """What is at a path."""
        return self.files.get(path)

    @contextmanager
    def running(self) -> Iterator["SourceServer"]:
        """Serve until the end of the block."""
        thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            for served in self.files.values():
                served.gate.set()
            self.shutdown()
            self.server_close()
            thread.join(5)
