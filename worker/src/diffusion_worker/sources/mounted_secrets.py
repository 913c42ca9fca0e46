# SPDX-License-Identifier: Apache-2.0
"""Reads mounted Secrets, in the process that fetches and nowhere else: `<folder>/<name>/<key>`."""

from pathlib import Path

from diffusion_worker.errors import ErrorCode, RequestError

MAX_SECRET_BYTES = 65_536


def read_secret(folder: Path, name: str, key: str) -> str:
    """A key of a Secret, without the newline at its end; raises RequestError (SecretMissing) with both names."""
    for part in (name, key):
        if not part or "/" in part or part in (".", ".."):
            raise RequestError(ErrorCode.INVALID_REQUEST, f"a Secret and its key are names without slashes, found {part!r}")
    try:
        with (folder / name / key).open("rb") as file:
            found = file.read(MAX_SECRET_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if not found or not found.isprintable():
        raise RequestError(ErrorCode.SECRET_MISSING, f"Secret {name!r}, key {key!r}: expected a text at {folder / name / key}, found none")
    return found


def read_optional_secret(folder: Path, name: str, key: str) -> str | None:
    """The same for a key that need not be there."""
    return read_secret(folder, name, key) if (folder / name / key).exists() else None
