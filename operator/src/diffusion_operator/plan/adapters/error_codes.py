# SPDX-License-Identifier: Apache-2.0
"""What a worker's error code means for an adapter: whose fault it is, which condition shows it, and whether trying again can help.

The worker says of each error whether the same call may succeed later; here the question is whether it may without a new spec, which
is true of more: a file appears at a path, memory is given back, somebody pushes a repository.
"""

SOURCE_REASONS = {
    "SourceNotFound": "SourceNotFound",
    "NotFound": "SourceNotFound",
    "SourceUnauthorized": "Unauthorized",
    "SecretMissing": "SecretMissing",
    "DigestMismatch": "DigestMismatch",
    "InvalidAdapter": "InvalidAdapter",
    "NoMatchingModules": "InvalidAdapter",
    "UnsupportedFormat": "UnsupportedFormat",
    "TooLarge": "TooLarge",
    "NetworkError": "NetworkError",
}
"""Reasons of SourceResolved=False, by code."""

DEPLOYMENT_REASONS = frozenset({"RankTooLarge", "ModulesOutsideEnvelope"})
"""The adapter is sound, and the deployment's `spec.lora` has no room for it: reasons of Accepted=False."""

RELOAD_LOOP = "ReloadLoop"
"""Ours, no worker's: an adapter that is evicted again and again is not loaded again."""

FINAL = DEPLOYMENT_REASONS | {
    "InvalidAdapter",
    "NoMatchingModules",
    "DigestMismatch",
    "UnsupportedFormat",
    "TooLarge",
    RELOAD_LOOP,
}
"""Failed until the object changes, or a new process starts with another `spec.lora`: the same bytes would be refused again."""
