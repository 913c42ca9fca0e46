# SPDX-License-Identifier: Apache-2.0
"""Rollouts through real reconciles in virtual time: their promises hold at every instant, and they end."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from diffusion_operator.api.names import ANNOTATION_RESTARTED_AT, DEPLOYMENT, LABEL_REVISION, POD
from diffusion_operator.api.worker_state import WorkerPhase
from support.operator.rig import Rig, serving

START_S = 3.0
LONG_S = 120.0
COMBINATIONS = [(surge, unavailable) for surge in range(4) for unavailable in range(4) if surge + unavailable]


class Kubelet:
    """The kubelets of a rig, in virtual time.

    A pod runs at most `START_S` seconds after it was made, and never with the container image `broken`.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.waits: dict[str, float] = {}

    async def step(self, seconds: float = 0.5) -> None:
        await self.rig.run(seconds)
        for name in self.rig.cluster.names(POD):
            pod = self.rig.cluster.find(POD, name)
            assert pod is not None
            if pod.get("status") or pod["spec"]["containers"][0]["image"] == "broken":
                continue
            self.waits[name] = self.waits.get(name, START_S) - seconds
            if self.waits[name] <= 0:
                self.rig.start(name)

    async def until_done(self, check: Any = lambda: None) -> None:
        for _ in range(int(LONG_S / 0.5)):
            await self.step()
            check()
            if self.rig.condition("Progressing") == ("True", "RolloutComplete"):
                return
        raise AssertionError(f"not done within {LONG_S} s: {self.rig.message('Progressing')}")


def edit(rig: Rig, value: str, **more: Any) -> None:
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"env": [{"name": "A", "value": value}]}, **more))


def restart(rig: Rig, when: str) -> None:
    manifest = rig.cluster.find(DEPLOYMENT, "d")
    assert manifest is not None
    manifest["metadata"].setdefault("annotations", {})[ANNOTATION_RESTARTED_AT] = when
    rig.cluster.on_change("MODIFIED", manifest)


def revisions(rig: Rig) -> set[str]:
    found = [rig.cluster.find(POD, name) for name in rig.cluster.names(POD)]
    return {pod["metadata"]["labels"][LABEL_REVISION] for pod in found if pod is not None}


@pytest.mark.parametrize(("surge", "unavailable"), COMBINATIONS)
async def test_a_rollout_keeps_its_promises_at_every_instant_and_ends(surge: int, unavailable: int) -> None:
    rig = await serving(4, rollout={"maxSurge": surge, "maxUnavailable": unavailable})
    before, fewest, most = set(rig.cluster.names(POD)), [4], [4]

    def check() -> None:
        fewest.append(len(rig.routable()))
        most.append(len(rig.cluster.names(POD)))

    edit(rig, "1")
    await Kubelet(rig).until_done(check)
    assert min(fewest) >= 4 - unavailable
    assert max(most) <= 4 + surge
    assert len(rig.cluster.names(POD)) == len(rig.routable()) == 4
    assert not before & set(rig.cluster.names(POD)), "every pod was replaced"
    assert revisions(rig) == {rig.status()["updateRevision"]} == {rig.status()["currentRevision"]}
    assert rig.cluster.events().count("RolloutComplete") == 1
    assert "rollout" not in rig.status()


async def test_recreate_ends_all_before_it_makes_one() -> None:
    rig = await serving(3, rollout={"type": "Recreate"})
    edit(rig, "1")
    seen: list[set[str]] = []
    await Kubelet(rig).until_done(lambda: seen.append(revisions(rig)))
    assert all(len(one) <= 1 for one in seen), "never two templates at a time"
    assert rig.condition("Ready") == ("True", "Serving")


async def test_edits_in_the_middle_leave_alone_what_is_at_the_target() -> None:
    rig = await serving(4, rollout={"maxSurge": 1, "maxUnavailable": 1})
    kubelet = Kubelet(rig)
    edit(rig, "1")
    for _ in range(20):
        await kubelet.step()
    first = rig.status()["updateRevision"]
    edit(rig, "2")
    await kubelet.step()
    edit(rig, "1")
    at_target = {
        name for name in rig.cluster.names(POD) if (rig.cluster.find(POD, name) or {})["metadata"]["labels"][LABEL_REVISION] == first
    }
    assert at_target
    await kubelet.until_done()
    assert at_target <= set(rig.cluster.names(POD))
    assert revisions(rig) == {first}


async def test_restarting_by_annotation_rolls_as_any_change_does() -> None:
    rig = await serving(2, rollout={"maxSurge": 1, "maxUnavailable": 0})
    restart(rig, "2026-01-01T00:00:00Z")
    fewest = [2]
    await rig.run(1)
    await Kubelet(rig).until_done(lambda: fewest.append(len(rig.routable())))
    assert min(fewest) == 2
    assert not {"d-0-0", "d-1-0"} & set(rig.cluster.names(POD))


