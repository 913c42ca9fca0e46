# SPDX-License-Identifier: Apache-2.0
"""The digest of a model folder, which identifies the model of a worker's images whatever the folder's name.

A model is large and nobody waits for its digest, so a thread computes it in spare time, after the load.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

# Size of a read: hashing it takes milliseconds, so the thread ends soon after it is asked to.
PIECE_BYTES = 4 << 20
LOWEST_PRIORITY = 19


class Stopped(Exception):
    """Raised while a file is hashed, after `stop` was set; there is no digest then."""


def digest_of(folder: Path, stop: threading.Event) -> str:
    """Hash the content of a folder: SHA-256 over a list of its files by path, in hex after `sha256:`.

    The list is as `sha256sum` writes it: the file's SHA-256 in hex, two spaces, its path from the folder with slashes, a newline. Hidden
    files and folders, such as those of git or a download, do not count. Links to files count as files; links to folders are skipped.

    Raises:
        OSError: a file cannot be read. Stopped: `stop` was set.
    """
    whole, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    for path in sorted(_files(folder)):
        whole.update(f"{_digest_of_file(folder / path, piece, stop)}  {path}\n".encode("utf-8", "surrogateescape"))
    return f"sha256:{whole.hexdigest()}"


def _files(folder: Path) -> Iterator[str]:
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name).relative_to(folder).as_posix() for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _digest_of_file(path: Path, piece: memoryview, stop: threading.Event) -> str:
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            if stop.is_set():
                raise Stopped
            found.update(piece[:size])
    return found.hexdigest()


class ModelDigest:
    """A thread of low priority that hashes a folder, begun once by `begin` and stopped by `end`.

    `value` is None until it is done, and stays so if it is stopped or a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.value: str | None = None
        self._folder = folder
        self._stop = threading.Event()

    def begin(self) -> threading.Thread:
        """Begin to compute the digest, and return the thread that does."""

        def run() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            self.value = self._compute()

        thread = threading.Thread(target=run, name="model-digest", daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """Ask the thread to stop, without waiting for it; `value` stays None unless it is done. Harmless at any time."""
        self._stop.set()

    def _compute(self) -> str | None:
        started_s = time.monotonic()
        try:
            found = digest_of(self._folder, self._stop)
        except Stopped:
            return None
        except OSError as error:
            log.warning("model=%s has no digest, as its files cannot be read: %s", self._folder, error)
            return None
        log.info("model=%s digest=%s seconds=%.1f", self._folder, found, time.monotonic() - started_s)
        return found
