# SPDX-License-Identifier: Apache-2.0
"""Planning adapters by difference gives the same plan as planning from nothing, and looks only at adapters that changed."""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.merged_state import merged
from diffusion_operator.api.worker_state import AdapterRecord, RecordState, WireError, WorkerPhase, WorkerState
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.adapters.load_attempts import next_attempt
from diffusion_operator.plan.adapters.plan import AdapterPlan
from diffusion_operator.plan.adapters.slices import SLICE
from diffusion_operator.plan.adapters.status import adapter_status
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment, plan_in_slices
from diffusion_operator.plan.observed.observed import Attempt, AttemptKey, Observed, Poll
from support.operator.plan_builders import NOW, REVISION, made, pod

NAMES = ("a", "b", "c", "x", "y")
PATHS = ("/loras/1", "/loras/2")
ERRORS = (WireError(code="SourceNotFound", message="m"), WireError(code="InvalidAdapter", message="m"), WireError(code="RankTooLarge"))


def adapter(name: str, number: int, spec: dict[str, Any], *, generation: int = 1) -> LoRAAdapter:
    metadata = {"name": name, "namespace": "n", "uid": f"{name}-{number}", "generation": generation}
    metadata["creationTimestamp"] = f"2026-01-01T00:00:{number % 60:02}Z"
    return msgspec.convert({"metadata": metadata, "spec": {"deploymentRef": {"name": "d"}} | spec}, LoRAAdapter)