async def test_scaling_during_a_rollout_ends_with_the_right_count() -> None:
    rig = await serving(4, rollout={"maxSurge": 2, "maxUnavailable": 0})
    kubelet = Kubelet(rig)
    edit(rig, "1")
    for _ in range(10):
        await kubelet.step()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=6))
    for _ in range(10):
        await kubelet.step()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=3))
    await kubelet.until_done()
    assert len(rig.cluster.names(POD)) == len(rig.routable()) == 3
    assert len(revisions(rig)) == 1


async def test_a_template_that_cannot_start_stops_at_its_deadline_and_goes_on_when_it_is_changed() -> None:
    rig = await serving(3, rollout={"progressDeadlineSeconds": 60, "maxSurge": 1, "maxUnavailable": 1})
    kubelet = Kubelet(rig)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"image": "broken"}))
    for _ in range(80):
        await kubelet.step()
    rig.restart_operator()
    for _ in range(80):
        await kubelet.step()
    assert rig.condition("Progressing") == ("False", "DeadlineExceeded"), "the deadline outlives the operator's memory"
    assert rig.condition("Ready") == ("True", "ServingDegraded")
    assert len(rig.routable()) == 2
    assert rig.cluster.events().count("DeadlineExceeded") == 1
    pods = rig.cluster.names(POD)
    await rig.run(600)
    assert rig.cluster.names(POD) == pods, "nothing goes and nothing comes"
    assert rig.cluster.events().count("DeadlineExceeded") == 1
    edit(rig, "1")
    await kubelet.until_done()
    assert len(rig.routable()) == 3


async def test_a_stuck_rollout_that_comes_loose_goes_on() -> None:
    rig = await serving(2, rollout={"progressDeadlineSeconds": 60})
    edit(rig, "1")
    await rig.run(120)
    assert rig.condition("Progressing") == ("False", "DeadlineExceeded")
    await Kubelet(rig).until_done()
    assert rig.condition("Ready") == ("True", "Serving")


async def test_what_is_replaced_asleep_ends_asleep() -> None:
    rig = await serving(2, sleep={"policy": "Asleep"})
    assert rig.states() == ["Asleep", "Asleep"]
    edit(rig, "1")
    for _ in range(20):
        await rig.run(1)
        for name in rig.cluster.names(POD):
            if not (rig.cluster.find(POD, name) or {}).get("status"):
                rig.start(name)
    assert rig.states() == ["Asleep", "Asleep"]
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert {worker.phase for worker in (rig.workers.at("10.0.0.3"), rig.workers.at("10.0.0.4"))} == {WorkerPhase.ASLEEP}


EDIT = st.one_of(
    st.tuples(st.just("template"), st.integers(0, 2)),
    st.tuples(st.just("replicas"), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.just("crash"), st.integers(0, 3)),
)


@pytest.mark.slow
@seed(8)
@settings(max_examples=25, database=None)
@given(edits=st.lists(EDIT, max_size=8), surge=st.integers(0, 2), unavailable=st.integers(0, 2))
def test_any_edits_end_with_what_the_spec_says(edits: list[tuple[str, int]], surge: int, unavailable: int) -> None:
    asyncio.run(_edited(edits, surge=surge, unavailable=max(unavailable, int(surge == 0))))


async def _edited(edits: list[tuple[str, int]], *, surge: int, unavailable: int) -> None:
    rig = await serving(3, rollout={"maxSurge": surge, "maxUnavailable": unavailable})
    kubelet = Kubelet(rig)
    for what, value in edits:
        if what == "template":
            edit(rig, str(value))
        elif what == "replicas":
            rig.cluster.change(DEPLOYMENT, "d", lambda spec, count=value: spec.update(replicas=count))
        elif what == "crash":
            running = rig.routable()
            if running:
                rig.cluster.remove(POD, running[value % len(running)])
        for _ in range(value if what == "wait" else 1):
            await kubelet.step()
            replicas = rig.cluster.find(DEPLOYMENT, "d")["spec"]["replicas"]  # type: ignore[index]
            assert len(rig.cluster.names(POD)) <= max(4, replicas) + surge
    await rig.run(3)
    await kubelet.until_done()
    for _ in range(20):
        await kubelet.step()
    assert len(rig.cluster.names(POD)) == len(rig.routable()) == replicas_of(rig)
    assert revisions(rig) == {rig.status()["updateRevision"]}
    assert rig.errors == []


def replicas_of(rig: Rig) -> int:
    manifest = rig.cluster.find(DEPLOYMENT, "d")
    assert manifest is not None
    return int(manifest["spec"]["replicas"])
