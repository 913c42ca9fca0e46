# SPDX-License-Identifier: Apache-2.0
"""The answer to a watch: lines of JSON, one an event, until the API server ends it."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from diffusion_operator.errors import ClusterUnavailable

WATCH_S = 600
"""After which the API server ends a watch."""
TIMEOUT = aiohttp.ClientTimeout(total=WATCH_S + 60, sock_connect=10, sock_read=70)  # a bookmark comes about once a minute


class Event(msgspec.Struct, frozen=True):
    """A line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK. A bookmark has a version alone."""
    object: dict[str, Any]


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