class World:
    """Two replicas, a few adapters whose names collide, and everything that may happen to them."""

    def __init__(self) -> None:
        self.now = NOW
        self.number = 0
        self.spec: dict[str, Any] = {"replicas": 2, "lora": {"onMissing": "Reject", "maxLoaded": 2, "maxCached": 2}}
        self.adapters: dict[str, LoRAAdapter] = {}
        self.given: tuple[LoRAAdapter, ...] = ()
        self.pods = [pod(0), pod(1)]
        self.said = [WorkerState(boot_id="b0", state=WorkerPhase.READY), WorkerState(boot_id="b1", state=WorkerPhase.READY)]
        self.failures = [0, 0]
        self.awake = False
        self.news: dict[AttemptKey, Attempt] = {}
        self.plan = AdapterPlan()

    # things that happen -----------------------------------------------------------------------------------------------

    def make(self, dice: random.Random) -> None:
        self.number += 1
        name = dice.choice(NAMES)
        spec: dict[str, Any] = {"source": {"path": dice.choice(PATHS)}, "residency": dice.choice(("Resident", "Cached", "OnDemand"))}
        spec |= {"adapterName": "x"} if dice.random() < 0.3 else {}
        self.adapters[name] = adapter(name, self.number, spec)

    def delete(self, dice: random.Random) -> None:
        self.adapters.pop(dice.choice(NAMES), None)

    def edit(self, dice: random.Random) -> None:
        name = dice.choice(NAMES)
        changes: list[dict[str, Any]] = [
            {"source": {"path": dice.choice(PATHS)}},
            {"residency": dice.choice(("Resident", "Cached"))},
            {"suspend": dice.random() < 0.5},
            {"adapterName": dice.choice(NAMES)},
            {"defaultScale": dice.choice(("0.5", "1.0"))},
            {"expectedRank": dice.choice((8, 128))},
            {"priority": dice.choice((0, 3))},
        ]
        if (one := self.adapters.get(name)) is not None:
            spec = msgspec.convert(msgspec.to_builtins(one.spec) | dice.choice(changes), type(one.spec))
            metadata = msgspec.structs.replace(one.metadata, generation=one.metadata.generation + 1)
            self.adapters[name] = msgspec.structs.replace(one, metadata=metadata, spec=spec)

    def write_status(self, dice: random.Random) -> None:
        name = dice.choice(NAMES)
        if (one := self.adapters.get(name)) is not None:
            view = self.plan.tally.views.get(one.metadata.uid)
            self.adapters[name] = msgspec.structs.replace(one, status=adapter_status(one, view, now=self.now))

    def read_again(self, dice: random.Random) -> None:
        """Replace an adapter by an equal object, as a listing does."""
        name = dice.choice(NAMES)
        if (one := self.adapters.get(name)) is not None:
            self.adapters[name] = msgspec.structs.replace(one)

    def say(self, dice: random.Random) -> None:
        """Change a replica's report of one adapter at random, or drop it."""
        place, name = dice.randrange(2), dice.choice(NAMES)
        path, state = dice.choice(PATHS), dice.choice([one for one in RecordState if isinstance(one, RecordState)])
        record = msgspec.convert({"name": name, "state": state.value, "source": {"path": path}}, AdapterRecord)
        digest = dice.choice((None, "sha256:1", "sha256:2"))
        error = dice.choice(ERRORS) if state is RecordState.FAILED or dice.random() < 0.2 else None
        total, scale = dice.choice((0, 0, 7)), dice.choice((0.5, 1.0))
        record = msgspec.structs.replace(
            record, digest=digest, error=error, ranks_loaded=1, ranks_total=1, requests_total=total, scale=scale
        )
        others = tuple(one for one in self.said[place].adapters if one.name != name or dice.random() < 0.2)
        adapters = others if dice.random() < 0.2 else (*others, record)
        self.said[place] = merged(self.said[place], msgspec.structs.replace(self.said[place], adapters=adapters))

    def obey(self, dice: random.Random) -> None:
        """Let a replica report most of the adapters that the plan asks it for."""
        place = dice.randrange(2)
        rows = [one for one in self.plan.rows.values() if one.desired is not None]
        kept = {one.name: one for one in self.said[place].adapters}
        for one in rows:
            if one.desired is not None and dice.random() < 0.7:
                load = one.desired.load
                told = {"residency": load.residency.value, "priority": load.priority, "scale": load.scale, "digest": load.digest}
                where = {"name": one.desired.name, "state": "Loaded", "source": msgspec.to_builtins(load.source)}
                kept[one.desired.name] = msgspec.convert(where | told | {"ranksLoaded": 1, "ranksTotal": 1}, AdapterRecord)
        after = msgspec.structs.replace(self.said[place], adapters=tuple(kept.values()))
        self.said[place] = merged(self.said[place], after)

    def move(self, dice: random.Random) -> None:
        place, phase = dice.randrange(2), dice.choice((WorkerPhase.READY, WorkerPhase.READY, WorkerPhase.ASLEEP, WorkerPhase.WAKING))
        self.said[place] = merged(self.said[place], msgspec.structs.replace(self.said[place], state=phase))

    def restart(self, dice: random.Random) -> None:
        self.number += 1
        self.said[dice.randrange(2)] = WorkerState(boot_id=f"again-{self.number}", state=WorkerPhase.READY)

    def fall_silent(self, dice: random.Random) -> None:
        self.failures[dice.randrange(2)] ^= 1

    def replace_pod(self, dice: random.Random) -> None:
        self.number += 1
        place = dice.randrange(2)
        self.pods[place] = pod(place, self.number, revision=dice.choice((REVISION, "older")), terminating=dice.random() < 0.3)

    def edit_deployment(self, dice: random.Random) -> None:
        lora = {"onMissing": dice.choice(("Load", "Reject")), "maxLoaded": dice.choice((0, 1, 2)), "maxCached": dice.choice((1, 2, 4))}
        self.spec = {
            "replicas": 2,
            "lora": lora,
            "sleep": {"policy": dice.choice(("OnIdle", "AlwaysAwake"))},
            "suspend": dice.random() < 0.1,
        }

    def write_deployment_status(self, dice: random.Random) -> None:
        self.awake = dice.random() < 0.8

    def wait(self, dice: random.Random) -> None:
        self.now += timedelta(seconds=dice.choice((0, 1, 6, 15, 700)))

    def call(self, dice: random.Random) -> None:
        if self.plan.pushes:
            key = dice.choice(self.plan.pushes).key
            refused = ControlRefused(WireError(code=dice.choice(("Busy", "SourceNotFound", "InvalidAdapter"))), status=409)
            error = dice.choice((None, None, ControlUnreachable("gone"), refused))
            self.news[key] = next_attempt(self.news.get(key) or self.plan.attempt(key), error, now=self.now)

    # planning ---------------------------------------------------------------------------------------------------------

    def deployment(self) -> DiffusionDeployment:
        told = [{"index": place, "state": "Awake", "bootId": one.boot_id} for place, one in enumerate(self.said)]
        return made({"replicaStates": told if self.awake else []}, **self.spec)

    def observed(self, attempts: dict[AttemptKey, Attempt]) -> Observed:
        given = tuple(self.adapters[name] for name in sorted(self.adapters))
        if len(given) != len(self.given) or any(one is not other for one, other in zip(given, self.given, strict=True)):
            self.given = given
        polls = {self.pods[place].uid: Poll(state=self.said[place], failures=self.failures[place]) for place in range(2)}
        return Observed(
            deployment=self.deployment(),
            default_image="worker:1",
            pods=tuple(self.pods),
            polls=polls,
            adapters=self.given,
            attempts=attempts,
        )

    def by_difference(self) -> DeploymentPlan:
        return plan_deployment(self.observed(self.news), self.now, self.plan)

    def from_nothing(self) -> DeploymentPlan:
        """Plan without the last plan; attempts are passed because no observation contains them."""
        return plan_deployment(self.observed(attempts_of(self.plan) | self.news), self.now)


