# SPDX-License-Identifier: Apache-2.0
"""A filter that keeps the texts of requests out of every log of a process, whichever library writes it.

diffusers warns of a truncated prompt and quotes it, and an exception's message may quote a prompt. Once the load has ended, a
library's warnings are left out, and its errors keep only the place where they were written. A traceback keeps its lines, and the messages
of those exceptions that cannot quote a request. Before the load ends there are no requests, so everything is logged in full.
"""

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from diffusion_worker.errors import ConfigError, GroupFailed

# Loggers of this package and of uvicorn: their messages quote no request.
OURS = ("diffusion_worker", "uvicorn")

log = logging.getLogger(__name__)
_serving = False
# The levels of libraries' loggers before `withhold` raised them, by the name of the topmost logger.
_levels: dict[str, int] = {}


class WithheldRecord(logging.LogRecord):
    """A log record that, after `withhold`, has no text that may quote a request: no library's message, and no exception's.

    Messages of this package and of uvicorn stay, and those of exceptions that cannot quote one. The class applies to every logger, even
    one that does not propagate.
    """

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
    """Make every log record of this process a `WithheldRecord`, and log warnings and uncaught exceptions as such records too."""
    logging.setLogRecordFactory(WithheldRecord)
    logging.captureWarnings(True)
    # Python prints uncaught exceptions with their messages.
    threading.excepthook = lambda ended: _log_uncaught(ended.exc_value, f"in the thread {_name_of(ended.thread)}")
    sys.unraisablehook = lambda lost: _log_uncaught(lost.exc_value, "where Python cannot raise it, such as in a finalizer")


def _name_of(thread: threading.Thread | None) -> str | None:
    return thread.name if thread is not None else None


def _log_uncaught(error: BaseException | None, where: str) -> None:
    # A thread may end itself by SystemExit, which is no error.
    if error is not None and not isinstance(error, SystemExit):
        log.error("uncaught exception %s", where, exc_info=error)


def withhold(serving: bool = True) -> None:
    """Withhold texts from now on, because requests may be running; with `serving=False` log in full again.

    Without its text a warning at each request would look like a fault. So libraries that are imported by now log their errors alone.
    """
    global _serving
    _serving = serving
    for name in {name.partition(".")[0] for name in logging.Logger.manager.loggerDict} - set(OURS):
        logger = logging.getLogger(name)
        usual = _levels.setdefault(name, logger.level)
        logger.setLevel(max(usual, logging.ERROR) if serving else usual)


def traceback_of(error: BaseException) -> str:
    """Format an error's traceback after those of its causes, with a note in place of each message that may quote a request.

    Python's sentences between the tracebacks are left out. Before `withhold` every message is shown.
    """
    return "\n".join(part for one in reversed(list(_chain(error))) for part in (_frames(one), words_of(one)) if part)


def words_of(error: BaseException) -> str:
    """Return an error's kind and message; a note replaces a message that may quote a request."""
    kind = type(error).__name__
    return f"{kind}: {error}" if _may_be_told(error) else f"{kind} (its message is withheld, as it may quote a request)"


def _may_be_told(error: BaseException) -> bool:
    """Return whether an error's message may be logged, because it quotes no request; always True before `withhold`.

    Errors of options and of ranks quote no prompt, and torch sees none. A RequestError's message is withheld: its client gets it.
    """
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
    """Yield an error, then the errors that it came from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
