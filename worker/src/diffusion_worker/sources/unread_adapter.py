# SPDX-License-Identifier: Apache-2.0
"""Checks of an adapter in place before any rank reads it: the file is an adapter's, and has the required digest."""

import hashlib
import os
from pathlib import Path

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.header import open_file, read_header_of
from diffusion_worker.lora.located import locate


def check_unread(path: Path, *, root: Path | None = None, digest: str | None, name: str) -> str | None:
    """Check the header of an adapter's file, and its digest if one is required; return that digest, else None. Stay in `root`, if set.

    Raises:
        RequestError: InvalidAdapter, UnsupportedFormat, DigestMismatch.
    """
    label = f"adapter {name!r}"
    weights = locate(path, label, root=root).weights
    descriptor = open_file(weights, label, root=root)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        read_header_of(descriptor, f"{label}: {weights.name}")
        if digest is None:
            return None
        try:
            file.seek(0)
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise RequestError(ErrorCode.INVALID_ADAPTER, f"{label}: {weights.name} cannot be read: {error.strerror}") from None
    found = f"sha256:{actual}"
    if found != digest.lower():
        raise RequestError(ErrorCode.DIGEST_MISMATCH, f"{label}: expected {digest}, found {found}")
    return found
