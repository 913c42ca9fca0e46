# SPDX-License-Identifier: Apache-2.0
"""Ports for programs of a test that must know theirs before they start."""

import contextlib
import secrets
import socket

# Below the ports of outgoing connections, which begin at 32768: one of those may be taken before the program listens. Services of a
# cluster have those from 30000 on.
FIRST, COUNT = 20_000, 10_000
TRIES = 100


def unused_port() -> int:
    """Return a port on which nothing listens now; raise OSError if none of 100 is free."""
    for _ in range(TRIES):
        port = FIRST + secrets.randbelow(COUNT)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError(f"expected a free port from {FIRST} to {FIRST + COUNT - 1}, found none in {TRIES} tries")
