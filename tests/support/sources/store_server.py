# SPDX-License-Identifier: Apache-2.0
"""A bucket and a hub for cluster tests, run in a pod by the worker image's own Python, from one folder.

Real: TLS, HTTP and the files. Not real: the bucket and the hub; it checks no signature, only that a client knows its key.
Arguments: folder, certificate, key, the key that clients must know.
"""

import http.server
import json
import re
import ssl
import sys
from pathlib import Path

PORT = 9000
RESOLVE = re.compile(r"/resolve/[0-9a-f]{40}")
COMMIT = "c" * 40
# What a test writes there is the commit that every branch is at from then on; nothing in it, and the hub has no repository any more.
MAIN = Path("/tmp/main")


class FakeStore(http.server.BaseHTTPRequestHandler):
    """`GET` and `HEAD` of `/BUCKET/KEY`, and of a hub's routes, whole or from an offset."""

    protocol_version = "HTTP/1.1"
    folder: Path
    access_key: str

    def do_GET(self) -> None:
        """Answer with a file, from the offset that is asked for."""
        path, _, query = self.path.partition("?")
        content = self._repository(path) if path.startswith("/api/models/") else self._read(RESOLVE.sub("", path))
        if self.access_key not in query and self.access_key not in self.headers.get("Authorization", ""):
            self._answer(403, b"")
        elif content is None:
            self._answer(404, b"")
        else:
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self._answer(206 if "Range" in self.headers else 200, content[start:], f"bytes {start}-{len(content) - 1}/{len(content)}")

    do_HEAD = do_GET

    def _read(self, path: str) -> bytes | None:
        file = self.folder.joinpath(*path.split("/")[2:])
        return file.read_bytes() if ".." not in path and file.is_file() else None

    def _repository(self, path: str) -> bytes | None:
        """What the repository `OWNER/FOLDER` has; at every commit the same."""
        owner, name, *revision = (part for part in path.split("/")[3:] if part != "revision")
        main = MAIN.read_text().strip() if MAIN.exists() else COMMIT
        top = self.folder / name
        found = [file for file in top.rglob("*") if file.is_file()] if main else []
        files = [{"rfilename": str(file.relative_to(top)), "size": file.stat().st_size, "blobId": "b" * 40} for file in found]
        commit = revision[0] if revision and len(revision[0]) == len(COMMIT) else main
        return json.dumps({"id": f"{owner}/{name}", "sha": commit, "siblings": files}).encode() if files else None

    def _answer(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"one"')
        if status == 206:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def serve(folder: str, certificate: str, key: str, access_key: str) -> None:
    """Until the pod ends."""
    FakeStore.folder, FakeStore.access_key = Path(folder), access_key
    server = http.server.ThreadingHTTPServer(("", PORT), FakeStore)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
