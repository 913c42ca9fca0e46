# SPDX-License-Identifier: Apache-2.0
"""An S3 server on loopback, and what a test puts there.

Real: HTTP and its sockets. Not real: S3, which is moto's; it checks signatures for their form only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import quote

import httpx2
from moto.server import ThreadedMotoServer

VERSIONING = b'<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>Enabled</Status></VersioningConfiguration>'


class S3Server(NamedTuple):
    """The endpoint `url`; a test's own requests to it need no signature."""

    url: str

    def put(self, bucket: str, files: dict[str, bytes], *, versioned: bool = False) -> None:
        """Make a bucket with these objects."""
        self._send("PUT", f"/{bucket}")
        if versioned:
            self._send("PUT", f"/{bucket}?versioning", VERSIONING)
        for key, content in files.items():
            self._send("PUT", f"/{bucket}/{quote(key)}", content)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self._send("DELETE", f"/{bucket}/{quote(key)}")

    def _send(self, method: str, path: str, body: bytes = b"") -> None:
        answer = httpx2.request(method, self.url + path, content=body, headers={"x-amz-acl": "public-read"}, timeout=10)
        assert answer.status_code < 300, f"{method} {path}: {answer.status_code} {answer.text[:300]}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """An empty server until the end of the block."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    httpx2.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
    try:
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()
