# SPDX-License-Identifier: Apache-2.0
"""The state machine of adapters: a function for each event, which changes the table and returns the effects for the runner, in order.

Nothing here waits, reads a clock or calls another part. Each load that begins ends with exactly one `Answer`. The newest call for a name
wins: a load that it makes needless is answered with Conflict, and leaves nothing behind.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec

import msgspec

from diffusion_worker.engine.adapters.effects import Abort, Answer, Cancel, Effect, Expire, Moved, Release, Retire, Start, Undo
from diffusion_worker.engine.adapters.table import Adapter, AdapterTable, Load, rank_of
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterState, ProblemReport, Residency
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import LoadedLoRA
from diffusion_worker.sources.fetching import Fetched

log = logging.getLogger(__name__)

# Seconds that running requests of a replaced adapter may take to finish.
REPLACE_DRAIN_S = 120.0
# Most records of failures that only calls brought, as nothing else removes them.
MOST_FAILED = 64
FETCHING, LOADING, LOADED, CACHED, DEFERRED, DRAINING, FAILED = AdapterState
# The states after each state. An adapter may leave the table from any.
MOVES: dict[AdapterState, tuple[AdapterState, ...]] = {
    FETCHING: (LOADING, CACHED, FAILED),
    LOADING: (LOADED, DEFERRED, CACHED, FAILED),
    LOADED: (CACHED, DEFERRED, DRAINING, FAILED),
    CACHED: (FETCHING, LOADING),
    DEFERRED: (LOADING, CACHED),
    DRAINING: (),
    FAILED: (),
}


P = ParamSpec("P")


def transition(apply: Callable[P, Iterator[Effect]]) -> Callable[P, list[Effect]]:
    """Wrap a generator of effects: a call runs it to its end at once, and returns the effects as a list."""

    @functools.wraps(apply)
    def applied(*args: P.args, **kwargs: P.kwargs) -> list[Effect]:
        return list(apply(*args, **kwargs))

    return applied


def passes(problem: ProblemReport | RequestError) -> bool:
    """Return whether a load that failed so may succeed without a change of its file or its call."""
    return problem.retryable or problem.code == ErrorCode.CAPACITY_EXCEEDED


# --- calls ------------------------------------------------------------------------------------------------------------------


@transition
def put(
    table: AdapterTable, name: str, call: AdapterCall, *, deadline_s: float | None, changed: Fetched | None = None, deferring: bool = False
) -> Iterator[Effect]:
    """Put an adapter under a name and load it; without a deadline it is only declared, and a later call or a request loads it.

    An OnDemand one that is not in memory also waits for a request, and a deferred one for the wake.
    `changed` is the source's content where that differs from the loaded one's. `deferring` is true while the ranks load nothing.
    """
    adapter, current, on_demand = table.newest(name), table.get(name), call.residency is Residency.ON_DEMAND
    again, other = changed is not None or call.read_again, f"adapter {name!r}: a newer call asks for other content"
    if again or adapter is None or not adapter.is_content(call):
        yield from _discard(table.arriving.pop(name, None), other)
        adapter = current
        if again or adapter is None or not adapter.is_content(call):
            adapter = table.new(name, call)
            if current is not None and current.serves:
                table.arriving[name] = adapter
            else:
                table.named[name] = adapter
                yield from _discard(current, other)
                if on_demand or deadline_s is None:
                    _go(adapter, CACHED)
    if changed is not None:
        adapter.fetched = changed
    adapter.call = msgspec.structs.replace(call, digest=call.digest or adapter.call.digest, identity=call.identity or adapter.call.identity)
    if adapter.state is LOADED:
        adapter.error = None
    waits = (adapter.state is CACHED and on_demand) or (adapter.state is DEFERRED and deferring)
    if deadline_s is not None and adapter.state is not LOADED and not waits:
        yield from _begin(table, adapter, deadline_s, asked=True)


@transition
def removed(table: AdapterTable, name: str, drain_s: float) -> Iterator[Effect]:
    """Remove a name with its current and its arriving adapter; requests that use it have `drain_s` seconds. Harmless if unknown."""
    why = f"adapter {name!r} was removed while it was loading"
    yield from _discard(table.arriving.pop(name, None), why)
    yield from _leave(table, table.named.pop(name, None), drain_s, why)


@transition
def ended(table: AdapterTable, reason: RequestError) -> Iterator[Effect]:
    """End all loads, as the engine ends: their waiters get `reason`, and those that the ranks have not got yet are cancelled."""
    for adapter in table:
        yield from _give_up(adapter, reason)


# --- requests ---------------------------------------------------------------------------------------------------------------


def taken(table: AdapterTable, adapters: Sequence[Adapter], request_id: str, at_s: float) -> None:
    """Record that a request uses adapters from `at_s` on: count it in their usage, and make them the last used ones."""
    for adapter in adapters:
        adapter.users.add(request_id)
        adapter.usage.requests += 1
        adapter.usage.last_s = at_s
        table.use(adapter)


@transition
def given_back(table: AdapterTable, adapters: Sequence[Adapter], request_id: str) -> Iterator[Effect]:
    """Record that a request does not use adapters any more, and wake those that wait for them to become unused."""
    for adapter in adapters:
        adapter.users.discard(request_id)
        adapter.touch()
    yield Moved()


def awaited(table: AdapterTable, adapters: Sequence[Adapter], request: int) -> None:
    """Record that a request, by its number, waits for these adapters and for no others."""
    for adapter in table:
        adapter.wanted.discard(request)
    for adapter in adapters:
        adapter.wanted.add(request)


# --- one load ---------------------------------------------------------------------------------------------------------------


@transition
def wanted(table: AdapterTable, adapter: Adapter, deadline_s: float, *, asked: bool = False) -> Iterator[Effect]:
    """Load an adapter, or join its load that runs: for a request, or for an earlier call that was too late for a wake (`asked`)."""
    yield from _begin(table, adapter, deadline_s, asked=asked)


def _begin(table: AdapterTable, adapter: Adapter, deadline_s: float, *, asked: bool) -> Iterator[Effect]:
    """Begin to load an adapter, or join the load that runs already."""
    if adapter.load is not None:
        adapter.load.asked |= asked
        return
    begun = FETCHING if adapter.fetched is None else LOADING
    if adapter.state is not begun:
        _go(adapter, begun)
    adapter.error = adapter.progress = None
    yield Start(adapter, _new_load(table, adapter, deadline_s, asked=asked))


def _new_load(table: AdapterTable, adapter: Adapter, deadline_s: float, *, asked: bool) -> Load:
    adapter.load = load = Load(table.next_id(), deadline_s, asked=asked)
    adapter.lora_int_id = load.number
    return load


def file_came(table: AdapterTable, adapter: Adapter, fetched: Fetched, seconds: float) -> None:
    """Record the fetched file of a load, which becomes Loading; `seconds` and bytes count as a fetch only if progress was reported."""
    adapter.fetched = fetched
    _go(adapter, LOADING)
    if adapter.progress is not None:
        table.loads.fetch_durations.observe(seconds)
        table.loads.fetched_bytes += adapter.progress[0]


def prepared(table: AdapterTable, adapter: Adapter) -> bool:
    """Reserve room on the ranks for a load: mark the victims that it evicts, and return True; False without room, and nothing changes."""
    victims = room_for(table, adapter)
    if victims is not None:
        _register(adapter, victims)
    return victims is not None


@transition
def wake_reached(table: AdapterTable, adapter: Adapter, deadline_s: float) -> Iterator[Effect]:
    """Begin the load of a deferred adapter on awake ranks.

    Without room for it beside more wanted ones it becomes Cached, as if it had been evicted; a current OnDemand one always does.
    """
    victims = room_for(table, adapter)
    on_demand = adapter.call.residency is Residency.ON_DEMAND and table.get(adapter.name) is adapter
    if on_demand or victims is None or any(_precedence(victim) > _precedence(adapter) for victim in victims):
        _go(adapter, CACHED)
        yield from _take_name(table, adapter)
        return
    _go(adapter, LOADING)
    _new_load(table, adapter, deadline_s, asked=True)
    _register(adapter, victims)


def _register(adapter: Adapter, victims: Sequence[Adapter]) -> None:
    assert adapter.load is not None
    adapter.load.registering, adapter.load.victims, adapter.registered = True, victims, True
    for victim in victims:
        victim.going = True


@transition
def loaded(table: AdapterTable, adapter: Adapter, found: LoadedLoRA, kept: list[str], seconds: float) -> Iterator[Effect]:
    """Record that all ranks hold an adapter in the same way: at the end of its load, or again as new ranks do.

    If it has left the table meanwhile, it is unloaded again.
    """
    load, adapter.load, adapter.kept = adapter.load, None, kept
    if load is not None:
        _evict(table, [victim for victim in load.victims if victim.lora_int_id in found.evicted])
        _stay(load.victims)
        yield Moved()
        if adapter not in table:
            yield from _release(adapter)
            yield Undo(adapter, load.number, ())
            return
        _go(adapter, LOADED)
        adapter.loaded = found
        table.use(adapter)
        yield from _take_name(table, adapter)
        yield from _answer(load)
        log.info("adapter=%s loaded digest=%s rank=%d", adapter.name, found.digest, found.rank)
    adapter.load_s = seconds
    table.loads.codes["OK"] += 1
    table.loads.durations.observe(seconds)


@transition
def slept(table: AdapterTable, adapter: Adapter, fetched: Fetched) -> Iterator[Effect]:
    """End a load without an error, as the ranks sleep and its file was checked without them: the adapter becomes Deferred.

    The file of one that has left the table is given back instead.
    """
    load = _end(adapter)
    adapter.fetched = fetched
    if adapter in table:
        _go(adapter, DEFERRED)
        table.use(adapter)
        log.info("adapter=%s deferred, as the model sleeps", adapter.name)
    else:
        yield from _release(adapter)
    yield from _answer(load)
    yield Moved()


@transition
def load_failed(
    table: AdapterTable, adapter: Adapter, error: RequestError, *, undo: bool = False, lasting: bool = False, due: bool = False
) -> Iterator[Effect]:
    """End a load with an error: the name keeps its former adapter, if it had one.

    Otherwise the adapter is Failed, or Cached if the reason may pass and requests may try again. With `undo` some rank may hold it, or
    have evicted another one. A `lasting` failure is not tried again, a `due` one at the next wake.
    """
    load, current = _end(adapter), table.get(adapter.name)
    if undo:
        yield Undo(adapter, load.number, load.victims)
    elif load.registering:
        adapter.registered = False
        _stay(load.victims)
    yield from _answer(load, error)
    yield Moved()
    error = load.superseded or error
    if due:
        _go(adapter, DEFERRED)
    elif current is not adapter:
        if table.arriving.get(adapter.name) is adapter:
            del table.arriving[adapter.name]
        yield from _release(adapter)
        if load.superseded is None:
            problem = _problem(table, error)
            if current is not None:
                current.error = problem
    elif passes(error) and not lasting and (adapter.loaded is not None or not load.asked):
        adapter.error = _problem(table, error)
        _go(adapter, CACHED)
    else:
        yield from _fail(table, adapter, error)


@transition
def undone(table: AdapterTable, adapter: Adapter, number: int, victims: Sequence[Adapter], gone: Sequence[Adapter]) -> Iterator[Effect]:
    """Record that a failed load is undone, and that the ranks hold the `gone` ones of its victims no more."""
    if adapter.lora_int_id == number:  # otherwise it is being loaded again
        adapter.registered = False
    _evict(table, gone)
    _stay(victims)
    yield Moved()


# --- ranks that come back ---------------------------------------------------------------------------------------------------


@transition
def ranks_emptied(table: AdapterTable, *, asleep: bool) -> Iterator[Effect]:
    """Record that the ranks hold no adapters: they sleep, or are of a new generation that loads them again.

    If asleep, loaded adapters become Deferred, or Cached if on demand; otherwise they keep their states. Unused leaving ones are dropped.
    """
    for adapter in table if asleep else ():
        adapter.registered = False
        if adapter.state is LOADED:
            _go(adapter, CACHED if adapter.call.residency is Residency.ON_DEMAND else DEFERRED)
    for adapter in table.unused_leaving():
        yield from _forget(table, adapter)


def found_wrong(table: AdapterTable, adapter: Adapter, at_s: float) -> None:
    """Record that a wake found an adapter on the ranks to differ from its load."""
    table.loads.codes[ErrorCode.VERIFICATION_FAILED] += 1
    adapter.found_wrong_s = at_s


@transition
def reload_failed(table: AdapterTable, adapter: Adapter, error: RequestError) -> Iterator[Effect]:
    """Record that an adapter could not be loaded again: it becomes Failed, and requests that use it end with AdapterNotLoaded."""
    yield Undo(adapter, adapter.lora_int_id, ())
    if adapter.state is LOADED:
        yield from _fail(table, adapter, error)
    why = f"adapter {adapter.name!r} could not be loaded again: {error.message}"
    yield Abort(sorted(adapter.users), ErrorCode.ADAPTER_NOT_LOADED, why)


# --- the end of one ---------------------------------------------------------------------------------------------------------


@transition
def unloaded(table: AdapterTable, adapter: Adapter) -> Iterator[Effect]:
    """Record that no rank holds a leaving adapter any more."""
    yield from _forget(table, adapter)


def expired(table: AdapterTable, adapter: Adapter) -> None:
    """Drop the record of a failed adapter, and its name unless another adapter has it; no effect if the record is gone already."""
    if adapter in table.failed:
        del table.failed[adapter]
        if table.get(adapter.name) is adapter:
            del table.named[adapter.name]
            adapter.touch()


def _take_name(table: AdapterTable, adapter: Adapter) -> Iterator[Effect]:
    """Make an adapter the current one of its name; requests that use the old one may finish."""
    name, previous = adapter.name, table.get(adapter.name)
    if previous is not adapter:
        table.named[name] = adapter
        if table.arriving.get(name) is adapter:
            del table.arriving[name]
        # A request may be loading the old one again after an eviction.
        yield from _leave(table, previous, REPLACE_DRAIN_S, f"adapter {name!r}: a newer call replaced it")


def _leave(table: AdapterTable, adapter: Adapter | None, drain_s: float, why: str) -> Iterator[Effect]:
    """End an adapter that has lost its name: its requests may finish, if it was loaded."""
    if adapter is not None and adapter.state is LOADED:
        _go(adapter, DRAINING)
        table.leaving.append(adapter)
        yield Retire(adapter, drain_s)
    else:
        yield from _discard(adapter, why)


def _discard(adapter: Adapter | None, why: str) -> Iterator[Effect]:
    """End an adapter that has lost its name and that no request uses: its load, or else its file."""
    if adapter is not None:
        adapter.touch()
        if adapter.load is None:
            yield from _release(adapter)
        else:
            yield from _give_up(adapter, RequestError(ErrorCode.CONFLICT, why))


def _give_up(adapter: Adapter, reason: RequestError) -> Iterator[Effect]:
    """End a load that nobody wants any more, if one runs. If the ranks have their call already, it is undone when it is over."""
    load = adapter.load
    if load is not None and load.superseded is None:
        load.superseded = reason
        yield from _answer(load, reason)
        if not load.registering:
            yield Cancel(load)


def _answer(load: Load, error: RequestError | None = None) -> Iterator[Effect]:
    if not load.answered:
        load.answered = True
        yield Answer(load, error)


def _end(adapter: Adapter) -> Load:
    load, adapter.load = adapter.load, None
    assert load is not None, f"adapter {adapter.name!r} has no load that could end"
    return load


def _problem(table: AdapterTable, error: RequestError) -> ProblemReport:
    """Count an error of a load, and return it as the state document shows it."""
    table.loads.codes[error.code] += 1
    return ProblemReport(error.code, error.message, error.retryable)


def _fail(table: AdapterTable, adapter: Adapter, error: RequestError) -> Iterator[Effect]:
    """Mark an adapter as Failed and give its file back; only a call tries it again. Unless its name is in `keep_failed`, it expires."""
    _go(adapter, FAILED)
    adapter.error, adapter.loaded = _problem(table, error), None
    yield from _release(adapter)
    if table.keep_failed is not None and adapter.name not in table.keep_failed:
        table.failed[adapter] = None
        yield Expire(adapter)
        while len(table.failed) > MOST_FAILED:
            expired(table, next(iter(table.failed)))


def _forget(table: AdapterTable, adapter: Adapter) -> Iterator[Effect]:
    adapter.registered, adapter.unloading = False, True
    table.leaving.remove(adapter)
    yield from _release(adapter)
    yield Moved()


def _release(adapter: Adapter) -> Iterator[Effect]:
    fetched, adapter.fetched = adapter.fetched, None
    if fetched is not None:
        yield Release(fetched)


def _go(adapter: Adapter, state: AdapterState) -> None:
    assert state in MOVES[adapter.state], f"adapter {adapter.name!r} cannot become {state} from {adapter.state}"
    adapter.state = state


# --- room in the ranks' memory ----------------------------------------------------------------------------------------------


def room_for(table: AdapterTable, adapter: Adapter) -> list[Adapter] | None:
    """Return the adapters to evict for another, in order; None if too few may go now.

    Only adapters that no request uses may go, those of the lowest priority first, then the least recently used. An adapter that a
    request waits for gives way only to an earlier request's. So the earliest request always gets all of its adapters.
    """
    copies = table.copies(without=adapter)
    digest = adapter.pinned
    held = (each.loaded.digest for group in copies.values() for each in group if each.loaded)
    if digest is not None and digest in held:
        return []  # most likely the same copy; with other components it is one more, for which the ranks have room
    excess = len(copies) + 1 - table.capacity
    current = table.get(adapter.name)
    if table.arriving.get(adapter.name) is adapter and current is not None and current.registered:
        # The replaced adapter's copy is dropped after the replacement, unless another name shares it.
        excess -= len(copies[current.copy_key()]) == 1
    if excess <= 0:
        return []
    turn = min(adapter.wanted, default=None)
    may_go = [group for group in copies.values() if all(_may_go(each, turn) for each in group)]
    if len(may_go) < excess:
        return None
    may_go.sort(key=lambda group: max((bool(each.wanted), each.call.priority, each.used_at) for each in group))
    return [each for group in may_go[:excess] for each in group]


def _may_go(adapter: Adapter, turn: int | None) -> bool:
    """Return whether an adapter may be evicted for the request with number `turn`, or for no request."""
    if not adapter.usable or adapter.users or adapter.resident:
        return False
    return not adapter.wanted or (turn is not None and min(adapter.wanted) > turn)


def _evict(table: AdapterTable, adapters: Sequence[Adapter]) -> None:
    for adapter in adapters:
        adapter.registered = False
        if adapter.state is LOADED:
            _go(adapter, CACHED)
            table.loads.evictions += 1
            log.info("adapter=%s evicted", adapter.name)


def _stay(victims: Sequence[Adapter]) -> None:
    """Let requests use these victims again, as the load that might have evicted them is over."""
    for victim in victims:
        victim.going = False


def _precedence(adapter: Adapter) -> tuple[bool, int, int]:
    return *rank_of(adapter.call), adapter.used_at
