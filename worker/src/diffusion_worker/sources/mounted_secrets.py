# SPDX-License-Identifier: Apache-2.0
"""The reading of mounted Secrets, `<folder>/<name>/<key>`, which only the process of a fetch does."""

from pathlib import Path

from diffusion_worker.errors import ErrorCode, RequestError

MAX_SECRET_BYTES = 65_536


def read_secret(folder: Path, name: str, key: str) -> str:
    """Read a key of a Secret, without whitespace around it.

    Raises:
        RequestError: SecretMissing with both names, if the file is missing, empty or no printable text. InvalidRequest for a name that
            is no single part of a path.
    """
    for part in (name, key):
        if not part or "/" in part or part in (".", ".."):
            raise RequestError(ErrorCode.INVALID_REQUEST, f"expected the name of a Secret, or of its key, without slashes, found {part!r}")
    path = folder / name / key
    try:
        with path.open("rb") as file:
            found = file.read(MAX_SECRET_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if not found or not found.isprintable():
        raise RequestError(
            ErrorCode.SECRET_MISSING,
            f"Secret {name!r}, key {key!r}: expected a printable text at {path}, found none; "
            "check that the Secret exists, has this key, and is mounted",
        )
    return found


def read_optional_secret(folder: Path, name: str, key: str) -> str | None:
    """Read a key of a Secret as `read_secret` does; None if the key's file is absent. An empty one is still an error."""
    return read_secret(folder, name, key) if (folder / name / key).exists() else None
