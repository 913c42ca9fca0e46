# SPDX-License-Identifier: Apache-2.0
"""The wire between the server process and its ranks: one ZMQ broadcast down, one stream up, on Unix sockets.

The server waits for every rank's subscription before it sends anything, and no queue has a limit, so that no message is dropped. Frames
after the first are images, sent without a copy. Bytes that are no message are counted and never acted on.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from diffusion_worker.messages import Tick, ToRank, ToServer, decode_to_rank, decode_to_server, encode

SUBSCRIBED = b"\x01"
# A rank that waits for the next message calls its idle function this often.
IDLE_MS = 1000
FOLDER_PREFIX = "diffusion-worker-"
LOCK = "lock"
# A younger folder may belong to a server that has not locked it yet.
ABANDONED_S = 60.0
# Errors that msgspec raises for bytes that are no message.
NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def remove_abandoned_folders(place: Path) -> None:
    """Delete the sockets' folders in `place` that a server left when it was killed at its start.

    Locked folders stay, and so do those under a minute old or without a lock file.
    """
    for folder in place.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another server removes it too, or holds it
            if time.time() - folder.stat().st_mtime < ABANDONED_S:
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


class Endpoints(msgspec.Struct, frozen=True):
    """Addresses of the broadcast and of the stream of answers."""

    broadcast: str
    answers: str


class ServerEnd:
    """The server's side, on its event loop. The sockets live in a folder that only this user can enter."""

    def __init__(self) -> None:
        remove_abandoned_folders(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._lock: int | None = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.dropped = 0
        self.endpoints = Endpoints(broadcast=f"ipc://{self.folder / 'broadcast'}", answers=f"ipc://{self.folder / 'answers'}")
        self._context = zmq.asyncio.Context()
        self._broadcast = _unlimited(self._context.socket(zmq.XPUB))
        self._broadcast.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._broadcast.bind(self.endpoints.broadcast)
        self._answers = _unlimited(self._context.socket(zmq.PULL))
        self._answers.bind(self.endpoints.answers)

    async def wait_for_ranks(self, count: int) -> None:
        """Wait for `count` subscriptions to the broadcast. Messages sent before would not reach all ranks."""
        while count:
            count -= await self._broadcast.recv() == SUBSCRIBED

    def hide(self) -> None:
        """Delete the sockets' folder once every rank is connected: nobody else can connect, and a killed server leaves no files.

        Connections stay open. Calling again does nothing.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def send(self, message: ToRank, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Queue a message and its frames to all ranks, without waiting. Frames are not copied, so they must not change afterwards."""
        if frames:
            self._broadcast.send_multipart([encode(message), *frames], copy=False)
        else:
            self._broadcast.send(encode(message))

    async def receive(self) -> tuple[ToServer, list[bytes | memoryview]]:
        """Wait for the next message of a rank, and return it with its frames as buffers that were not copied.

        Messages that cannot be decoded are skipped and counted in `dropped`.
        """
        while True:
            head, *frames = await self._answers.recv_multipart(copy=False)
            try:
                return decode_to_server(head.bytes), [frame.buffer for frame in frames]
            except NO_MESSAGE:
                self.dropped += 1

    def close(self) -> None:
        """Close both sockets without waiting for queued messages, and delete their folder if `hide` has not."""
        self._context.destroy(linger=0)
        self.hide()


class RankEnd:
    """A rank's side. Use as a context manager: leaving it waits up to two seconds for unsent messages."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.dropped = 0
        self._context = zmq.Context()
        self._answers = _unlimited(self._context.socket(zmq.PUSH))
        self._answers.connect(endpoints.answers)
        self._broadcast = _unlimited(self._context.socket(zmq.SUB))
        self._broadcast.subscribe(b"")
        self._broadcast.setsockopt(zmq.RCVTIMEO, IDLE_MS)
        self._broadcast.connect(endpoints.broadcast)

    def __enter__(self) -> "RankEnd":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.destroy(linger=2000)

    def receive(self, on_dropped: Callable[[int], None], on_idle: Callable[[], None] = lambda: None) -> tuple[ToRank, list[bytes]]:
        """Wait for the next message of the broadcast, and return it with its frames; call `on_idle` about once a second meanwhile.

        Malformed messages are skipped, and `on_dropped` is called with their number so far.
        """
        while True:
            try:
                head, *frames = self._broadcast.recv_multipart()
            except zmq.Again:
                on_idle()
                continue
            # A message with more or fewer parts than it declares is dropped, and its parts must not be taken for messages.
            try:
                message = decode_to_rank(head)
                if len(frames) == (sum(message.frames) if isinstance(message, Tick) else 0):
                    return message, frames
            except NO_MESSAGE:
                pass
            self.dropped += 1
            on_dropped(self.dropped)

    def send(self, message: ToServer, frames: Sequence[memoryview] = ()) -> None:
        """Queue an answer with its frames, which are not copied.

        The socket is not thread-safe, so callers take turns, as by `RankSender`'s lock.
        """
        self._answers.send_multipart([encode(message), *frames], copy=False)


def _unlimited(socket: Any) -> Any:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
