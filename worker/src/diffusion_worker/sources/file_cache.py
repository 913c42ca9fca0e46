# SPDX-License-Identifier: Apache-2.0
"""Fetched files by their SHA-256, in a folder that any number of processes and pods may share.

    blobs/<sha256>            a whole file, checked when it was put
    partial/<key>             one that is being fetched, or was when its process died
    trees/<sha256>/…          links to blobs under names that ranks can read: a model, an adapter
    records/<key>.json        which blobs a state of a source stands for

Every lock is a `flock` on the file itself, so it ends with its holder. The fetching process locks a partial file exclusively, and readers
share the lock on a blob. A file appears under its last name by a rename, whole or not at all.
"""

import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError

# Bytes left free on the disk for its other users.
RESERVE_BYTES = 64 << 20
UNFINISHED_TREE = "unfinished.tree"
FOLDERS = ("blobs", "partial", "trees", "records")


class Blob(msgspec.Struct, frozen=True):
    """The name and the length of a file's content: SHA-256 as hexadecimal digits without a prefix, and bytes."""

    sha256: str
    size: int


class Record(msgspec.Struct, frozen=True):
    """A known state of a source: its files by their names in a tree, and the source's name of that state."""

    files: dict[str, Blob]
    revision: str | None = None


class Lease:
    """A lock that keeps blobs from eviction until it is closed or its process ends."""

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors

    def close(self) -> None:
        """Close the descriptors, and so end their locks on the blobs; a second call does nothing."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class FileCache:
    """A folder of fetched files, made if it is missing; RequestError (CacheFull) if that fails. `limit_bytes` bounds its files.

    The methods block; they are for the fetching process, except `lease`.
    """

    def __init__(self, folder: Path, *, limit_bytes: int | None = None) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        try:
            for name in FOLDERS:
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(ErrorCode.CACHE_FULL, f"cache {folder}: its folders cannot be made: {error.strerror}") from None

    def blob(self, sha256: str) -> Path:
        """Return the path of a blob, present or not."""
        return self.folder / "blobs" / sha256

    def size(self, sha256: str) -> int | None:
        """Return the length of a blob in bytes; None if it is absent."""
        try:
            return self.blob(sha256).stat().st_size
        except OSError:
            return None

    def lease(self, blobs: Mapping[str, int | None]) -> Lease | None:
        """Keep these blobs (with their lengths where known) from eviction, and mark them as used now.

        Return None, and keep none of them, if one is absent, has another length or is being evicted.
        """
        lease = Lease([])
        for sha256, size in blobs.items():
            descriptor = self._open_shared(self.blob(sha256), size)
            if descriptor is None:
                lease.close()
                return None
            lease._descriptors.append(descriptor)
        return lease

    def open_partial(self, key: str) -> "Partial | None":
        """Open the partial file of a key, with bytes received earlier, or a new one; return None while another holder has it open."""
        path = self.folder / "partial" / key
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        if not _is_at(descriptor, path):
            os.close(descriptor)  # the holder has just finished, or given up
            return None
        return Partial(path, descriptor)

    def partial_size(self, key: str) -> int:
        """Return the size of a key's partial file, the bytes received so far; 0 if there is none."""
        try:
            return (self.folder / "partial" / key).stat().st_size
        except OSError:
            return 0

    def put(self, partial: "Partial", sha256: str) -> None:
        """Turn a whole file, whose digest the caller has computed, into a blob.

        An existing blob of the same size stays, because it may be in use, and the partial file is deleted.
        """
        os.fsync(partial.descriptor)
        with self._exclusively():
            if self.size(sha256) == partial.size:
                partial.remove()
            else:
                partial.path.rename(self.blob(sha256))

    def tree(self, files: Mapping[str, Blob]) -> tuple[Path, str]:
        """Return a folder of links to the blobs, and a SHA-256 of names and contents, after which it is named. Build a missing folder.

        A link has its key of `files` as its name.
        """
        lines = (f"{files[name].sha256}  {name}\n" for name in sorted(files))
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        folder = self.folder / "trees" / digest
        with self._exclusively():
            if not folder.is_dir():
                self._build(folder, files)
        return folder, digest

    def _build(self, folder: Path, files: Mapping[str, Blob]) -> None:
        unfinished = self.folder / "partial" / UNFINISHED_TREE
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that died
        for name, blob in files.items():
            link = unfinished / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.sha256))
        unfinished.rename(folder)

    def read_record(self, key: str) -> Record | None:
        """Return the record under a key; None if there is none that can be read. The blobs may be gone: `lease` shows that."""
        try:
            return msgspec.json.decode((self.folder / "records" / f"{key}.json").read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return None

    def write_record(self, key: str, record: Record) -> None:
        """Write the record under a key, in place of an earlier one."""
        path = self.folder / "records" / f"{key}.json"
        unfinished = path.with_suffix(f".{uuid.uuid4().hex}")
        unfinished.write_bytes(msgspec.json.encode(record))
        unfinished.rename(path)

    def make_room(self, need_bytes: int, label: str) -> None:
        """Evict unused files, the least recently used first, until `need_bytes` more fit; none if they do. The error begins with `label`.

        Raises:
            RequestError: CacheFull, everything unused is evicted and they still do not fit.
        """
        if self._missing(need_bytes) <= 0:
            return
        with self._exclusively():
            missing = self._missing(need_bytes)
            for _, size, path in sorted(self._files()):
                if missing <= 0:
                    break
                missing -= size if _remove_unused(path) else 0
            self._remove_broken_trees()
        if (missing := self._missing(need_bytes)) > 0:
            raise RequestError(
                ErrorCode.CACHE_FULL,
                f"{label}: needs {need_bytes} bytes of room in the cache, of which {missing} are missing, with nothing left to evict",
            )

    def _missing(self, need_bytes: int) -> int:
        """Return the number of bytes to evict before `need_bytes` fit, 0 or less if they fit already."""
        missing = need_bytes + RESERVE_BYTES - shutil.disk_usage(self.folder).free
        if self._limit_bytes is not None:
            missing = max(missing, sum(size for _, size, _ in self._files()) + need_bytes - self._limit_bytes)
        return missing

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield for each blob and partial file the time of its last use, its bytes on the disk, and its path."""
        for name in ("blobs", "partial"):
            for path in (self.folder / name).iterdir():
                if path.name == UNFINISHED_TREE:
                    continue
                with suppress(OSError):
                    found = path.lstat()
                    yield found.st_mtime, min(found.st_size, found.st_blocks * 512), path

    def _remove_broken_trees(self) -> None:
        for tree in (self.folder / "trees").iterdir():
            if any(path.is_symlink() and not path.exists() for path in tree.rglob("*")):
                shutil.rmtree(tree, ignore_errors=True)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Hold the lock of the cache, which excludes all other processes; it is never held during a download."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _open_shared(self, path: Path, size: int | None) -> int | None:
        """Open a blob and lock it against eviction; return None if it is absent or has another length."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_at(descriptor, path) and size in (None, os.fstat(descriptor).st_size):
                with suppress(OSError):  # a claim that is mounted read-only keeps the time it has
                    os.utime(descriptor)
                return descriptor
        except OSError:
            pass  # it is being evicted just now
        os.close(descriptor)
        return None


class Partial:
    """A file on its way into the cache, locked by one holder until its `with` block ends. Then it is a blob, gone, or continued later."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def __enter__(self) -> "Partial":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    @property
    def size(self) -> int:
        """The number of bytes in the file."""
        return os.fstat(self.descriptor).st_size

    def remove(self) -> None:
        """Delete the file, if it is there; the descriptor stays open."""
        self.path.unlink(missing_ok=True)


def key_of(*parts: str) -> str:
    """Return a SHA-256 of these parts in hexadecimal digits as the name of a file, so that no text of a source becomes a path."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        there = path.stat()
    except OSError:
        return False
    found = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino)


def _remove_unused(path: Path) -> bool:
    """Delete a file if no process has a lock on it; return False if it is locked, or cannot be opened or deleted."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
