# SPDX-License-Identifier: Apache-2.0
"""Ordered sending of a rank's messages. A message that has to be made first, of an image, is made and sent by a thread beside the next
tick.

The holder of the lock owns the socket. The rank's main thread sends by itself while nothing waits, so a tick without images costs no change
of threads. Behind an image everything waits its turn.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from diffusion_worker.messages import ToServer

Frames = Sequence[memoryview]
Said = tuple[ToServer, Frames]

# An image on a device that has stopped never comes; the rank's last words wait no longer for it.
LAST_WORDS_S = 5.0


class RankSender:
    """Use from the rank's main thread. `send` puts a message on the wire."""

    def __init__(self, send: Callable[[ToServer, Frames], None]) -> None:
        self._send = send
        self._waiting: deque[Callable[[], Said]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def send(self, message: ToServer) -> None:
        """Send a message after all before it; does not wait for those. Raises what ended the thread."""
        with self._changed:
            self.check()
            if not self._waiting:
                self._send(message, ())
                return
        self.send_when_ready(lambda: (message, ()))

    def send_when_ready(self, make: Callable[[], Said]) -> None:
        """Send what `make` returns, which is called in the thread. Raises what ended that; `make` may raise nothing else."""
        with self._changed:
            self.check()
            self._waiting.append(make)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises what ended the thread."""
        if self._error is not None:
            raise self._error

    def flush(self, timeout_s: float | None = None) -> None:
        """Returns when all was sent, or the time is over. Raises what ended the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._error is not None, timeout_s)
            self.check()

    def send_final(self, message: ToServer) -> None:
        """Send a message after all that can still be sent."""
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
                    # Only now: a concurrent sender has to see that something is before it.
                    self._waiting.popleft()
                    self._changed.notify_all()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            # Images are large: none is held until the next one comes.
            del make, message, frames
