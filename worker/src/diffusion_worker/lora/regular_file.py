# SPDX-License-Identifier: Apache-2.0
"""Safe opening of an adapter's files: regular files and folders only, which cannot block, and beneath a root if there is one.

A path beneath a root is walked from folder to folder by descriptors, and links are followed here, so nothing can be exchanged between a
check and the opening. A file is first inspected through an `O_PATH` descriptor, which does not open it. Only a regular file is then opened
through that descriptor.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffusion_worker.errors import ErrorCode, RequestError

MAX_LINKS = 40
_LOOK = os.O_PATH | os.O_CLOEXEC
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, label: str, *, root: Path | None = None) -> int:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises:
        RequestError: InvalidAdapter with the file's name: it is no regular file, cannot be read, or is not beneath the root.
    """
    with _looked_at(path, label, root) as found:
        kind = stat.S_IFMT(os.fstat(found).st_mode)
        if kind != stat.S_IFREG:
            raise _invalid(f"{label}: {path.name} is {_KINDS.get(kind, 'something else')}, expected a regular file")
        try:
            return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(path, label, error) from None


def names_in(path: Path, label: str, *, root: Path | None = None) -> list[str] | None:
    """Return the names of all entries of a folder, sorted; None for a file or anything else that is no folder.

    Raises:
        RequestError: InvalidAdapter if there is nothing at the path, if it cannot be read, or if it is not beneath the root.
    """
    with _looked_at(path, label, root) as found:
        if not stat.S_ISDIR(os.fstat(found).st_mode):
            return None
        try:
            return sorted(each.name for each in Path(f"/proc/self/fd/{found}").iterdir())
        except OSError as error:
            raise _unreadable(path, label, error) from None


@contextmanager
def _looked_at(path: Path, label: str, root: Path | None) -> Iterator[int]:
    """Yield an `O_PATH` descriptor of a file or folder, which does not open it; raises RequestError (InvalidAdapter)."""
    try:
        found = os.open(path, _LOOK) if root is None else open_beneath(root, path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, label, error) from None
    try:
        yield found
    finally:
        os.close(found)


def open_beneath(root: Path, path: Path) -> int:
    """Return an `O_PATH` descriptor of a path beneath a root; raises OSError (EXDEV if it or a link leads out) or ValueError."""
    try:
        names = path.relative_to(root)
    except ValueError:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV)) from None
    top = os.open(root, _LOOK | os.O_DIRECTORY)
    try:
        return _walk_beneath(top, str(names))
    finally:
        os.close(top)


def _walk_beneath(top: int, names: str) -> int:
    """Return an `O_PATH` descriptor of the path `names` beneath the open folder `top`.

    Each name is opened by itself, and each link is read and followed here.

    Raises:
        OSError: EXDEV if `..` or a link leads out of the folder; ELOOP after `MAX_LINKS` links.
    """
    folders, left, links = [os.dup(top)], names.split("/")[::-1], 0
    try:
        while left:
            name = left.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(folders) == 1:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                os.close(folders.pop())
                continue
            found = os.open(name, _LOOK | os.O_NOFOLLOW, dir_fd=folders[-1])
            if not stat.S_ISLNK(os.fstat(found).st_mode):
                folders.append(found)
                continue
            try:
                target = os.readlink("", dir_fd=found)
            finally:
                os.close(found)
            links += 1
            if target.startswith("/") or links > MAX_LINKS:
                code = errno.ELOOP if links > MAX_LINKS else errno.EXDEV
                raise OSError(code, os.strerror(code))
            left += target.split("/")[::-1]
        return os.dup(folders[-1])
    finally:
        for folder in folders:
            os.close(folder)


def _unreadable(path: Path, label: str, error: OSError | ValueError) -> RequestError:
    if isinstance(error, OSError) and error.errno == errno.EXDEV:
        return _invalid(f"{label}: {path.name} is not within the folder or volume of its source: a link or '..' leads out of it")
    return _invalid(f"{label}: {ascii(path.name)[1:-1]} cannot be read: {getattr(error, 'strerror', None) or error}")


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
