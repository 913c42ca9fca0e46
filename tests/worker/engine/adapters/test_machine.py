# SPDX-License-Identifier: Apache-2.0
"""The state machine of adapters without ranks, sources and clock: each event by itself, and random sequences of them."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_worker.engine.adapters import machine
from diffusion_worker.engine.adapters.effects import Abort, Answer, Cancel, Effect, Release, Retire, Start, Undo
from diffusion_worker.engine.adapters.table import Adapter, AdapterTable, Load
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterState, Residency
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import AdapterIdentity, LoadedLoRA
from diffusion_worker.sources.fetching import Fetched
from diffusion_worker.sources.source import Source

WRONG = RequestError(ErrorCode.INVALID_ADAPTER, "no such file")
PASSES = RequestError(ErrorCode.NETWORK_ERROR, "no route")


def call(path: str, **fields: Any) -> AdapterCall:
    return AdapterCall(operation_id="o", source=Source(path=path), **fields)


def found(path: str, evicted: Iterable[int] = ()) -> LoadedLoRA:
    """Return the report by which ranks say that they loaded the adapter in a file, and evicted the adapters with these ids."""
    return LoadedLoRA(f"sha256:{path}", 8, 24, 4096, evicted=list(evicted), identity=AdapterIdentity(f"v1:{path}"))


class World:
    """A stand-in for the sources and ranks of adapters, which performs the effects that the state machine returns.

    A test, or chance, says when they answer, and with what.
    """

    def __init__(self, capacity: int = 2) -> None:
        self.table = AdapterTable(capacity=capacity, residents=1)
        self.asleep = False
        # The identity of each adapter that the ranks hold, by id.
        self.ranks: dict[int, str] = {}
        self.loads: dict[Load, Adapter] = {}
        self.cancelled: set[Load] = set()
        self.answers: dict[Load, RequestError | None] = {}
        self.undos: list[Undo] = []
        self.retiring: list[Adapter] = []
        # Files that were fetched and not released, with how often each was fetched.
        self.files = Counter[str]()

    def do(self, effects: Iterable[Effect]) -> list[str]:
        """Perform effects as the runner does, and return the names of their classes; an effect that must not come fails an assertion."""
        kinds = []
        for effect in effects:
            kinds.append(type(effect).__name__)
            match effect:
                case Start(adapter, load):
                    self.loads[load] = adapter
                case Cancel(load):
                    assert load in self.loads and not load.registering, "the ranks' answer is awaited"
                    self.cancelled.add(load)
                case Answer(load, error):
                    assert load not in self.answers, "a load has one outcome"
                    self.answers[load] = error
                case Release(fetched):
                    self.files[fetched.path] -= 1
                    assert self.files[fetched.path] >= 0, "a file is released once"
                case Undo():
                    self.undos.append(effect)
                case Retire(adapter):
                    self.retiring.append(adapter)
        return kinds

    # Calls

    def put(self, name: str, path: str, **fields: Any) -> list[str]:
        return self.do(machine.put(self.table, name, call(path, **fields), deadline_s=9.0, deferring=self.asleep))

    def newest(self, name: str) -> Adapter:
        adapter = self.table.newest(name)
        assert adapter is not None
        return adapter

    # Sources and ranks

    def fetch(self, adapter: Adapter) -> None:
        path = str(adapter.call.source.path)
        self.files[path] += 1
        machine.file_came(self.table, adapter, Fetched(path), 0.0)

    def register(self, adapter: Adapter) -> None:
        """Have the ranks load an adapter and evict the victims of its load, and report it to the machine."""
        load = adapter.load
        evicted = [victim.lora_int_id for victim in load.victims] if load else []
        for number in evicted:
            self.ranks.pop(number, None)
        report = found(str(adapter.fetched.path if adapter.fetched else ""), evicted)
        self.ranks[adapter.lora_int_id] = report.identity
        if load:
            self.loads.pop(load, None)
        self.do(machine.loaded(self.table, adapter, report, [], 0.0))

    def fail(self, adapter: Adapter, error: RequestError, **fields: bool) -> list[str]:
        assert adapter.load is not None
        self.loads.pop(adapter.load, None)
        return self.do(machine.load_failed(self.table, adapter, error, **fields))

    def load(self, name: str, path: str, **fields: Any) -> Adapter:
        """Put an adapter, fetch it and load it on the ranks; return it."""
        self.put(name, path, **fields)
        adapter = self.newest(name)
        self.fetch(adapter)
        assert machine.prepared(self.table, adapter)
        self.register(adapter)
        return adapter


def fetching(world: World) -> Adapter:
    world.put("a", "/a")
    return world.newest("a")


def loading(world: World) -> Adapter:
    adapter = fetching(world)
    world.fetch(adapter)
    return adapter


def registering(world: World) -> Adapter:
    adapter = loading(world)
    assert machine.prepared(world.table, adapter)
    return adapter


def serving(world: World) -> Adapter:
    return world.load("a", "/a")


def cached(world: World) -> Adapter:
    adapter = serving(world)
    world.load("b", "/b")
    world.load("c", "/c")
    return adapter


def deferred(world: World) -> Adapter:
    adapter = serving(world)
    world.do(machine.ranks_emptied(world.table, asleep=True))
    return adapter


def failed(world: World) -> Adapter:
    adapter = fetching(world)
    world.fail(adapter, WRONG)
    return adapter


def draining(world: World) -> Adapter:
    adapter = serving(world)
    world.do(machine.removed(world.table, "a", 5.0))
    return adapter


def replacing(world: World) -> Adapter:
    serving(world)
    world.put("a", "/other")
    return world.newest("a")


Event = Callable[[World, Adapter], list[str]]


def again(path: str = "/a", **fields: Any) -> Event:
    return lambda world, adapter: world.put("a", path, **fields)


def remove(world: World, adapter: Adapter) -> list[str]:
    return world.do(machine.removed(world.table, "a", 5.0))


def fails(error: RequestError, **fields: bool) -> Event:
    return lambda world, adapter: world.fail(adapter, error, **fields)


def want(world: World, adapter: Adapter) -> list[str]:
    return world.do(machine.wanted(world.table, adapter, 9.0))


def end(world: World, adapter: Adapter) -> list[str]:
    return world.do(machine.ended(world.table, RequestError(ErrorCode.TERMINATING, "the end")))


def sleep(world: World, adapter: Adapter) -> list[str]:
    return world.do(machine.ranks_emptied(world.table, asleep=True))


def find_asleep(world: World, adapter: Adapter) -> list[str]:
    assert adapter.fetched is not None
    return world.do(machine.slept(world.table, adapter, adapter.fetched))


def answer_of_ranks(world: World, adapter: Adapter) -> list[str]:
    return world.do(machine.loaded(world.table, adapter, found("/a"), [], 0.0))


def wake(world: World, adapter: Adapter) -> list[str]:
    return world.do(machine.wake_reached(world.table, adapter, 9.0))


def reload_fails(world: World, adapter: Adapter) -> list[str]:
    machine.taken(world.table, [adapter], "r", 1.0)
    return world.do(machine.reload_failed(world.table, adapter, WRONG))


def unload(world: World, adapter: Adapter) -> list[str]:
    return world.do(machine.unloaded(world.table, adapter))


S = AdapterState
# The state before, the event, the state after, the effects, and whether the adapter is in the table then.
TRANSITIONS: list[tuple[Callable[[World], Adapter], Event, AdapterState, list[str], bool]] = [
    (fetching, again(), S.FETCHING, [], True),
    (fetching, again("/other"), S.FETCHING, ["Answer", "Cancel", "Start"], False),
    (fetching, remove, S.FETCHING, ["Answer", "Cancel"], False),
    (fetching, want, S.FETCHING, [], True),
    (fetching, fails(WRONG), S.FAILED, ["Answer", "Moved", "Expire"], True),
    (fetching, fails(PASSES), S.FAILED, ["Answer", "Moved", "Expire"], True),
    (fetching, end, S.FETCHING, ["Answer", "Cancel"], True),
    (loading, fails(WRONG), S.FAILED, ["Answer", "Moved", "Release", "Expire"], True),
    (loading, find_asleep, S.DEFERRED, ["Answer", "Moved"], True),
    (registering, remove, S.LOADING, ["Answer"], False),
    (registering, answer_of_ranks, S.LOADED, ["Moved", "Answer"], True),
    (registering, fails(WRONG, undo=True), S.FAILED, ["Undo", "Answer", "Moved", "Release", "Expire"], True),
    (registering, fails(PASSES, due=True), S.DEFERRED, ["Answer", "Moved"], True),
    (serving, again(), S.LOADED, [], True),
    (serving, again(scale=0.5), S.LOADED, [], True),
    (serving, again("/other"), S.LOADED, ["Start"], True),
    (serving, again(read_again=True), S.LOADED, ["Start"], True),
    (serving, remove, S.DRAINING, ["Retire"], True),
    (serving, sleep, S.DEFERRED, [], True),
    (serving, reload_fails, S.FAILED, ["Undo", "Release", "Expire", "Abort"], True),
    (cached, want, S.LOADING, ["Start"], True),
    (cached, again(digest="sha256:/a"), S.LOADING, ["Start"], True),
    (cached, again(), S.CACHED, ["Release", "Start"], False),
    (cached, again(digest="sha256:/a", residency=Residency.ON_DEMAND), S.CACHED, [], True),
    (cached, remove, S.CACHED, ["Release"], False),
    (deferred, wake, S.LOADING, [], True),
    (deferred, want, S.LOADING, ["Start"], True),
    (deferred, remove, S.DEFERRED, ["Release"], False),
    (failed, again(), S.FAILED, ["Start"], False),
    (failed, remove, S.FAILED, [], False),
    (draining, sleep, S.DRAINING, ["Release", "Moved"], False),
    (draining, unload, S.DRAINING, ["Release", "Moved"], False),
    (draining, again(), S.DRAINING, ["Start"], True),
    (replacing, fails(WRONG), S.FETCHING, ["Answer", "Moved"], False),
    (replacing, again(), S.FETCHING, ["Answer", "Cancel"], False),
]


def label(value: object) -> str | None:
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize(("before", "event", "after", "effects", "stays"), TRANSITIONS, ids=label)
def test_each_event_moves_an_adapter_and_has_its_effects(
    before: Callable[[World], Adapter], event: Event, after: AdapterState, effects: list[str], stays: bool
) -> None:
    world = World()
    adapter = before(world)
    assert event(world, adapter) == effects
    assert (adapter.state, adapter in world.table) == (after, stays)


def test_a_version_that_is_loaded_takes_the_name_and_the_old_one_only_finishes_its_requests() -> None:
    world = World()
    old = world.load("a", "/a")
    new = world.load("a", "/other")
    assert (world.table.get("a"), new.state, old.state, world.retiring) == (new, S.LOADED, S.DRAINING, [old])


def test_an_adapter_that_no_rank_could_load_again_ends_its_requests_with_the_reason() -> None:
    world = World()
    adapter = serving(world)
    machine.taken(world.table, [adapter], "r", 1.0)
    [abort] = [each for each in machine.reload_failed(world.table, adapter, WRONG) if isinstance(each, Abort)]
    assert (abort.request_ids, abort.code) == (["r"], ErrorCode.ADAPTER_NOT_LOADED)
    assert "no such file" in abort.message


def test_a_load_that_passes_is_tried_again_by_the_next_request_unless_a_call_waits_for_it() -> None:
    world = World()
    world.do(machine.put(world.table, "a", call("/a", residency=Residency.ON_DEMAND), deadline_s=9.0))
    adapter = world.newest("a")
    for asked, after in ((False, S.CACHED), (True, S.FAILED)):
        world.do(machine.wanted(world.table, adapter, 9.0, asked=asked))
        world.fail(adapter, PASSES)
        assert adapter.state is after


def test_a_state_that_does_not_follow_is_a_defect() -> None:
    world = World()
    adapter = draining(world)
    with pytest.raises(AssertionError, match="cannot become Loading from Draining"):
        world.do(machine.wanted(world.table, adapter, 9.0))


# --- random sequences -------------------------------------------------------------------------------------------------------

NAMES, PATHS = ("a", "b", "c"), ("/w", "/x", "/y", "/z")


class Chance(World):
    """A world in which a random source chooses what happens next, among all that could."""

    def __init__(self, source: random.Random) -> None:
        super().__init__()
        self.source = source
        self.requests: dict[str, list[Adapter]] = {}
        self.numbers = 0
        self.begun: set[Load] = set()

    def turn(self) -> None:
        """Let one random thing happen, and check what must hold after it."""
        others = [self.put_any, self.put_any, self.remove_any, self.ask, self.ask, self.leave, self.change]
        self.source.choice([*others, *[self.advance] * 8])()
        self.check()

    def put_any(self) -> None:
        source = self.source
        residency = source.choice([Residency.CACHED, Residency.CACHED, Residency.ON_DEMAND])
        fields: dict[str, Any] = {"residency": residency, "priority": source.choice([0, 0, 1]), "read_again": source.random() < 0.1}
        self.put(source.choice(NAMES), source.choice(PATHS), **fields)

    def remove_any(self) -> None:
        self.do(machine.removed(self.table, self.source.choice(NAMES), 5.0))

    def ask(self) -> None:
        """Have a request take the adapters of one or two random names if all are usable, else want those that are not.

        Do nothing while the ranks sleep.
        """
        if self.asleep:
            return
        named = [self.table.get(name) for name in self.source.sample(NAMES, self.source.choice([1, 2]))]
        adapters = [adapter for adapter in named if adapter is not None and adapter.state is not S.FAILED]
        self.numbers += 1
        if adapters and all(adapter.usable for adapter in adapters):
            machine.taken(self.table, adapters, f"r{self.numbers}", 1.0)
            self.requests[f"r{self.numbers}"] = adapters
            return
        machine.awaited(self.table, adapters, self.numbers)
        for adapter in adapters:
            if not adapter.usable and not adapter.going:
                self.do(machine.wanted(self.table, adapter, 9.0))
        if self.source.random() < 0.7:
            machine.awaited(self.table, [], self.numbers)

    def leave(self) -> None:
        if self.requests:
            request = self.source.choice(list(self.requests))
            self.do(machine.given_back(self.table, self.requests.pop(request), request))

    def advance(self) -> None:
        """Let one random load, undo or unload go on; do nothing if there is none."""
        works: list[Callable[[], None]] = [lambda load=load: self.go_on(load) for load in self.loads]
        works += [lambda undo=undo: self.undo(undo) for undo in self.undos]
        if not self.asleep:
            works += [lambda adapter=adapter: self.unload(adapter) for adapter in self.retiring if not adapter.users]
        if works:
            self.source.choice(works)()

    def go_on(self, load: Load) -> None:
        adapter, lucky = self.loads[load], self.source.random() < 0.8
        if load in self.cancelled:
            assert load.superseded is not None
            self.fail(adapter, load.superseded)
        elif load.registering:
            assert not self.asleep
            if lucky:
                self.register(adapter)
                return
            # Some rank loaded it, and evicted some of its victims, before another one failed.
            for number in [victim.lora_int_id for victim in load.victims if self.source.random() < 0.5]:
                self.ranks.pop(number, None)
            self.ranks[adapter.lora_int_id] = "half"
            self.fail(adapter, self.source.choice([WRONG, PASSES]), undo=True)
        elif not lucky:
            self.fail(adapter, self.source.choice([WRONG, PASSES]))
        elif adapter.fetched is None:
            self.fetch(adapter)
        elif self.asleep:
            del self.loads[load]
            self.do(machine.slept(self.table, adapter, adapter.fetched))
        else:
            machine.prepared(self.table, adapter)

    def undo(self, undo: Undo) -> None:
        self.undos.remove(undo)
        self.ranks.pop(undo.number, None)
        gone = [victim for victim in undo.victims if victim.state is S.LOADED and victim.lora_int_id not in self.ranks]
        self.do(machine.undone(self.table, undo.adapter, undo.number, undo.victims, gone))

    def unload(self, adapter: Adapter) -> None:
        self.retiring.remove(adapter)
        if adapter in self.table:
            self.ranks.pop(adapter.lora_int_id, None)
            self.do(machine.unloaded(self.table, adapter))

    def change(self) -> None:
        """Let the ranks sleep after their calls and requests, wake, or be lost and replaced."""
        lost = not self.asleep and self.source.random() < 0.5
        for load in [load for load in self.loads if load.registering]:
            if lost:
                self.fail(self.loads[load], PASSES)
            else:
                self.go_on(load)
        for undo in list(self.undos):
            self.undo(undo)
        if lost:
            self.ranks.clear()
            self.do(machine.ranks_emptied(self.table, asleep=False))
            for adapter in self.table:
                if adapter.state in (S.LOADED, S.DRAINING):
                    self.load_again(adapter)
        if self.asleep or lost:
            self.wake()
            return
        while self.requests:
            self.leave()
        self.asleep = True
        if self.source.random() < 0.5:
            self.ranks.clear()
            self.do(machine.ranks_emptied(self.table, asleep=True))

    def load_again(self, adapter: Adapter) -> None:
        if self.source.random() < 0.8:
            self.register(adapter)
        else:
            self.do(machine.reload_failed(self.table, adapter, WRONG))

    def wake(self) -> None:
        self.asleep = False
        while deferred := self.table.deferred():
            self.do(machine.wake_reached(self.table, deferred[0], 9.0))
            if (load := deferred[0].load) is not None:
                self.begun.add(load)
                if self.source.random() < 0.8:
                    self.register(deferred[0])
                else:
                    self.fail(deferred[0], WRONG, undo=True, lasting=True)

    def check(self) -> None:
        """Assert what must hold after each event, about the table, the loads and the ranks."""
        self.begun |= set(self.loads)
        names = [adapter.name for adapter in self.table if adapter not in self.table.leaving]
        assert max(Counter(names).values(), default=0) <= 2, "a name has a current version, and one that arrives"
        for adapter in self.table:
            running = adapter.load is not None and self.loads.get(adapter.load) is adapter
            assert (adapter.state in (S.FETCHING, S.LOADING)) is running, "what loads has a load that runs, and nothing else has"
            if adapter.state is S.LOADED and not adapter.going:
                assert adapter.registered
                if not self.undos:
                    assert self.ranks[adapter.lora_int_id] == adapter.identity, "what is served is what the table holds"
            if adapter.state is not S.LOADED and adapter.state is not S.DRAINING:
                assert adapter.state is S.FAILED or not adapter.users, "a request uses only what is loaded"
        going = {victim for load in self.loads for victim in load.victims} | {victim for undo in self.undos for victim in undo.victims}
        assert {adapter for adapter in self.table if adapter.going} <= going, "only a load that runs, or its undo, keeps one from requests"
        for load, error in self.answers.items():
            assert (error is None) or load not in self.loads or load.superseded is error

    def end(self) -> None:
        """End all requests, wake the ranks if they sleep, and remove every adapter. Go on until no load, undo or unload is left."""
        while self.requests:
            self.leave()
        if self.asleep:
            self.wake()
        for name in NAMES:
            self.do(machine.removed(self.table, name, 5.0))
        while self.loads or self.undos or self.retiring:
            self.advance()
            self.check()


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_each_load_has_one_outcome_and_what_is_removed_leaves_nothing(seed: int) -> None:
    world = Chance(random.Random(seed))
    for _ in range(80):
        world.turn()
    world.end()
    assert world.answers.keys() == world.begun
    assert (list(world.table), world.ranks, +world.files) == ([], {}, Counter())
