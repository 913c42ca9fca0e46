# SPDX-License-Identifier: Apache-2.0
"""Ordered sending of a rank's messages. Messages with images are made and sent by a thread, beside the next tick.

The holder of the lock owns the socket. The rank's main thread sends by itself while nothing waits, so a tick without images costs no change
of threads. Messages behind an image wait for it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from diffusion_worker.messages import ToServer

Frames = Sequence[memoryview]
Said = tuple[ToServer, Frames]

# The final message waits this long for those before it: an image on a device that has stopped never comes.
LAST_WORDS_S = 5.0


class RankSender:
    """A queue that keeps a rank's messages in order. Only the rank's main thread calls its methods.

    The function given to it writes to the socket, under a lock.
    """

    def __init__(self, send: Callable[[ToServer, Frames], None]) -> None:
        self._send = send
        self._waiting: deque[Callable[[], Said]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def send(self, message: ToServer) -> None:
        """Send a message after all before it, without waiting for those. Raise the error that ended the thread, if it has ended."""
        with self._changed:
            self.check()
            if not self._waiting:
                self._send(message, ())
                return
        self.send_when_ready(lambda: (message, ()))

    def send_when_ready(self, make: Callable[[], Said]) -> None:
        """Queue the result of `make`, which the thread calls and sends; return at once. Exceptions of `make` end the thread.

        Raise the error that ended the thread, if it has ended.
        """
        with self._changed:
            self.check()
            self._waiting.append(make)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise the exception with which sending failed, if it did.

        An idle rank calls it about once a second, so that a failure ends it soon.
        """
        if self._error is not None:
            raise self._error

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all messages are sent, or return after `timeout_s` seconds (None: no limit) with some left.

        Raise the error that ended the thread, if it has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._error is not None, timeout_s)
            self.check()

    def send_final(self, message: ToServer) -> None:
        """Wait up to `LAST_WORDS_S` for the queue to empty, then send this message in any case, even if the thread has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._error is not None, LAST_WORDS_S)
            self._send(message, ())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                make = self._waiting[0]
            try:
                message, frames = make()
                with self._changed:
                    self._send(message, frames)
                    # Remove it only after sending, so that a concurrent sender sees that something is before its message.
                    self._waiting.popleft()
                    self._changed.notify_all()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            # Images are large, so none is held while waiting for the next one.
            del make, message, frames
