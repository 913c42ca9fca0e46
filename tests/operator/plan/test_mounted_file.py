# SPDX-License-Identifier: Apache-2.0
"""The mounted file with a deployment's adapters: its content, its limits, the refused adapters, and the file of the pass before."""

import gzip
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.source import AdapterRepository, AdapterSource
from diffusion_operator.plan.adapters import mounted_file
from diffusion_operator.plan.adapters.acceptance import Decision, DesiredAdapter
from diffusion_operator.plan.adapters.mounted_file import MOST_ADAPTERS, NO_ADAPTERS, AdapterFile, packed, plan_file, refusals_of, refused
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


def planned(adapters: Sequence[DesiredAdapter], before: AdapterFile = NO_ADAPTERS) -> AdapterFile:
    return plan_file(decisions(adapters), before)


def after_refusals(adapters: Sequence[DesiredAdapter], file: AdapterFile) -> list[Decision]:
    refusals = refusals_of(file, "d")
    return [
        refused(decision, refusals.get(decision.desired.uid if decision.desired is not None else "")) for decision in decisions(adapters)
    ]


def names(file: AdapterFile) -> list[str]:
    return [each["name"] for each in json.loads(gzip.decompress(file.content))["adapters"]]


def test_a_file_is_the_same_for_the_same_adapters() -> None:
    some = [one(name) for name in ("b", "a", "c")]
    assert packed(some) == packed(some[::-1])
    assert packed(some)[4:8] == b"\0\0\0\0", "no time of its making"


def test_what_did_not_change_is_taken_over() -> None:
    first = planned([one("b"), one("a")])
    assert names(first) == ["a", "b"]
    assert planned([one("b"), one("a")], first) is first
    assert planned([one("b"), one("a", scale=0.5)], first).content != first.content


def test_the_newest_that_do_not_fit_are_refused_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = [one(f"a{number:02}") for number in range(12)]
    room = len(packed(adapters[:9])) + 20
    monkeypatch.setattr(mounted_file, "FILE_BYTES", room)
    file = planned(adapters)
    assert names(file) == [each.name for each in adapters[:9]]
    after = after_refusals(adapters, file)
    assert [each.accepted for each in after] == [True] * 9 + [False] * 3
    assert (after[9].reason, after[9].desired) == ("CapacityExceeded", None)
    assert after[9].message == (
        f"DiffusionDeployment d has no room for this adapter: it has 9 older ones, of at most {MOST_ADAPTERS}, and their list takes "
        f"{room - 20} of at most {room} bytes; delete some of them, or create this adapter for another DiffusionDeployment"
    )
    assert names(planned(adapters[1:], file)) == [each.name for each in adapters[1:10]], "the next one has the place of one that went"


def test_a_deployment_has_so_many_adapters_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounted_file, "MOST_ADAPTERS", 4)
    adapters = [one(f"a{number}") for number in range(6)]
    after = after_refusals(adapters, planned(adapters))
    assert [(each.accepted, each.reason) for each in after[3:]] == [(True, "Accepted")] + [(False, "CapacityExceeded")] * 2


def test_as_many_adapters_as_a_deployment_may_have_fit_with_room_to_spare() -> None:
    """Check that they take less than half of the file. Each adapter has a digest and a commit, which no compression shortens."""
    adapters = []
    for number in range(MOST_ADAPTERS):
        digest, commit = (hashlib.sha256(f"{what} {number}".encode()).hexdigest() for what in ("digest", "commit"))
        source = AdapterSource(hugging_face=AdapterRepository(repo=f"team/style-{number}", revision=commit[:40]))
        adapters.append(one(f"style-{number}", source=source, digest=f"sha256:{digest}"))
    assert len(planned(adapters).content) < mounted_file.FILE_BYTES // 2