HAPPENS: tuple[Callable[[World, random.Random], None], ...] = (
    World.make, World.make, World.delete, World.edit, World.edit, World.write_status, World.write_status, World.read_again, World.say,
    World.say, World.obey, World.obey, World.move, World.restart, World.fall_silent, World.replace_pod, World.edit_deployment,
    World.write_deployment_status, World.wait, World.wait, World.call, World.call,
)  # fmt: skip


def attempts_of(plan: AdapterPlan) -> dict[AttemptKey, Attempt]:
    return {
        AttemptKey(adapter_uid=uid, generation=one.adapter.metadata.generation, boot_id=column.boot_id): cell.attempt
        for uid, one in plan.rows.items()
        for column, cell in zip(plan.columns, one.cells, strict=True)
        if cell.attempt is not None and column.boot_id is not None
    }


def said_by(plan: DeploymentPlan) -> dict[str, Any]:
    adapters = plan.adapters
    return {
        "views": list(adapters.tally.views.items()),
        "marks": list(adapters.tally.marks.items()),
        "counts": dict(adapters.tally.counts),
        "pushes": adapters.pushes,
        "removals": sorted(adapters.removals, key=lambda one: (one.worker.pod_uid, one.name)),
        "states": [one.state for one in adapters.groups],
        "wanted": adapters.wanted,
        "attempts": attempts_of(adapters),
        "again at": adapters.again_at,
        "next look": plan.look_again_s,
        "status": plan.status,
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(range(len(HAPPENS))), st.integers(0, 999)), min_size=1, max_size=40))
def test_a_plan_by_difference_is_the_plan_from_nothing(happened: list[tuple[int, int]]) -> None:
    world = World()
    for which, seed in happened:
        HAPPENS[which](world, random.Random(seed))
        ours, theirs = world.by_difference(), world.from_nothing()
        assert said_by(ours) == said_by(theirs), HAPPENS[which].__name__
        world.plan, world.news = ours.adapters, {}


def crowd(count: int) -> World:
    """Return a world whose two replicas have loaded `count` adapters, with a plan that knows it."""
    world = World()
    world.spec["lora"] = {"maxCached": count}
    world.awake = True
    world.adapters = {f"a{one}": adapter(f"a{one}", one, {"source": {"path": f"/loras/{one}"}}) for one in range(count)}
    records = tuple(loaded(f"a{one}", f"/loras/{one}") for one in range(count))
    world.said = [msgspec.structs.replace(one, adapters=records) for one in world.said]
    world.plan = world.by_difference().adapters
    return world


def loaded(name: str, path: str, **more: Any) -> AdapterRecord:
    told = {"name": name, "state": "Loaded", "source": {"path": path}, "ranksLoaded": 1, "ranksTotal": 1}
    return msgspec.convert(told | more, AdapterRecord)


def other_rows(before: AdapterPlan, after: AdapterPlan) -> list[str]:
    """Return the UIDs of the adapters whose row is new or was planned again."""
    return [uid for uid, one in after.rows.items() if before.rows.get(uid) is not one]


