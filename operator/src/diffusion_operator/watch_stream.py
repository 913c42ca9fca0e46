# SPDX-License-Identifier: Apache-2.0
"""The answer to a watch: lines of JSON, one an event, until the API server ends it."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from diffusion_operator.errors import ClusterUnavailable

WATCH_S = 600
"""After which the API server ends a watch."""
CLIENT_S = WATCH_S + 60
"""After which our side does."""
SILENT_S = 70
"""After which a watch that brings nothing is opened again; a bookmark comes about once a minute."""


class Event(msgspec.Struct, frozen=True):
    """A line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK. A bookmark has a version alone."""
    object: dict[str, Any]


def limits() -> aiohttp.ClientTimeout:
    """Return the time limits of a watch."""
    return aiohttp.ClientTimeout(total=CLIENT_S, sock_connect=10, sock_read=SILENT_S)


async def read_events(request: str, content: aiohttp.StreamReader) -> AsyncIterator[Event]:
    """Yield the events of a watch until it ends, from lines of any length: a ConfigMap has up to a mebibyte.

    An ERROR is raised as ClusterUnavailable, with the API server's code.
    """
    rest, decoder = b"", msgspec.json.Decoder(Event)
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            event = decoder.decode(line)
            if event.type == "ERROR":
                code, said = int(event.object.get("code", 500)), str(event.object.get("message", ""))
                raise ClusterUnavailable(f"{request}: the API server ended it: {code} {said}", status=code, said=said)
            yield event
