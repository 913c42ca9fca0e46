# SPDX-License-Identifier: Apache-2.0
"""Sources that are on this machine already: a path, and a path on a claim. They are read in place; nothing is copied.

A source on a claim may not leave it, neither by a name nor by a link. Only regular files of an adapter are read.
"""

import os
from pathlib import Path
from typing import NamedTuple

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.located import WEIGHTS, locate
from diffusion_worker.lora.regular_file import names_in, open_regular
from diffusion_worker.sources.source import PvcSource

# Formats that run code when they are read, and containers that hide what is in them.
REFUSED_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")


class FileStamp(NamedTuple):
    """The path, inode, size and times of a file at one moment, to see later whether it changed."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def local_adapter(path: Path, label: str, *, inside: Path | None = None) -> Path:
    """Check that a path is a safetensors file or a folder with one, and return it. With `inside`, all of it must lie in that folder.

    Raises:
        RequestError: SourceNotFound, UnsupportedFormat, InvalidAdapter.
    """
    require_there(path, label)
    names = names_in(path, label, root=inside)
    if names is None:
        refuse_endings([path.name], label)
        if path.suffix != WEIGHTS:
            raise RequestError(
                ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected a *{WEIGHTS} file or a folder with one, found {path.name!r}"
            )
    elif not any(name.endswith(WEIGHTS) for name in names):
        refuse_endings(names, label)
        raise RequestError(ErrorCode.INVALID_ADAPTER, f"{label}: expected a *{WEIGHTS} file in the folder, found none")
    for file in filter(None, locate(path, label, root=inside)):
        if names is None or file.name in names:  # a missing file is reported by its reader
            os.close(open_regular(file, label, root=inside))
    return path


def adapter_stamps(path: Path, label: str, *, root: Path | None = None) -> tuple[FileStamp, ...]:
    """Return stamps of an adapter's weights and configuration, which differ as soon as one of these files was written.

    A missing file has no stamp.

    Raises:
        RequestError: InvalidAdapter, UnsupportedFormat, SourceNotFound.
    """
    stamps = []
    for file in filter(None, locate(path, label, root=root)):
        try:
            found = file.stat()
        except OSError:
            continue  # a missing file is reported by its reader
        stamps.append(FileStamp(str(file), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return tuple(stamps)


def local_model(path: Path, label: str, *, inside: Path | None = None) -> Path:
    """Check that a path is a folder, and return it; its files are not read. With `inside`, no link beneath it may lead out of that folder.

    Raises:
        RequestError: SourceNotFound.
    """
    require_there(path, label)
    if not path.is_dir():
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{label}: expected a diffusers folder, found a file")
    if inside is not None:
        _require_inside(path, inside, label)
        for place, folders, files in os.walk(path):
            for name in [*folders, *files]:
                _require_inside(Path(place, name), inside, label)
    return path


def claim_path(source: PvcSource, claims_dir: str) -> tuple[Path, Path]:
    """Return a claim's mount path, and the source's full path on it. Neither need be there.

    Raises:
        RequestError: InvalidRequest for a malformed name, or a path that leaves the claim.
    """
    if not source.claim_name or "/" in source.claim_name or source.claim_name.startswith("."):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"source.pvc.claimName: expected the name of a claim, found {source.claim_name!r}")
    if Path(source.path).is_absolute() or ".." in Path(source.path).parts:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"source.pvc.path: expected a path on the claim without '..', found {source.path!r}")
    mount = Path(claims_dir) / source.claim_name
    return mount, mount / source.path


def refuse_endings(names: list[str], label: str) -> None:
    """Raise RequestError (UnsupportedFormat) if one of these names ends like a pickle file or an archive."""
    for name in names:
        if name.lower().endswith(REFUSED_ENDINGS):
            raise RequestError(
                ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected a *{WEIGHTS} file, found {name!r}: pickle files and archives are not read"
            )


def require_there(path: Path, label: str) -> None:
    """Raise RequestError if a path is not there (SourceNotFound) or is no path at all (InvalidRequest)."""
    try:
        path.stat()
    except OSError as error:
        raise RequestError(
            ErrorCode.SOURCE_NOT_FOUND, f"{label}: expected a file or folder that can be read: {error.strerror or error}"
        ) from None
    except ValueError:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{label}: expected a path, found the character NUL in {str(path)!r}") from None


def _require_inside(path: Path, inside: Path, label: str) -> None:
    if not path.resolve().is_relative_to(inside.resolve()):
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{label}: {path.name!r} is a link that leads out of the claim")
