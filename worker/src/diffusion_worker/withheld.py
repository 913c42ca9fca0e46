# SPDX-License-Identifier: Apache-2.0
"""Keeps the texts of requests out of every log of a process, whatever library writes it.

diffusers warns of a truncated prompt with its words, and an exception may quote a prompt in its message. From the end of the
load on, a record of a library keeps only the place where it was written. A traceback has its lines, and the messages of those
exceptions that cannot have seen a text. Before the load ends no request was there, and all is logged as it is.
"""

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from diffusion_worker.errors import ConfigError, GroupFailed

# Loggers whose messages are written here, and name no text.
OURS = ("diffusion_worker", "uvicorn")

log = logging.getLogger(__name__)
_serving = False


class WithheldRecord(logging.LogRecord):
    """A record without what a request may have said. A class serves every logger, also one that does not propagate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not _serving:
            return
        error = self.exc_info[1] if isinstance(self.exc_info, tuple) else None
        if self.name.partition(".")[0] not in OURS:
            self.msg = f"{self.name}: a message of {self.filename}:{self.lineno} is withheld, as it may quote a request"
            self.args = ()
        if error is not None:
            self.exc_text, self.exc_info = traceback_of(error), None


def install() -> None:
    """Make every record of this process one that can be withheld, and records of warnings and of exceptions that nothing caught."""
    logging.setLogRecordFactory(WithheldRecord)
    logging.captureWarnings(True)
    # Python would write these itself, with their messages.
    threading.excepthook = lambda ended: _log_uncaught(ended.exc_value, f"in thread {ended.thread.name if ended.thread else None}")
    sys.unraisablehook = lambda lost: _log_uncaught(lost.exc_value, "that could not be raised")


def _log_uncaught(error: BaseException | None, where: str) -> None:
    # A thread may end itself by SystemExit, which is no error.
    if error is not None and not isinstance(error, SystemExit):
        log.error("uncaught exception %s", where, exc_info=error)


def withhold(serving: bool = True) -> None:
    """From now on requests may be there."""
    global _serving
    _serving = serving


def traceback_of(error: BaseException) -> str:
    """A traceback as Python writes it, but for messages that may quote a request."""
    return "\n".join(part for one in reversed(list(_chain(error))) for part in (_frames(one), words_of(one)) if part)


def words_of(error: BaseException) -> str:
    """Kind and message of an error; the kind alone where the message may quote a request."""
    kind = type(error).__name__
    return f"{kind}: {error}" if _may_be_told(error) else f"{kind} (its message is withheld, as it may quote a request)"


def _may_be_told(error: BaseException) -> bool:
    """Options and ranks quote no text, and torch never sees one. The client of a refused request has its message anyway."""
    if not _serving or isinstance(error, ConfigError | GroupFailed | MemoryError):
        return True
    if type(error).__module__.partition(".")[0] == "torch":
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/torch/" in frames[-1].filename


def _frames(error: BaseException) -> str:
    lines = traceback.format_tb(error.__traceback__)
    return "".join(["Traceback (most recent call last):\n", *lines]).rstrip() if lines else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it came from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
