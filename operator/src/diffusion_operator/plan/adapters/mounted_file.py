# SPDX-License-Identifier: Apache-2.0
"""The mounted file with a deployment's adapters: compressed, in the ConfigMap that its pods start from.

An object of the API server has room for 1 MiB, so the newest adapters that do not fit are refused, and so are those past `MOST_ADAPTERS`.
"""

import gzip
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import msgspec

from diffusion_operator.plan.adapters.acceptance import Decision, DesiredAdapter

FILE_BYTES = 800 << 10
"""The most of the file: 1 MiB is the API server's limit, and the settings and metadata need some of it."""
MOST_ADAPTERS = 4_000
"""The most of one deployment. They take 320 KB of the file, and 3 MB of each answer of a worker."""
_FAST = 1
"""The level of compression: 2,500 entries take 9 ms and 199 KB, at the highest one 66 ms and 182 KB."""

Refusal = tuple[str, str]
"""Reason and message."""


class AdapterFile(msgspec.Struct, frozen=True):
    """The adapters that are wanted, oldest first, and the file with the first `fitting` of them."""

    wanted: tuple[DesiredAdapter, ...]
    fitting: int
    content: bytes


def entry(one: DesiredAdapter) -> dict[str, Any]:
    """Return an adapter as the mounted file has it."""
    return {"name": one.name, **msgspec.to_builtins(one.load), "loadTimeoutSeconds": one.load_timeout_s}


def packed(adapters: Iterable[DesiredAdapter]) -> bytes:
    """Return the file, compressed JSON: the same bytes for the same adapters in any order."""
    entries = [entry(one) for one in sorted(adapters, key=lambda one: one.name)]
    return gzip.compress(msgspec.json.encode({"adapters": entries}), compresslevel=_FAST, mtime=0)


NO_ADAPTERS = AdapterFile(wanted=(), fitting=0, content=packed(()))


def plan_file(accepted: Iterable[Decision], before: AdapterFile) -> AdapterFile:
    """Put the accepted adapters, given oldest first, into the file. Returns `before`, the file of the last pass, if nothing changed."""
    wanted = tuple(decision.desired for decision in accepted if decision.desired is not None)
    if wanted == before.wanted:
        return before
    fitting = min(len(wanted), MOST_ADAPTERS)
    content = packed(wanted[:fitting])
    if len(content) > FILE_BYTES:
        fitting = max(0, bisect_right(range(fitting), FILE_BYTES, key=lambda count: len(packed(wanted[:count]))) - 1)
        content = packed(wanted[:fitting])
    return AdapterFile(wanted=wanted, fitting=fitting, content=content)


def refusals_of(file: AdapterFile, deployment: str) -> dict[str, Refusal]:
    """Return reason and message for each adapter that has no place in the file, by UID."""
    has = f"it has {file.fitting} older ones, of at most {MOST_ADAPTERS}"
    takes = f"their list takes {len(file.content)} of at most {FILE_BYTES} bytes"
    advice = "delete some of them, or create this adapter for another DiffusionDeployment"
    message = f"DiffusionDeployment {deployment} has no room for this adapter: {has}, and {takes}; {advice}"
    return {one.uid: ("CapacityExceeded", message) for one in file.wanted[file.fitting :]}


def refused(decision: Decision, refusal: Refusal | None) -> Decision:
    if refusal is None or decision.desired is None:
        return decision
    reason, message = refusal
    return msgspec.structs.replace(decision, accepted=False, reason=reason, message=message, desired=None)
