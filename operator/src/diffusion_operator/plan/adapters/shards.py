# SPDX-License-Identifier: Apache-2.0
"""The mounted files of a deployment's adapters: eight shards for ever, because a pod's volumes cannot change.

An adapter is in the shard of its name. An object of the API server has room for 1 MiB, so the newest adapters of a full shard are refused.
So are those of a shard whose ConfigMap is somebody else's. A shard that did not change since the pass before is taken over.
"""

import gzip
import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from diffusion_operator.api.names import SHARDS, shard_config_name
from diffusion_operator.plan.adapters.acceptance import Decision, DesiredAdapter
from diffusion_operator.plan.adapters.slices import Slices
from diffusion_operator.plan.observed.children import NAME_CONFLICT, ChildState

FILE_BYTES = 900 << 10
"""The most of one ConfigMap: 1 MiB is the API server's limit, and metadata need some of it."""
MOST_ADAPTERS = 25_000
"""The most of one deployment. With 20,000 the largest shard takes a quarter of its room."""


class Shard(msgspec.Struct, frozen=True):
    """The adapters of one shard, oldest first, and the file of those that fit."""

    number: int
    adapters: tuple[DesiredAdapter, ...]
    fitting: int
    content: bytes
    sha256: str

    @property
    def refused(self) -> tuple[DesiredAdapter, ...]:
        return self.adapters[self.fitting :]


class Shards(msgspec.Struct, frozen=True):
    """All adapters that are wanted, spread over their shards. Shards without adapters are left out."""

    wanted: tuple[DesiredAdapter, ...] = ()
    """Oldest first."""
    shards: tuple[Shard, ...] = ()
    foreign: Mapping[int, str] = {}
    """Messages by number, of shards that cannot be made. Each of these has adapters that wait for it."""
    crowded: tuple[DesiredAdapter, ...] = ()
    """More than a deployment may have."""


NO_SHARDS = Shards()
Refusal = tuple[str, str]
"""Reason and message."""
_ELSEWHERE = "or create this adapter for another DiffusionDeployment"
_FAST = 1
"""The level of compression: 2,500 entries take 9 ms and 199 KB, at the highest one 66 ms and 182 KB."""


@lru_cache(maxsize=1 << 16)
def shard_of(name: str) -> int:
    """Return the number of an adapter's shard. A worker relies on no part of this."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()) % SHARDS


def entry(one: DesiredAdapter) -> dict[str, Any]:
    """Return an adapter as the mounted files have it."""
    return {"name": one.name, **msgspec.to_builtins(one.load), "loadTimeoutSeconds": one.load_timeout_s}


def foreign_shards(children: Iterable[ChildState]) -> dict[int, str]:
    """Return the message for each shard whose ConfigMap's name belongs to somebody else's object, by the shard's number."""
    return {one.shard: one.message for one in children if one.shard is not None and one.reason == NAME_CONFLICT}


def plan_shards(accepted: Iterable[Decision], foreign: Mapping[int, str], before: Shards, *, most: int = MOST_ADAPTERS) -> Slices[Shards]:
    """Spread the accepted adapters, given oldest first, over their shards; foreign shards are not made, those past `most` are refused.

    Returns `before`, the shards of the pass before, if nothing changed.
    """
    kept = tuple(decision.desired for decision in accepted if decision.desired is not None)
    if kept == before.wanted and foreign == before.foreign:
        return before
    yield
    known = {shard.number: shard for shard in before.shards}
    spread: dict[int, list[DesiredAdapter]] = defaultdict(list)
    for one in kept[:most]:
        spread[shard_of(one.name)].append(one)
    shards = []
    for number in sorted(spread.keys() - foreign.keys()):
        yield
        shards.append(_shard(number, tuple(spread[number]), known.get(number)))
    waiting = {number: why for number, why in foreign.items() if number in spread}
    return Shards(wanted=kept, shards=tuple(shards), foreign=waiting, crowded=kept[most:])


def refusals_of(shards: Shards, deployment: str) -> dict[str, Refusal]:
    """Return reason and message for each adapter that has no place in a file, by UID."""
    return dict(_refusals(shards, deployment))


def refused(decision: Decision, refusal: Refusal | None) -> Decision:
    if refusal is None or decision.desired is None:
        return decision
    reason, message = refusal
    return msgspec.structs.replace(decision, accepted=False, reason=reason, message=message, desired=None)


def _shard(number: int, adapters: tuple[DesiredAdapter, ...], known: Shard | None) -> Shard:
    if known is not None and known.adapters == adapters:
        return known
    fitting, content = len(adapters), packed(adapters)
    if len(content) > FILE_BYTES:
        fitting = max(0, bisect_right(range(fitting), FILE_BYTES, key=lambda count: len(packed(adapters[:count]))) - 1)
        content = packed(adapters[:fitting])
    return Shard(number=number, adapters=adapters, fitting=fitting, content=content, sha256=hashlib.sha256(content).hexdigest())


def packed(adapters: Iterable[DesiredAdapter]) -> bytes:
    """Return the file of a shard, compressed JSON: the same bytes for the same adapters in any order."""
    entries = [entry(one) for one in sorted(adapters, key=lambda one: one.name)]
    return gzip.compress(msgspec.json.encode({"adapters": entries}), compresslevel=_FAST, mtime=0)


def _refusals(shards: Shards, deployment: str) -> Iterator[tuple[str, Refusal]]:
    for one in shards.crowded:
        count = len(shards.wanted) - len(shards.crowded)
        too_many = f"DiffusionDeployment {deployment} has {count} older adapters, the most that it may have"
        yield one.uid, ("CapacityExceeded", f"{too_many}; delete some of them, {_ELSEWHERE}")
    for shard in shards.shards:
        name = shard_config_name(deployment, shard.number)
        taken = f"{shard.fitting} older adapters in it take {len(shard.content)} of at most {FILE_BYTES} bytes"
        full = f"ConfigMap {name} has no room for this adapter: {taken}; delete some of those in it, {_ELSEWHERE}"
        yield from ((one.uid, ("CapacityExceeded", full)) for one in shard.refused)
    for one in shards.wanted if shards.foreign else ():
        conflict = shards.foreign.get(shard_of(one.name))
        if conflict is not None:
            yield one.uid, (NAME_CONFLICT, f"the operator cannot make the ConfigMap that lists this adapter for the workers: {conflict}")
