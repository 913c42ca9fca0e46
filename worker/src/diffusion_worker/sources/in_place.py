# SPDX-License-Identifier: Apache-2.0
"""Sources that are here already: a path, and a path on a claim. They are read where they lie; nothing is copied.

What is on a claim stays inside it: no name and no link leads out of it.
"""

import os
from pathlib import Path

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.source import PvcSource

WEIGHTS = ".safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# Formats that run code when they are read, and containers that hide what is in them.
REFUSED_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")


def local_adapter(path: Path, what: str, *, inside: Path | None = None) -> Path:
    """A safetensors file, or a folder with one. With `inside` neither it nor what is in it may lie elsewhere.

    Raises:
        RequestError: SourceNotFound, UnsupportedFormat, InvalidAdapter.
    """
    require_there(path, what)
    if path.is_dir():
        files = sorted(path.glob(f"*{WEIGHTS}"))
        if not files:
            refuse_endings([file.name for file in path.iterdir()], what)
            raise RequestError(ErrorCode.INVALID_ADAPTER, f"{what}: expected a *{WEIGHTS} file in the folder, found none")
    else:
        files = [path]
        refuse_endings([path.name], what)
        if path.suffix != WEIGHTS:
            raise RequestError(
                ErrorCode.UNSUPPORTED_FORMAT, f"{what}: expected a *{WEIGHTS} file or a folder with one, found {path.name!r}"
            )
    if inside is not None:
        for file in [*files, path / ADAPTER_CONFIG] if path.is_dir() else files:
            _require_inside(file, inside, what)
    return path


def local_model(path: Path, what: str, *, inside: Path | None = None) -> Path:
    """A folder; with `inside` nothing in it may lie elsewhere. Raises RequestError (SourceNotFound)."""
    require_there(path, what)
    if not path.is_dir():
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{what}: expected a diffusers folder, found a file")
    if inside is not None:
        for place, folders, files in os.walk(path):
            for name in [*folders, *files]:
                _require_inside(Path(place, name), inside, what)
    return path


def claim_path(source: PvcSource, claims_dir: str) -> tuple[Path, Path]:
    """Where a claim is mounted, and what a source names on it. Raises RequestError (SourceNotFound, InvalidRequest)."""
    what = f"claim {source.claim_name!r}"
    if not source.claim_name or "/" in source.claim_name or source.claim_name.startswith("."):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"source.pvc.claimName: expected the name of a claim, found {source.claim_name!r}")
    if Path(source.path).is_absolute() or ".." in Path(source.path).parts:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"source.pvc.path: expected a path on the claim without '..', found {source.path!r}")
    claim = Path(claims_dir) / source.claim_name
    if not claim.is_dir():
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{what}: expected it to be mounted at {claim}, found nothing there")
    found = claim / source.path
    require_there(found, f"{what} path {source.path!r}")
    _require_inside(found, claim, f"{what} path {source.path!r}")
    return claim, found


def refuse_endings(names: list[str], what: str) -> None:
    """Raises RequestError (UnsupportedFormat) where one of the names is of a format that is never read."""
    for name in names:
        if name.lower().endswith(REFUSED_ENDINGS):
            raise RequestError(
                ErrorCode.UNSUPPORTED_FORMAT, f"{what}: expected {WEIGHTS}, found {name!r}: pickle files and archives are not read"
            )


def require_there(path: Path, what: str) -> None:
    """Raises RequestError (SourceNotFound)."""
    try:
        path.stat()
    except OSError as error:
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{what}: expected a file or folder: {error.strerror or error}") from None


def _require_inside(path: Path, inside: Path, what: str) -> None:
    if not path.resolve().is_relative_to(inside.resolve()):
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{what}: {path.name!r} is a link that leads out of the claim")