def test_a_plan_that_finds_nothing_new_looks_at_no_adapter() -> None:
    world = crowd(50)
    world.now += timedelta(seconds=60)
    again = world.by_difference().adapters
    assert again.rows is world.plan.rows
    assert again.tally is world.plan.tally
    assert (again.changed, again.calls) == ((), ())


def test_a_changed_adapter_is_looked_at_alone() -> None:
    world = crowd(50)
    world.read_again(random.Random(0))
    world.adapters["a7"] = msgspec.structs.replace(world.adapters["a7"])
    again = world.by_difference().adapters
    assert other_rows(world.plan, again) == ["a7-7"]
    world.adapters["a9"] = adapter("a9", 9, {"source": {"path": "/loras/9"}, "defaultScale": "0.5"}, generation=2)
    changed = world.by_difference().adapters
    assert other_rows(world.plan, changed) == ["a7-7", "a9-9"]
    assert [one.name for one in changed.pushes] == ["a9", "a9"]
    assert [one.decision.adapter.metadata.name for one in changed.changed] == ["a9"]


def test_a_record_that_changed_on_one_replica_leaves_the_other_adapters_and_the_other_replica_alone() -> None:
    world = crowd(50)
    records = tuple(one if one.name != "a7" else loaded("a7", "/loras/7", scale=0.5) for one in world.said[0].adapters)
    world.said[0] = merged(world.said[0], msgspec.structs.replace(world.said[0], adapters=records))
    again = world.by_difference().adapters
    assert other_rows(world.plan, again) == ["a7-7"]
    assert again.rows["a7-7"].cells[1] is world.plan.rows["a7-7"].cells[1]


def test_the_first_plan_of_many_adapters_can_be_left_again_and_again() -> None:
    world = crowd(500)
    slices = plan_in_slices(world.observed({}), world.now, AdapterPlan())
    assert sum(1 for _ in slices) >= 2 * 500 / SLICE


def test_a_state_that_says_the_same_keeps_its_records_and_their_index() -> None:
    before = WorkerState(boot_id="b", state=WorkerPhase.READY, adapters=(loaded("a", "/a"), loaded("b", "/b")))
    read = msgspec.convert(msgspec.to_builtins(before), WorkerState)
    aged = tuple(msgspec.structs.replace(one, last_request_age_seconds=9.0) for one in read.adapters)
    after = merged(before, msgspec.structs.replace(read, adapters=aged, in_flight=3))
    assert after.adapters is before.adapters
    assert after.named is before.named
    assert after.in_flight == 3


def test_of_a_state_that_says_something_else_of_one_adapter_the_others_keep_their_records() -> None:
    before = WorkerState(boot_id="b", state=WorkerPhase.READY, adapters=(loaded("a", "/a"), loaded("b", "/b"), loaded("c", "/c")))
    said = (loaded("a", "/a"), loaded("b", "/b", requestsTotal=1), loaded("d", "/d"))
    after = merged(before, msgspec.structs.replace(before, adapters=said))
    assert [one is other for one, other in zip(after.adapters, before.adapters, strict=True)] == [True, False, False]
    assert list(after.named) == ["a", "b", "d"]
    assert after.named["a"] is before.named["a"]
    assert after.record_states == {RecordState.LOADED: 3}


def test_the_time_of_the_last_request_is_the_one_of_the_look_that_brought_it() -> None:
    """Check that the age in a record that stays the same object for an hour dates from the look that brought it."""
    world = crowd(1)
    used = loaded("a0", "/loras/0", requestsTotal=4, lastRequestAgeSeconds=10)
    world.said[0] = msgspec.structs.replace(world.said[0], adapters=(used,))
    world.plan = world.by_difference().adapters
    world.now += timedelta(hours=1)
    world.said[1] = msgspec.structs.replace(world.said[1], adapters=(loaded("a0", "/loras/0", scale=0.5),))
    usage = world.by_difference().adapters.tally.views["a0-0"].usage
    assert usage is not None
    assert (usage.requests_total, usage.last_request_time) == (4, NOW - timedelta(seconds=10))
