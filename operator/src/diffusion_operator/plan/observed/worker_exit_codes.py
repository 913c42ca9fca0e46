# SPDX-License-Identifier: Apache-2.0
"""Error codes of a worker about its model, and the code in the termination message of a worker that failed to load it."""

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

_CODE = re.compile(rf"(?:^|: )({'|'.join(MODEL_REASONS)}): ")


def code_in(words: str) -> str | None:
    """`Error: --model: SourceNotFound: claim …` has one; most of what a worker ends with is about something else."""
    found = _CODE.search(words)
    return found[1] if found else None
