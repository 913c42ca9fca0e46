# SPDX-License-Identifier: Apache-2.0
"""Error codes of a worker about its model or its device, and the code in the termination message of one that ended."""

import re

MODEL_REASONS = {
    "SourceNotFound": "SourceNotFound",
    "SourceUnauthorized": "Unauthorized",
    "SecretMissing": "SecretMissing",
    "DigestMismatch": "DigestMismatch",
    "UnsupportedFormat": "InvalidFiles",
    "TooLarge": "InvalidFiles",
    "InvalidRequest": "InvalidFiles",
    "NetworkError": "NetworkError",
    "Timeout": "NetworkError",
    "CacheFull": "CacheFull",
}
"""Reasons of ModelResolved=False, by code."""

DEVICE_CODES = ("DeviceUnavailable", "InsufficientMemory")

_DEVICE_CODE = re.compile(rf"(?:^|: )({'|'.join(DEVICE_CODES)}): ")
_CODE = re.compile(rf"(?:^|: )({'|'.join(MODEL_REASONS)}): ")


def code_in(words: str) -> str | None:
    """Find the first error code about a model in a worker's message, such as SourceNotFound in `Error: --model: SourceNotFound: claim …`.

    Returns None without one: workers mostly end for other reasons.
    """
    found = _CODE.search(words)
    return found[1] if found else None


def device_code_in(words: str) -> str | None:
    """Return the code of a device that is full or cannot be used; None without one in these words.

    `rank 0 exited with code 70: InsufficientMemory: …` has one.
    """
    found = _DEVICE_CODE.search(words)
    return found[1] if found else None
