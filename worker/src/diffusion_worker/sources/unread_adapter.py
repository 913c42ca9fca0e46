# SPDX-License-Identifier: Apache-2.0
"""What can be told of an adapter where it lies before any rank reads it: that its file is one, and is the one that was asked for."""

import hashlib
from pathlib import Path

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.header import read_header
from diffusion_worker.sources.in_place import WEIGHTS
from diffusion_worker.sources.selection import ADAPTER_WEIGHTS

# As diffusers calls it.
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"


def check_unread(path: Path, *, digest: str | None, name: str) -> str | None:
    """Check the header of an adapter's file, and its bytes where a digest is expected; returns that digest.

    A folder of several files none of which has a usual name is left to the ranks.

    Raises:
        RequestError: SourceNotFound, InvalidAdapter, UnsupportedFormat, DigestMismatch.
    """
    try:
        weights = _weights(path)
        if weights is None:
            return None
        read_header(weights, name=name)
        if digest is None:
            return None
        with weights.open("rb") as file:
            found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"adapter {name!r}: its file cannot be read: {error.strerror}") from None
    if found != digest.lower():
        raise RequestError(ErrorCode.DIGEST_MISMATCH, f"adapter {name!r}: expected {digest}, found {found}")
    return found


def _weights(path: Path) -> Path | None:
    if not path.is_dir():
        return path
    names = sorted(file.name for file in path.iterdir() if file.suffix == WEIGHTS)
    usual = [name for name in (ADAPTER_WEIGHTS, DIFFUSERS_WEIGHTS) if name in names]
    chosen = usual or (names if len(names) == 1 else [])
    return path / chosen[0] if chosen else None
