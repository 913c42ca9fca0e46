# SPDX-License-Identifier: Apache-2.0
"""Things that are slow to make, made once per content: `NAME-HASH` in the cache, complete or not there at all."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .paths import cache_dir

IGNORED_DIRECTORIES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"}


def content_hash(parts: Iterable[Path | str], *, relative_to: Path) -> str:
    """Return twelve hex digits over the names and bytes of files and over plain words; a folder counts with all files in it.

    Caches of Python's tools are left out, and a path that does not exist counts as nothing. All files must be under `relative_to`.
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(b"word\0" + part.encode() + b"\0")
            continue
        for file in sorted(_files_in(part)):
            digest.update(b"file\0" + str(file.relative_to(relative_to)).encode() + b"\0")
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _files_in(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for entry in path.iterdir() if path.is_dir() else ():
        if entry.name not in IGNORED_DIRECTORIES and not entry.name.endswith((".egg-info", ".pyc")):
            yield from _files_in(entry)


@contextmanager
def locked(name: str, *, directory: Path | None = None) -> Iterator[None]:
    """Hold the lock `name` while entered; wait without a limit for any other holder, in this process or another.

    It is an flock on a file in `directory`, by default in the cache, so the kernel frees it when its process dies.
    """
    with _lock_file(name, directory) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_if_free(name: str, *, directory: Path | None = None) -> Iterator[bool]:
    """Hold the lock `name` during the block unless another holder has it; yield True if it was taken, else False. It never waits."""
    with _lock_file(name, directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def _lock_file(name: str, directory: Path | None) -> Iterator[IO[str]]:
    directory = directory or cache_dir() / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("w") as file:
        yield file


def cached(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of this name and key in the cache; if there is none, `make` fills it first, in a draft folder.

    Folders of that name with other keys are removed then. If `make` fails there is no folder, and callers wait for one another.
    """
    target = cache_dir() / f"{name}-{key}"
    if target.is_dir():
        return target
    with locked(name):
        if target.is_dir():
            return target
        draft = cache_dir() / f".{name}-draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        make(draft)
        draft.rename(target)
        for older in cache_dir().glob(f"{name}-{'?' * len(key)}"):
            if older != target:
                shutil.rmtree(older, ignore_errors=True)
    return target
