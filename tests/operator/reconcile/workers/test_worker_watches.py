# SPDX-License-Identifier: Apache-2.0
"""The watches of workers in fake time: one request for each pod, the wakes of a deployment, and retries of a lost worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.worker_state import WorkerPhase, WorkerState
from diffusion_operator.errors import ControlUnreachable
from diffusion_operator.plan.observed.pods import Container, Pod
from diffusion_operator.reconcile.control_tokens import ControlTokens
from diffusion_operator.reconcile.keyed_queue import Key
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.reconcile.workers.watches import WAIT_S, WorkerWatches
from diffusion_operator.settings import Settings
from support.operator.plan_builders import pod

pytestmark = pytest.mark.looptime
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
OWNER = ObjectMeta(name="d", namespace="n", uid="u", creation_timestamp=EPOCH, generation=1)
KEY = Key("DiffusionDeployment", "n", "d")


class FakeWorkers:
    """Workers by address. A worker with a revision answers when it has another one; `lost` workers answer nothing."""

    def __init__(self) -> None:
        self.states: dict[str, WorkerState] = {}
        self.lost: set[str] = set()
        self.refused: set[str] = set()
        self.asked: dict[str, list[tuple[float, str, float]]] = {}
        self.open: dict[str, int] = {}
        self._changed = asyncio.Event()

    def says(self, ip: str, number: int = 1, phase: WorkerPhase = WorkerPhase.READY, **more: Any) -> None:
        self.states[ip] = WorkerState(boot_id="b", state=phase, revision=f"b.{number}", **more)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def state(self, ip: str, *, token: str, pod_uid: str, after: str, wait_s: float) -> WorkerState:
        loop = asyncio.get_running_loop()
        self.asked.setdefault(ip, []).append((round(loop.time(), 2), after, wait_s))
        self.open[ip] = self.open.get(ip, 0) + 1
        try:
            if ip in self.refused:
                raise ControlUnreachable(f"{ip}: connection refused")
            if ip in self.lost:
                await asyncio.sleep(wait_s + 5 if after else 2)
                raise ControlUnreachable(f"{ip}: no complete answer")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while after and self.states[ip].revision == after:
                        await self._changed.wait()
            return self.states[ip]
        finally:
            self.open[ip] -= 1


class Watched:
    """The watches of one deployment over fake workers."""

    def __init__(self) -> None:
        self.chance = 0.5
        self.workers, self.woken = FakeWorkers(), list[tuple[Key, float]]()
        settings = Settings(engine_image="i", operator_key=b"k" * 32)
        loop = asyncio.get_running_loop()
        self.runtime = Runtime(
            cluster=None,  # type: ignore[arg-type]
            workers=self.workers,  # type: ignore[arg-type]
            settings=settings,
            clock=lambda: EPOCH + timedelta(seconds=loop.time()),
            wake=lambda key: self.woken.append((key, round(loop.time(), 2))),
            meter=self,  # type: ignore[arg-type]
        )
        self.memory = DeploymentMemory(uid="u", tokens=ControlTokens(settings, OWNER))
        self.watches = WorkerWatches(self.runtime, random=lambda: self.chance, monotonic=loop.time)
        self.watches.start()

    def seen(self, happened: object) -> None:
        """Count nothing, in place of a meter."""

    def follow(self, *pods: Pod) -> None:
        for one in pods:
            self.memory.record_of(one, self.runtime.now())
        self.watches.follow(OWNER, self.memory, pods)

    def poll(self, one: Pod) -> Any:
        return self.memory.polls[one.uid].poll(self.runtime.now())


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    made = Watched()
    yield made
    await made.watches.stop()


def at(ip: str, index: int = 0, restarts: int = 0) -> Pod:
    return pod(index, ip=ip, container=Container(running=True, restarts=restarts))


async def test_one_request_is_open_for_each_pod_and_an_idle_worker_costs_one_in_thirty_seconds(watched: Watched) -> None:
    watched.workers.says("1")
    watched.workers.says("2")
    watched.follow(at("1"), at("2", 1))
    await asyncio.sleep(301)
    watched.follow(at("1"), at("2", 1))
    assert watched.workers.open == {"1": 1, "2": 1}
    for asked in watched.workers.asked.values():
        assert (asked[0][1:], asked[1][1:]) == (("", 0.0), ("b.1", WAIT_S))
        assert len(asked) <= 12
    assert [key for key, _ in watched.woken] == [KEY, KEY], "for the first answers, and for nothing that is the same"


async def test_a_change_wakes_the_deployment_at_once(watched: Watched) -> None:
    watched.workers.says("1")
    watched.follow(at("1"))
    await asyncio.sleep(10)
    watched.workers.says("1", 2, WorkerPhase.ASLEEP)
    await asyncio.sleep(0.05)
    assert [when for _, when in watched.woken if when >= 10] == [pytest.approx(10, abs=0.05)]
    assert watched.poll(at("1")).state.state is WorkerPhase.ASLEEP


async def test_ages_go_on_while_nothing_changes(watched: Watched) -> None:
    watched.workers.says("1", last_request_age_seconds=5.0, state_age_seconds=7.0)
    watched.follow(at("1"))
    await asyncio.sleep(20)
    poll = watched.poll(at("1"))
    assert (poll.request_age_s, poll.state_age_s) == (pytest.approx(25, abs=1), pytest.approx(27, abs=1))


async def test_the_age_of_a_request_that_runs_stays_zero(watched: Watched) -> None:
    watched.workers.says("1", last_request_age_seconds=0.0, in_flight=1)
    watched.follow(at("1"))
    await asyncio.sleep(20)
    assert watched.poll(at("1")).request_age_s == 0.0


async def test_a_lost_worker_is_tried_again_and_counts_as_unreachable_after_three_tries_and_fifteen_seconds(watched: Watched) -> None:
    watched.workers.says("1")
    watched.follow(at("1"))
    await asyncio.sleep(1)
    watched.workers.refused.add("1")
    watched.workers.says("1", 2)  # the open request is answered, and no later one
    watched.workers.lost.add("1")
    await asyncio.sleep(1)
    assert (watched.poll(at("1")).fresh, watched.poll(at("1")).unreachable) == (False, False)
    assert [when for _, when in watched.woken if when >= 1.5] == [], "a loss alone is no news"
    await asyncio.sleep(18)
    assert watched.poll(at("1")).unreachable
    woken = len(watched.woken)
    await asyncio.sleep(100)
    assert len(watched.woken) == woken, "that it is still lost is none"
    tries = [when for when, _, _ in watched.workers.asked["1"] if when > 2]
    assert len(tries) <= 130 / 4
    watched.workers.refused.clear()
    watched.workers.lost.clear()
    await asyncio.sleep(6)
    assert watched.poll(at("1")).fresh
    assert len(watched.woken) == woken + 1


@pytest.mark.parametrize(("chance", "first_s"), [(0.0, 0.35), (0.5, 0.5), (1.0, 0.65)])
async def test_workers_that_are_lost_together_are_not_tried_again_together(watched: Watched, chance: float, first_s: float) -> None:
    watched.chance = chance
    watched.workers.refused.add("1")
    watched.follow(at("1"))
    await asyncio.sleep(1)
    assert [when for when, _, _ in watched.workers.asked["1"]][:2] == [0, pytest.approx(first_s, abs=0.02)]


async def test_a_worker_that_answers_at_once_again_and_again_is_asked_once_a_second(watched: Watched) -> None:
    watched.workers.says("1")

    async def hurry() -> None:
        for number in range(2, 100_000):
            watched.workers.says("1", number)
            await asyncio.sleep(0.2)

    watched.follow(at("1"))
    hurrying = asyncio.create_task(hurry())
    await asyncio.sleep(120)
    hurrying.cancel()
    late = [when for when, _, _ in watched.workers.asked["1"] if when > 60]
    assert len(late) <= 61


async def test_a_few_changes_in_a_row_are_all_seen_at_once(watched: Watched) -> None:
    watched.workers.says("1")
    watched.follow(at("1"))
    await asyncio.sleep(5)
    for number in range(2, 5):
        watched.workers.says("1", number)
        await asyncio.sleep(0.2)
        assert watched.poll(at("1")).state.revision == f"b.{number}"


async def test_a_watch_ends_with_its_pod_and_begins_anew_for_another_life_of_it(watched: Watched) -> None:
    watched.workers.says("1")
    watched.workers.says("2")
    watched.follow(at("1"))
    await asyncio.sleep(1)
    watched.follow(at("1", restarts=1))
    await asyncio.sleep(1)
    assert (watched.workers.open, len(watched.watches)) == ({"1": 1}, 1)
    assert watched.workers.asked["1"][-2:] == [(1, "", 0.0), (1, "b.1", WAIT_S)], "the new life is asked for all"
    watched.follow(at("2", restarts=1))
    await asyncio.sleep(1)
    assert watched.workers.open == {"1": 0, "2": 1}
    watched.follow()
    await asyncio.sleep(0.1)
    assert (watched.workers.open, len(watched.watches)) == ({"1": 0, "2": 0}, 0)


async def test_a_pod_is_heard_for_an_object_that_was_made_again_in_one_moment(watched: Watched) -> None:
    """Check that a pod's watch goes on for an object that was orphaned and made again at once. The pod is the same, and no pass saw the
    object gone."""
    watched.workers.says("1")
    watched.follow(at("1"))
    await asyncio.sleep(1)
    watched.memory = DeploymentMemory(uid="v", tokens=watched.memory.tokens)
    watched.follow(at("1"))
    await asyncio.sleep(1)
    assert watched.poll(at("1")).state is not None
    assert (watched.workers.open, len(watched.watches)) == ({"1": 1}, 1)


async def test_an_event_of_its_pod_ends_a_watch_before_any_pass(watched: Watched) -> None:
    watched.workers.says("1")
    watched.follow(at("1"))
    await asyncio.sleep(1)
    status = {"podIP": "1", "containerStatuses": [{"name": "worker", "restartCount": 0, "state": {"running": {}}}]}
    manifest = {"metadata": {"name": "d-0-0", "uid": at("1").uid, "creationTimestamp": "2026-01-01T00:00:00Z"}, "status": status}
    watched.watches.see_pod("n", "d", manifest, gone=False)
    await asyncio.sleep(0.1)
    assert watched.workers.open == {"1": 1}
    watched.watches.see_pod("n", "d", manifest | {"status": status | {"podIP": "9"}}, gone=False)
    await asyncio.sleep(0.1)
    assert watched.workers.open == {"1": 0}


async def test_closed_watches_call_nobody_until_they_are_opened_again(watched: Watched) -> None:
    watched.workers.says("1")
    watched.follow(at("1"))
    await asyncio.sleep(1)
    await watched.watches.stop()
    watched.follow(at("1"))
    await asyncio.sleep(60)
    assert (watched.workers.open, len(watched.watches)) == ({"1": 0}, 0)
    watched.watches.start()
    watched.follow(at("1"))
    await asyncio.sleep(1)
    assert watched.workers.open == {"1": 1}
