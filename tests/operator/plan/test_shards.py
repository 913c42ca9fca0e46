# SPDX-License-Identifier: Apache-2.0
"""The shards of a deployment's adapters: their contents, the limit of their size, the refused adapters, and those of the pass before."""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.names import SHARDS
from diffusion_operator.api.source import AdapterRepository, AdapterSource
from diffusion_operator.plan.adapters import shards as module
from diffusion_operator.plan.adapters.acceptance import Decision, DesiredAdapter
from diffusion_operator.plan.adapters.shards import (
    NO_SHARDS,
    Shards,
    foreign_shards,
    packed,
    plan_shards,
    refusals_of,
    refused,
    shard_of,
)
from diffusion_operator.plan.adapters.slices import finish
from diffusion_operator.plan.observed.children import ChildState
from support.apiserver.kind_api import lora


def one(name: str, **load: Any) -> DesiredAdapter:
    source = AdapterSource(hugging_face=AdapterRepository(repo=f"team/{name}", revision="c0ffee"))
    return DesiredAdapter(
        uid=f"uid-{name}",
        generation=1,
        name=name,
        load=AdapterLoad(**{"source": source, "digest": f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"} | load),
        load_timeout_s=9,
    )


def decisions(adapters: Sequence[DesiredAdapter]) -> list[Decision]:
    manifest = {"metadata": {"name": "x", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}}
    adapter = msgspec.convert(lora("x") | manifest, LoRAAdapter)
    return [Decision(adapter=adapter, accepted=True, desired=each) for each in adapters]


def planned(adapters: Sequence[DesiredAdapter], before: Shards = NO_SHARDS, **given: Any) -> Shards:
    return finish(plan_shards(decisions(adapters), given.pop("foreign", {}), before, **given))


def after_refusals(adapters: Sequence[DesiredAdapter], shards: Shards) -> list[Decision]:
    refusals = refusals_of(shards, "d")
    return [
        refused(decision, refusals.get(decision.desired.uid if decision.desired is not None else "")) for decision in decisions(adapters)
    ]


def names(shards: Shards) -> dict[int, list[str]]:
    """Return the names of the adapters in each shard's file, by shard."""
    return {shard.number: [each["name"] for each in json.loads(gzip.decompress(shard.content))["adapters"]] for shard in shards.shards}


def of_shard(number: int, count: int) -> list[DesiredAdapter]:
    found = (one(f"a{index}") for index in range(10_000) if shard_of(f"a{index}") == number)
    return [next(found) for _ in range(count)]


def test_the_shard_of_a_name_never_changes() -> None:
    assert {name: shard_of(name) for name in ("a", "b", "c")} == {"a": 3, "b": 5, "c": 6}
    spread = Counter(shard_of(f"adapter-{number}") for number in range(20_000))
    assert len(spread) == SHARDS
    assert max(spread.values()) < 2_700


def test_a_file_is_the_same_for_the_same_adapters() -> None:
    some = [one(name) for name in ("b", "a", "c")]
    assert packed(some) == packed(some[::-1])
    assert packed(some)[4:8] == b"\0\0\0\0", "no time of its making"


def test_each_adapter_is_in_the_file_of_its_shard_and_empty_ones_are_not_made() -> None:
    assert names(planned([one("a"), one("b")])) == {3: ["a"], 5: ["b"]}
    assert planned([]).shards == ()


def test_what_did_not_change_is_taken_over() -> None:
    some = [one("a"), one("b")]
    first = planned(some)
    assert planned([one("a"), one("b")], first) is first
    second = planned([some[0], one("b", scale=0.5)], first)
    assert second.shards[0] is first.shards[0]
    assert second.shards[1].sha256 != first.shards[1].sha256


def test_the_newest_of_a_full_shard_are_refused_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = of_shard(3, 12)
    other = one("b")
    room = len(packed(adapters[:9])) + 20
    monkeypatch.setattr(module, "FILE_BYTES", room)
    shards = planned([*adapters, other])
    assert names(shards) == {3: sorted(each.name for each in adapters[:9]), 5: ["b"]}
    after = after_refusals([*adapters, other], shards)
    assert [each.accepted for each in after] == [True] * 9 + [False] * 3 + [True]
    assert (after[9].reason, after[9].desired) == ("CapacityExceeded", None)
    assert after[9].message == (
        f"ConfigMap d-desired-3 has no room for this adapter: 9 older adapters in it take {room - 20} of at most {room} bytes; "
        "delete some of those in it, or create this adapter for another DiffusionDeployment"
    )
    fewer = planned([*adapters[1:], other], shards)
    assert names(fewer)[3] == sorted(each.name for each in adapters[1:10]), "the next one has the place of one that went"


def test_a_deployment_has_so_many_adapters_at_most() -> None:
    adapters = [one(f"a{number}") for number in range(6)]
    shards = planned(adapters, most=4)
    after = after_refusals(adapters, shards)
    assert [each.accepted for each in after] == [True] * 4 + [False] * 2
    assert (after[5].reason, after[5].message) == (
        "CapacityExceeded",
        "DiffusionDeployment d has 4 older adapters, the most that it may have; "
        "delete some of them, or create this adapter for another DiffusionDeployment",
    )


def test_a_strangers_shard_refuses_its_own_adapters_only() -> None:
    taken = ChildState(kind="ConfigMap", name="d-desired-3", ours=False, reason="NameConflict", message="somebody else's", shard=3)
    main = ChildState(kind="ConfigMap", name="d-desired", ours=False, reason="NameConflict", message="somebody else's")
    foreign = foreign_shards((taken, main))
    adapters = [one("a"), one("b")]
    shards = planned(adapters, foreign=foreign)
    assert names(shards) == {5: ["b"]}
    assert shards.foreign == foreign
    waiting, kept = after_refusals(adapters, shards)
    assert (waiting.accepted, waiting.reason) == (False, "NameConflict")
    assert "somebody else's" in waiting.message
    assert kept.accepted
    assert planned([one("b")], foreign=foreign).foreign == {}, "nothing waits for it"


def test_twenty_thousand_adapters_fit_with_room_for_what_is_to_come() -> None:
    """Check that no shard of 20,000 adapters takes half a file. Each adapter has a digest and a commit, which no compression shortens."""
    adapters = []
    for number in range(20_000):
        digest, commit = (hashlib.sha256(f"{what} {number}".encode()).hexdigest() for what in ("digest", "commit"))
        source = AdapterSource(hugging_face=AdapterRepository(repo=f"team/style-{number}", revision=commit[:40]))
        adapters.append(one(f"style-{number}", source=source, digest=f"sha256:{digest}"))
    shards = planned(adapters)
    assert max(len(shard.content) for shard in shards.shards) < module.FILE_BYTES // 2
    assert not any(shard.refused for shard in shards.shards)
