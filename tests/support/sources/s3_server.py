# SPDX-License-Identifier: Apache-2.0
"""moto's S3 server as a process of its own on loopback, and what a test puts there."""

import http.client
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

START_S = 30.0


class S3Server:
    """One server; requests to it need no signature, but it checks those that have one for their form only."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def put(self, bucket: str, files: dict[str, bytes], *, versioned: bool = False) -> None:
        """Make a bucket with these objects."""
        self._send("PUT", f"/{bucket}")
        if versioned:
            wish = b'<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>Enabled</Status></VersioningConfiguration>'
            self._send("PUT", f"/{bucket}?versioning", wish)
        for key, content in files.items():
            self._send("PUT", f"/{bucket}/{quote(key)}", content)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self._send("DELETE", f"/{bucket}/{quote(key)}")

    def _send(self, method: str, path: str, body: bytes = b"") -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body, {"x-amz-acl": "public-read"})
            answer = connection.getresponse()
            assert answer.status < 300, f"{method} {path}: {answer.status} {answer.read()[:300]!r}"
        finally:
            connection.close()


@contextmanager
def s3_server(port: int) -> Iterator[S3Server]:
    """A server until the end of the block."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            server, ends_at = S3Server(port), time.monotonic() + START_S
            while not _answers(port):
                assert process.poll() is None and time.monotonic() < ends_at, "moto's server did not start"
            yield server
        finally:
            process.kill()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/moto-api/")
        return connection.getresponse().status == 200
    except OSError:
        time.sleep(0.05)
        return False
    finally:
        connection.close()
