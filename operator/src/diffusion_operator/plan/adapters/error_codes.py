# SPDX-License-Identifier: Apache-2.0
"""Worker error codes as seen by an adapter: the party at fault, the condition that shows it, and whether a retry can help.

The worker marks errors that the same call may survive later. More errors than those can pass without a new spec: a file appears, memory is
freed, a repository is pushed.
"""

SOURCE_REASONS = {
    "SourceNotFound": "SourceNotFound",
    "NotFound": "SourceNotFound",
    "SourceUnauthorized": "Unauthorized",
    "SecretMissing": "SecretMissing",
    "DigestMismatch": "DigestMismatch",
    "IdentityMismatch": "IdentityMismatch",
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
"""Ours, no worker's: an adapter that is evicted again and again is loaded again after ten minutes."""

FINAL = DEPLOYMENT_REASONS | {
    "InvalidAdapter",
    "NoMatchingModules",
    "DigestMismatch",
    "IdentityMismatch",
    "UnsupportedFormat",
    "TooLarge",
    RELOAD_LOOP,
}
"""The same bytes would be refused again. So a try comes every ten minutes only, at once after an edit, and in each new process."""
