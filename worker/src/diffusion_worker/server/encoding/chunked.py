# SPDX-License-Identifier: Apache-2.0
"""Large bodies in pieces, made and sent one after the other.

Base64 of an image in one call would keep the GIL, and so the event loop, for many steps of a small model. A single body of many megabytes
would be copied on the loop.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Pieces = list[bytes]

# A multiple of 3, so that pieces of base64 follow each other without padding. A piece takes a fraction of a millisecond.
PIECE_BYTES = 98_304


class PiecedResponse(Response):
    """An answer whose body is sent piece by piece, as the client takes them."""

    def __init__(self, pieces: Sequence[bytes], media_type: str) -> None:
        super().__init__(media_type=media_type)
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole answer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send_piece(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_piece(send: Send, piece: bytes) -> None:
    """Send a part of a body, and yield to the event loop: `send` itself waits only while the socket is full."""
    await send({"type": "http.response.body", "body": piece, "more_body": True})
    await asyncio.sleep(0)


def cut(content: bytes) -> Pieces:
    """Slice a body into pieces of `PIECE_BYTES`, the last one possibly shorter; an empty body has none."""
    return [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]


def json_with_file(file: bytes, content: Mapping[str, object], *, url_of: str | None = None) -> Pieces:
    """Encode `{"b64_json": …}` followed by the fields of `content`, in pieces; empty content would make invalid JSON.

    With a media type in `url_of` the first field is `url` instead, a data URL of the file.
    """
    head = b'{"b64_json":"' if url_of is None else f'{{"url":"data:{url_of};base64,'.encode()
    return [head, *map(base64.b64encode, cut(file)), b'",' + msgspec.json.encode(content)[1:]]
