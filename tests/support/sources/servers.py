# SPDX-License-Identifier: Apache-2.0
"""Servers of files that count requests: at plain addresses, as a hub, and for cluster tests as a bucket too.

Real: HTTP and its sockets, and TLS in a pod. Not real: the hub, the bucket and the files, each of which is served well, badly or not at
all, as a test says. A pod runs this file with the worker image's own Python, so it imports the standard library alone. Arguments there:
folder, certificate, key, the key that clients must know, without a check of signatures.
"""

import hashlib
import json
import re
import ssl
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
PORT = 9000
COMMIT = "c" * 40
# In a pod a test writes the commit of every branch to this file. With an empty file the hub has no repository any more.
MAIN = Path("/tmp/main")


@dataclass
class Served:
    """The bytes of one path, and the faults of the server for it."""

    content: bytes = b""
    ranges: bool = True
    if_range: bool = True
    # So many bytes of each answer are sent. Then the connection is closed, or the rest follows when `gate` is set.
    break_after: int | None = None
    gate_after: int | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    # The Content-Length header; False: there is none.
    length: int | bool | None = None
    redirect: str | None = None
    status: int | None = None
    etag: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    # The answer to the next request.
    then: "Served | None" = None

    @property
    def sha256(self) -> str:
        """The SHA-256 digest of the content, as 64 hex digits without a prefix."""
        return hashlib.sha256(self.content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "SourceServer"

    def do_GET(self) -> None:
        served = self.server.answer(self.path, self.headers.get("Authorization"))
        if served.status is not None:
            self._send_head(served.status, {"Content-Length": "0"})
        elif served.redirect is not None:
            self._send_head(302, {"Content-Length": "0", "Location": served.redirect})
        else:
            self._send_file(served)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_file(self, served: Served) -> None:
        etag = served.etag or f'"{served.sha256[:16]}"'
        begin, size = self._begin(served, etag), len(served.content)
        headers = {"ETag": etag, "Connection": "close", **served.headers}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{size - 1}/{size}"
        if served.length is not False:
            headers["Content-Length"] = str(size - begin if served.length is None else served.length)
        self._send_head(206 if begin else 200, headers)
        if self.command == "GET":
            self._send_body(served, served.content[begin:])

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
    """A server of `files` by their paths, and of repositories by name. A `token` that is set must come as the bearer's.

    Every `push` is a commit, to which `main` or the given branch then points.
    """

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, _Handler)
        self.files: dict[str, Served] = {}
        self._commits: dict[str, dict[str, Served]] = {}
        self._branches: dict[tuple[str, str], str] = {}
        self.token: str | None = None
        self.asked: Counter[str] = Counter()
        self.ranges: list[str | None] = []
        self.authorizations: list[str | None] = []
        # Set when an answer waits at its gate.
        self.at_gate = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, target: str, authorization: str | None) -> Served:
        """Count a request by its path, and return its answer: 401 without the `token` that is set, 404 for an unknown path.

        The n-th request of a path gets the n-th answer of its chain of `then`, and later ones get the last.
        """
        path = urlsplit(target).path
        self.asked[path] += 1
        self.authorizations.append(authorization)
        if self.token is not None and authorization != f"Bearer {self.token}":
            return Served(status=401)
        served = self.find(path) or Served(status=404)
        for _ in range(self.asked[path] - 1):
            served = served.then or served
        return served

    @contextmanager
    def running(self) -> Iterator["SourceServer"]:
        """Serve in a background thread while the block runs; then open all gates of `files`, so that no answer waits, and close."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield self
        finally:
            for served in self.files.values():
                served.gate.set()
            self.shutdown()
            self.server_close()

    def push(self, repo: str, files: dict[str, bytes | Served], *, branch: str = "main") -> str:
        """Let a branch show these `files`, given as bytes or `Served`. Returns their commit id, hashed from repository, paths and
        contents; earlier commits stay available."""
        served = {path: file if isinstance(file, Served) else Served(file) for path, file in files.items()}
        state = "".join(f"{path} {file.sha256}\n" for path, file in sorted(served.items()))
        commit = hashlib.sha1(f"{repo} {state}".encode()).hexdigest()
        self._commits[f"{repo}@{commit}"] = served
        self._branches[repo, branch] = commit
        return commit

    def delete(self, repo: str) -> None:
        """Delete a repository with all its files."""
        self._branches = {key: commit for key, commit in self._branches.items() if key[0] != repo}
        self._commits = {key: files for key, files in self._commits.items() if not key.startswith(f"{repo}@")}

    def find(self, path: str) -> Served | None:
        """Look up a URL's path: first in `files`, then as a repository's description or one of its files. Return None if it is neither."""
        path = unquote(path)
        if path in self.files:
            return self.files[path]
        if about := INFO.fullmatch(path):
            return self._info(about[1], self.commit_of(about[1], about[2] or "main"))
        found = FILE.fullmatch(path)
        return self.files_at(found[1], found[2]).get(found[3]) if found else None

    def commit_of(self, repo: str, revision: str) -> str:
        """Return the commit of a branch; a revision that is no branch is returned unchanged."""
        return self._branches.get((repo, revision), revision)

    def files_at(self, repo: str, commit: str) -> dict[str, Served]:
        """Return a commit's files; none where there is no such commit."""
        return self._commits.get(f"{repo}@{commit}", {})

    def _info(self, repo: str, commit: str) -> Served | None:
        siblings: list[dict[str, object]] = []
        for path, file in self.files_at(repo, commit).items():
            blob_id = hashlib.sha1(b"blob %d\0" % len(file.content) + file.content).hexdigest()
            siblings.append({"rfilename": path, "size": len(file.content), "blobId": blob_id})
            if path.endswith((".safetensors", ".bin")):
                siblings[-1]["lfs"] = {"sha256": file.sha256, "size": len(file.content), "pointerSize": 130}
        answer = {"id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings}
        return Served(json.dumps(answer).encode(), headers={"Content-Type": "application/json"}) if siblings else None


class FolderServer(SourceServer):
    """A server that shows a folder both as buckets, under `/BUCKET/KEY`, and as hub repositories. Without the access key in the address
    or header, it answers 403."""

    def __init__(self, folder: Path, access_key: str) -> None:
        super().__init__(("", PORT))
        self._folder, self._access_key = folder, access_key

    def answer(self, target: str, authorization: str | None) -> Served:
        return super().answer(target, authorization) if self._access_key in f"{target} {authorization}" else Served(status=403)

    def find(self, path: str) -> Served | None:
        file = self._folder.joinpath(*path.split("/")[2:])
        return super().find(path) or (Served(file.read_bytes()) if ".." not in path and file.is_file() else None)

    def commit_of(self, repo: str, revision: str) -> str:
        main = MAIN.read_text().strip() if MAIN.exists() else COMMIT
        return revision if main and len(revision) == len(COMMIT) else main

    def files_at(self, repo: str, commit: str) -> dict[str, Served]:
        top = self._folder / repo.partition("/")[2]
        return {str(file.relative_to(top)): Served(file.read_bytes()) for file in top.rglob("*") if commit and file.is_file()}


if __name__ == "__main__":
    server = FolderServer(Path(sys.argv[1]), sys.argv[4])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*sys.argv[2:4])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
