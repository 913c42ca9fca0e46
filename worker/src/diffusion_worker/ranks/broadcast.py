# SPDX-License-Identifier: Apache-2.0
"""The wire between the server process and its ranks: one ZMQ broadcast down, one stream up, on Unix sockets.

The server waits for every rank's subscription before it sends anything, and no queue has a limit, so that no message is
dropped. Frames after the first are pictures, sent without a copy.
"""

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from diffusion_worker.messages import ToRank, ToServer, decode_to_rank, decode_to_server, encode


class Endpoints(msgspec.Struct, frozen=True):
    """Addresses of the broadcast and of the stream of answers."""

    broadcast: str
    answers: str


class ServerEnd:
    """The server's side, on its event loop. The sockets live in a folder that only this user can enter."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="diffusion-worker-")
        self.endpoints = Endpoints(
            broadcast=f"ipc://{Path(self._folder.name) / 'broadcast'}", answers=f"ipc://{Path(self._folder.name) / 'answers'}"
        )
        self._context = zmq.asyncio.Context()
        self._broadcast = _unlimited(self._context.socket(zmq.XPUB))
        self._broadcast.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._broadcast.bind(self.endpoints.broadcast)
        self._answers = _unlimited(self._context.socket(zmq.PULL))
        self._answers.bind(self.endpoints.answers)

    async def wait_for_ranks(self, count: int) -> None:
        """Returns when `count` ranks have subscribed."""
        for _ in range(count):
            await self._broadcast.recv()

    def send(self, message: ToRank) -> None:
        """Queue a message for every rank."""
        self._broadcast.send(encode(message))

    async def receive(self) -> tuple[ToServer, list[bytes | memoryview]]:
        """The next answer of any rank, with its frames."""
        head, *frames = await self._answers.recv_multipart(copy=False)
        return decode_to_server(head.bytes), [frame.buffer for frame in frames]

    def close(self) -> None:
        """Drop what is unsent and remove the sockets."""
        self._context.destroy(linger=0)
        self._folder.cleanup()


class RankEnd:
    """One rank's side. Use as a context manager: leaving it flushes what the rank said last."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context = zmq.Context()
        self._answers = _unlimited(self._context.socket(zmq.PUSH))
        self._answers.connect(endpoints.answers)
        self._broadcast = _unlimited(self._context.socket(zmq.SUB))
        self._broadcast.subscribe(b"")
        self._broadcast.connect(endpoints.broadcast)

    def __enter__(self) -> "RankEnd":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.destroy(linger=2000)

    def receive(self) -> ToRank:
        """The next message of the broadcast; waits for it."""
        return decode_to_rank(self._broadcast.recv())

    def send(self, message: ToServer, frames: list[memoryview] | None = None) -> None:
        """Answer the server."""
        self._answers.send_multipart([encode(message), *(frames or [])], copy=False)


def _unlimited(socket: Any) -> Any:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
