# SPDX-License-Identifier: Apache-2.0
"""The life of adapters over fake ranks and a fake fetcher: fetched, loaded, evicted, waited for, replaced, removed."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.config import OnMissing
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import AdapterChoice, GenerationParams
from diffusion_worker.engine.state.request_events import AppliedAdapter, Generation
from diffusion_worker.engine.state.state_document import (
    AdapterCall,
    AdapterDocument,
    AdapterState,
    DesiredAdapter,
    Residency,
    SleepCall,
    WakeCall,
)
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ErrorReport, Recipe
from diffusion_worker.sources.source import HuggingFaceSource, Source
from support.worker.fake_rank_group import FakeRankGroup, fake_digest, fake_identity
from support.worker.mounted_folder import MountedFolder
from support.worker.server_edge import DEADLINE_S, Edge, serving_edge
from support.worker.sleep_rig import REMOTE_BYTES

NO_FILE = ErrorReport(ErrorCode.INVALID_ADAPTER, "no adapter_config.json in /a")


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(ranks=2, max_loras=2, max_cached_loras=2) as edge:
        yield edge


@pytest.fixture
async def loading_edge() -> AsyncIterator[Edge]:
    """Start an edge that loads adapters on demand, at the requests that name them."""
    async with serving_edge(ranks=2, max_loras=2, max_cached_loras=2, lora_on_missing=OnMissing.LOAD) as edge:
        yield edge


def call(path: str, **fields: Any) -> AdapterCall:
    return AdapterCall(operation_id="o", source=Source(path=path), **fields)


def remote(repo: str, **fields: Any) -> AdapterCall:
    return AdapterCall(operation_id="o", source=Source(hugging_face=HuggingFaceSource(repo)), **fields)


def applied(path: str, scale: float) -> AppliedAdapter:
    """Return the provenance that an image has of the adapter in a folder, at this scale; the adapter has the folder's name."""
    return AppliedAdapter(Path(path).name, fake_digest(path), scale, fake_identity(path))


async def put(edge: Edge, *names: str, **fields: Any) -> None:
    for name in names:
        await edge.engine.put_adapter(name, call(f"/{name}", **fields))


def asked(*loras: str, model: str | None = None, **fields: Any) -> GenerationParams:
    return GenerationParams(
        **{"prompt": "p kumquatfen", "seed": 1, "loras": [AdapterChoice(name) for name in loras], "model": model} | fields
    )


async def made(edge: Edge, *loras: str, **fields: Any) -> Generation:
    async with asyncio.timeout(DEADLINE_S):
        return await edge.engine.generate(asked(*loras, **fields))


async def refusal(edge: Edge, *loras: str, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        await made(edge, *loras, **fields)
    return error.value


def records(engine: Engine, name: str) -> list[AdapterDocument]:
    return [adapter for adapter in engine.state_document().adapters if adapter.name == name]


def states(edge: Edge) -> dict[str, str]:
    return {adapter.name: adapter.state.value for adapter in edge.engine.state_document().adapters}


async def until(edge: Edge, **wanted: str) -> None:
    async def reached() -> bool:
        return wanted.items() <= states(edge).items()

    await edge.wait_for(reached)


# Requests


async def test_a_request_takes_several_adapters_each_at_its_scale_and_the_provenance_lists_them(edge: Edge) -> None:
    await put(edge, "a", scale=0.5)
    await put(edge, "b")
    params = asked(model="a", loras=[AdapterChoice("b", 0.25)])
    generation = await edge.engine.generate(params)
    assert generation.provenance.adapters == [applied("/a", 0.5), applied("/b", 0.25)]
    scaled = await made(edge, model="a", lora_scale=0.75)
    assert [applied.scale for applied in scaled.provenance.adapters] == [0.75]
    assert len({bytes(image.pixels) for each in (generation, scaled, await made(edge)) for image in each.images}) == 3


async def test_every_name_is_resolved_before_anything_is_queued(edge: Edge) -> None:
    await put(edge, "a")
    edge.ranks.stepping.clear()
    error = await refusal(edge, "a", "nobody")
    assert (error.code, edge.engine.state_document().queued, edge.engine.state_document().in_flight) == (ErrorCode.MODEL_NOT_FOUND, 0, 0)
    assert "'nobody'" in error.message
    assert records(edge.engine, "a")[0].refs == 0


async def test_what_requests_use_is_counted_for_each_adapter_and_over_its_versions(edge: Edge) -> None:
    await put(edge, "a", "b")
    assert (records(edge.engine, "a")[0].requests_total, records(edge.engine, "a")[0].last_request_age_seconds) == (0, None)
    await made(edge, "a")
    await made(edge, "a", "b")
    await edge.engine.put_adapter("a", call("/other"))
    used = {adapter.name: adapter.requests_total for adapter in edge.engine.state_document().adapters if adapter.state == "Loaded"}
    assert used == {"a": 2, "b": 1}
    assert records(edge.engine, "a")[0].last_request_age_seconds is not None


async def test_a_recipe_is_inherited_shown_and_not_to_be_contradicted(edge: Edge) -> None:
    edge.ranks.adapter_recipes["/fast"] = Recipe(guidance_scale=1.0, sigmas=[1.0, 0.5])
    await put(edge, "fast")
    shown = (await made(edge, "fast")).provenance
    assert (shown.steps, shown.guidance_scale, shown.sigmas, shown.shift) == (2, 1.0, [1.0, 0.5], None)
    error = await refusal(edge, "fast", steps=30)
    assert (error.code, error.details) == (ErrorCode.INVALID_REQUEST, {"field": "num_inference_steps"})
    assert (await made(edge, steps=30)).provenance.sigmas is None


# Eviction


async def test_the_least_used_goes_from_memory_for_a_new_one_and_is_known_on(edge: Edge) -> None:
    await put(edge, "a", "b")
    await made(edge, "a")
    await put(edge, "c")
    assert states(edge) == {"a": "Loaded", "b": "Cached", "c": "Loaded"}
    assert sorted(edge.ranks.registered.values()) == ["/a", "/c"]
    assert (edge.engine.adapter_loads.evictions, edge.engine.registered_adapters) == (1, 2)
    [document] = records(edge.engine, "b")
    assert (document.ranks_loaded, document.digest) == (0, fake_digest("/b"))


async def test_the_time_of_a_load_is_told_until_there_is_another_one(edge: Edge) -> None:
    def told(name: str) -> float | None:
        [document] = records(edge.engine, name)
        return document.load_seconds

    times = edge.engine.adapter_loads.durations
    await put(edge, "a")
    first = told("a")
    assert first is not None and first == pytest.approx(times.total_s, abs=1e-6)
    await put(edge, "a", scale=0.5)
    assert told("a") == first, "that was no load"
    await put(edge, "b", "c")
    assert (states(edge)["a"], told("a")) == ("Cached", first)
    before_s = times.total_s
    await put(edge, "a")
    again = told("a")
    assert (states(edge)["a"], again) == ("Loaded", pytest.approx(times.total_s - before_s, abs=1e-6)) and again != first
    edge.ranks.lose("rank 1 was ended by SIGKILL")
    await edge.wait_state(generation=2, state="ready")
    assert told("a") not in (first, again), "the new ranks have loaded it again"


async def test_a_request_for_an_evicted_adapter_is_refused_with_a_time_to_come_back(edge: Edge) -> None:
    await put(edge, "a", "b", "c")
    error = await refusal(edge, "a")
    assert (error.code, error.retryable, error.retry_after_s is not None) == (ErrorCode.ADAPTER_NOT_LOADED, True, True)
    assert "'a' is Cached" in error.message
    assert [adapter.name for adapter in edge.engine.served_adapters()] == ["b", "c"]
    await put(edge, "a")
    assert states(edge) == {"a": "Loaded", "b": "Cached", "c": "Loaded"}


async def test_a_refused_load_evicts_nothing(edge: Edge) -> None:
    await put(edge, "a", "b")
    edge.ranks.adapter_errors["/c"] = NO_FILE
    with pytest.raises(RequestError):
        await put(edge, "c")
    assert states(edge) == {"a": "Loaded", "b": "Loaded", "c": "Failed"}
    await made(edge, "a", "b")


async def test_a_load_waits_for_room_and_then_says_who_holds_it(edge: Edge) -> None:
    await put(edge, "a", "b")
    edge.ranks.stepping.clear()
    running = asyncio.create_task(made(edge, "a", "b"))
    await edge.wait_state(inFlight=1)
    with pytest.raises(RequestError, match="held by the adapters a, b") as error:
        await put(edge, "c", deadline_seconds=0.02)
    assert error.value.code is ErrorCode.CAPACITY_EXCEEDED
    putting = asyncio.create_task(put(edge, "d"))
    await until(edge, d="Loading")
    edge.ranks.stepping.set()
    await asyncio.gather(running, putting)
    assert states(edge)["d"] == "Loaded"


async def test_one_that_may_be_evicted_is_not_taken_until_that_is_decided(edge: Edge) -> None:
    await put(edge, "a", "b")
    edge.ranks.calling.clear()
    edge.ranks.adapter_errors["/c"] = NO_FILE
    putting = asyncio.create_task(put(edge, "c"))
    await edge.wait_for(lambda: _called(edge, "add_lora", 3))
    asking = asyncio.create_task(made(edge, "a"))
    await edge.wait_state(queued=1)
    edge.ranks.calling.set()
    assert (await asking).provenance.adapters[0].name == "a"
    assert isinstance((await asyncio.gather(putting, return_exceptions=True))[0], RequestError)


async def test_a_load_that_ends_late_leaves_nothing_and_the_table_says_who_went_for_it(edge: Edge) -> None:
    await put(edge, "a", "b")
    edge.ranks.calling.clear()
    putting = asyncio.create_task(put(edge, "c", deadline_seconds=0.02))
    with pytest.raises(RequestError, match="add_lora"):
        await putting
    # The ranks go on after the deadline: they load the adapter, and evict another one for it.
    del edge.ranks.registered[next(iter(edge.ranks.registered))]
    edge.ranks.calling.set()
    await until(edge, a="Cached", b="Loaded", c="Failed")
    assert list(edge.ranks.registered.values()) == ["/b"]


async def _called(edge: Edge, method: str, count: int) -> bool:
    return edge.ranks.calls.count(method) == count


# Put again


async def test_a_put_that_names_digest_and_identity_of_what_is_loaded_needs_no_source(edge: Edge) -> None:
    await put(edge, "a")
    edge.fetcher.errors["/a"] = RequestError(ErrorCode.SOURCE_NOT_FOUND, "away")
    document = await edge.engine.put_adapter("a", call("/a", digest=fake_digest("/a"), identity=fake_identity("/a"), scale=0.5))
    assert (document.state, document.scale, document.identity) == (AdapterState.LOADED, 0.5, fake_identity("/a"))
    assert (edge.fetcher.fetches, edge.ranks.calls.count("add_lora")) == (["/a"], 1)


@pytest.mark.parametrize("named", [{}, {"digest": fake_digest("/a")}, {"digest": fake_digest("/a"), "identity": "v0:" + "0" * 64}])
async def test_a_put_that_names_less_has_the_source_looked_at_and_read_again_where_it_changed(edge: Edge, named: dict[str, str]) -> None:
    await put(edge, "a")
    await put(edge, "a", **named)
    assert (edge.fetcher.fetches, edge.fetcher.released, edge.ranks.calls.count("add_lora")) == (["/a"] * 2, ["/a"], 1)
    edge.fetcher.stamps["/a"] = 1
    await put(edge, "a", **named)
    assert edge.ranks.calls.count("add_lora") == 2
    await until(edge, a="Loaded")
    assert (await made(edge, "a")).provenance.adapters == [applied("/a", 1.0)]


async def test_a_source_that_is_away_is_an_error_of_the_put_and_the_loaded_adapter_serves_on(edge: Edge) -> None:
    await put(edge, "a", scale=0.5)
    edge.fetcher.errors["/a"] = RequestError(ErrorCode.SOURCE_NOT_FOUND, "away")
    for again in (False, True):
        with pytest.raises(RequestError, match="away") as error:
            await put(edge, "a", scale=1.0, read_again=again)
        assert error.value.code is ErrorCode.SOURCE_NOT_FOUND
    assert (await made(edge, "a")).provenance.adapters == [applied("/a", 0.5)]


async def test_an_adapter_that_is_to_be_read_again_is_read_although_nothing_changed(edge: Edge) -> None:
    await put(edge, "a")
    await put(edge, "a", read_again=True, digest=fake_digest("/a"), identity=fake_identity("/a"))
    assert edge.ranks.calls.count("add_lora") == 2
    await until(edge, a="Loaded")


# On demand


async def test_an_adapter_on_demand_is_declared_and_loaded_by_the_first_request_for_it(edge: Edge) -> None:
    document = await edge.engine.put_adapter("a", remote("org/a", residency=Residency.ON_DEMAND))
    assert (document.state, document.digest, edge.fetcher.fetches) == (AdapterState.CACHED, None, [])
    assert [adapter.name for adapter in edge.engine.served_adapters()] == ["a"]
    generation = await made(edge, "a")
    assert generation.provenance.adapters == [applied("/cache/org/a", 1.0)]
    [document] = records(edge.engine, "a")
    assert (document.state, document.revision, document.residency) == (AdapterState.LOADED, "c0ffee", Residency.ON_DEMAND)
    assert (edge.engine.adapter_loads.fetched_bytes, list(edge.engine.adapter_loads.fetch_durations.cumulative())[-1][1]) == (
        REMOTE_BYTES,
        1,
    )


async def test_requests_for_an_evicted_adapter_share_one_load_and_get_its_image(loading_edge: Edge) -> None:
    edge = loading_edge
    await put(edge, "a")
    alone = bytes((await made(edge, "a")).images[0].pixels)
    await put(edge, "b", "c")
    assert states(edge)["a"] == "Cached"
    edge.ranks.calls.clear()
    generations = await asyncio.gather(*(made(edge, "a") for _ in range(5)))
    assert [bytes(each.images[0].pixels) for each in generations] == [alone] * 5
    assert edge.ranks.calls.count("add_lora") == 1
    assert edge.fetcher.fetches == ["/a", "/b", "/c"]  # the file of a is still there


async def test_a_waiter_that_goes_away_cancels_nobody_elses_load(loading_edge: Edge) -> None:
    edge = loading_edge
    await edge.engine.put_adapter("a", remote("org/a", residency=Residency.ON_DEMAND))
    edge.fetcher.arriving.clear()
    first, second = asyncio.create_task(made(edge, "a")), asyncio.create_task(made(edge, "a"))
    await edge.wait_state(queued=2)
    first.cancel()
    await edge.wait_state(queued=1)
    edge.fetcher.arriving.set()
    assert (await second).provenance.adapters[0].name == "a"
    assert edge.fetcher.fetches == ["org/a"]


async def test_a_load_that_fails_is_the_error_of_everyone_who_waits_for_it(loading_edge: Edge) -> None:
    edge = loading_edge
    await edge.engine.put_adapter("a", call("/a", residency=Residency.ON_DEMAND))
    edge.ranks.adapter_errors["/a"] = NO_FILE
    errors = await asyncio.gather(*(refusal(edge, "a") for _ in range(3)))
    assert {(error.code, error.details["code"]) for error in errors} == {(ErrorCode.ADAPTER_NOT_LOADED, "InvalidAdapter")}
    assert states(edge) == {"a": "Failed"}
    for error in (errors[0], await refusal(edge, "a")):
        assert "InvalidAdapter: no adapter_config.json in its source" in error.message
    [document] = records(edge.engine, "a")
    assert document.error is not None and document.error.message == NO_FILE.message
    assert edge.ranks.calls.count("add_lora") == 1


async def test_a_load_that_failed_for_a_reason_that_passes_is_tried_again_by_the_next_request(loading_edge: Edge) -> None:
    edge = loading_edge
    await edge.engine.put_adapter("a", remote("org/a", residency=Residency.ON_DEMAND))
    edge.fetcher.errors["org/a"] = RequestError(ErrorCode.NETWORK_ERROR, "no route")
    assert "no route" in (await refusal(edge, "a")).message
    [document] = records(edge.engine, "a")
    assert (document.state, document.error is not None and document.error.code) == (AdapterState.CACHED, "NetworkError")
    del edge.fetcher.errors["org/a"]
    await made(edge, "a")
    assert records(edge.engine, "a")[0].error is None


@pytest.mark.parametrize("begun_by", ["put", "request"])
async def test_an_evicted_adapter_that_finds_no_room_is_no_worse_than_before(begun_by: str) -> None:
    settings = {"max_loras": 1, "max_cached_loras": 1, "lora_on_missing": OnMissing.LOAD, "lora_load_timeout_s": 0.05}
    async with serving_edge(**settings) as edge:
        await put(edge, "a", "b")
        edge.ranks.stepping.clear()
        running = asyncio.create_task(made(edge, "b"))
        await edge.wait_state(inFlight=1)
        if begun_by == "put":
            with pytest.raises(RequestError):
                await put(edge, "a", digest=fake_digest("/a"), deadline_seconds=0.05)
        else:
            assert (await refusal(edge, "a")).code is ErrorCode.ADAPTER_NOT_LOADED
        await until(edge, a="Cached")
        edge.ranks.stepping.set()
        await running
        await made(edge, "a")


async def test_a_load_over_the_deadline_of_its_requests_is_a_503_that_says_how_far_it_is() -> None:
    async with serving_edge(lora_on_missing=OnMissing.LOAD, lora_load_timeout_s=0.05) as edge:
        await edge.engine.put_adapter("a", remote("org/a", residency=Residency.ON_DEMAND))
        edge.fetcher.arriving.clear()
        error = await refusal(edge, "a")
        assert error.code is ErrorCode.ADAPTER_NOT_LOADED
        assert "'a'" in error.message and ("2048 of 4096 bytes" in error.message or "could not be loaded" in error.message)


async def test_a_request_waits_for_a_load_that_a_put_began(loading_edge: Edge) -> None:
    edge = loading_edge
    edge.fetcher.arriving.clear()
    putting = asyncio.create_task(edge.engine.put_adapter("a", remote("org/a")))
    await until(edge, a="Fetching")
    asking = asyncio.create_task(made(edge, "a"))
    await edge.wait_state(queued=1)
    edge.fetcher.arriving.set()
    assert (await putting).state is AdapterState.LOADED
    await asking


@pytest.mark.parametrize("end", ["sleep", "terminate"])
async def test_a_request_that_waits_for_its_adapter_when_the_server_stops_serving_is_told_so(loading_edge: Edge, end: str) -> None:
    edge = loading_edge
    await edge.engine.put_adapter("a", remote("org/a", residency=Residency.ON_DEMAND))
    edge.fetcher.arriving.clear()
    asking = asyncio.create_task(refusal(edge, "a"))
    await edge.wait_state(queued=1)
    if end == "sleep":
        edge.engine.sleep(SleepCall(operation_id="s"))
        await edge.wait_state(state="asleep")
        edge.fetcher.arriving.set()
        assert (await asking).code is ErrorCode.ASLEEP
        edge.engine.wake(WakeCall(operation_id="w"))
        await edge.wait_state(state="ready")
        await made(edge, "a")
    else:
        await edge.engine.terminate()
        assert (await asking).code is ErrorCode.TERMINATING


async def test_requests_over_more_adapters_than_fit_all_get_their_own_and_none_waits_for_ever(loading_edge: Edge) -> None:
    """Send 48 requests at once over six adapters, of which two have room in memory and in slots; some requests take two."""
    edge = loading_edge
    pairs = [(f"a{n % 6}", f"a{(n * 5 + 1) % 6}") for n in range(48)]
    names = [pair if pair[0] != pair[1] and n % 2 else pair[:1] for n, pair in enumerate(pairs)]
    for n in range(6):
        await put(edge, f"a{n}")
    alone = {wanted: bytes((await made(edge, *wanted)).images[0].pixels) for wanted in set(names)}
    generations = await asyncio.gather(*(made(edge, *wanted) for wanted in names))
    assert [bytes(each.images[0].pixels) for each in generations] == [alone[wanted] for wanted in names]
    assert len(set(alone.values())) == len(alone)
    assert edge.ranks.most_active == 2
    assert len(edge.ranks.registered) == edge.engine.registered_adapters == 2


async def test_two_requests_that_each_hold_what_the_other_needs_room_for_are_both_served(loading_edge: Edge) -> None:
    edge = loading_edge
    await put(edge, "b", "d", "a", "c")
    assert states(edge) == {"a": "Loaded", "b": "Cached", "c": "Loaded", "d": "Cached"}
    generations = await asyncio.gather(made(edge, "a", "b"), made(edge, "c", "d"))
    assert [[applied.name for applied in each.provenance.adapters] for each in generations] == [["a", "b"], ["c", "d"]]


# Replaced, superseded, removed


async def test_while_a_version_is_fetched_both_are_shown_and_the_old_one_serves(edge: Edge) -> None:
    """Hold the fetch of a new version: meanwhile the state shows both, and requests get the old one at once."""
    await put(edge, "a")
    edge.fetcher.arriving.clear()
    putting = asyncio.create_task(edge.engine.put_adapter("a", remote("org/a")))

    async def both() -> bool:
        return [(each.state.value, each.fetched_bytes, each.total_bytes) for each in records(edge.engine, "a")] == [
            ("Loaded", None, None),
            ("Fetching", REMOTE_BYTES // 2, REMOTE_BYTES),
        ]

    await edge.wait_for(both)
    assert (await made(edge, "a")).provenance.adapters[0].digest == fake_digest("/a")
    edge.fetcher.arriving.set()
    assert (await putting).digest == fake_digest("/cache/org/a")
    assert (await made(edge, "a")).provenance.adapters[0].digest == fake_digest("/cache/org/a")
    await edge.wait_for(lambda: _released(edge, "/a"))


async def _released(edge: Edge, *paths: str) -> bool:
    return edge.fetcher.released == list(paths)


async def _half_fetched(edge: Edge, name: str) -> bool:
    return any(record.fetched_bytes == REMOTE_BYTES // 2 for record in records(edge.engine, name))


async def test_a_version_that_fails_leaves_the_old_one_which_tells_of_it_until_the_next_put(edge: Edge) -> None:
    await put(edge, "a")
    edge.ranks.adapter_errors["/other"] = NO_FILE
    with pytest.raises(RequestError):
        await edge.engine.put_adapter("a", call("/other"))
    [document] = records(edge.engine, "a")
    assert (document.state, document.digest, document.error is not None and document.error.code) == (
        AdapterState.LOADED,
        fake_digest("/a"),
        "InvalidAdapter",
    )
    await put(edge, "a", scale=0.5)
    assert (records(edge.engine, "a")[0].error, edge.ranks.calls.count("add_lora")) == (None, 2)


async def test_the_newest_put_wins_and_the_older_load_ends_with_conflict(edge: Edge) -> None:
    edge.fetcher.arriving.clear()
    older = asyncio.create_task(edge.engine.put_adapter("a", remote("org/a")))
    await edge.wait_for(lambda: _half_fetched(edge, "a"))
    await put(edge, "a")
    with pytest.raises(RequestError) as error:
        await older
    assert (error.value.code, edge.fetcher.cancelled) == (ErrorCode.CONFLICT, ["org/a"])
    assert list(edge.ranks.registered.values()) == ["/a"]


async def test_a_put_that_is_taken_back_while_the_ranks_load_it_leaves_what_was_there(edge: Edge) -> None:
    await put(edge, "a")
    edge.ranks.calling.clear()
    forward = asyncio.create_task(edge.engine.put_adapter("a", call("/other")))
    await edge.wait_for(lambda: _called(edge, "add_lora", 2))
    assert (await edge.engine.put_adapter("a", call("/a", scale=0.5))).scale == 0.5
    with pytest.raises(RequestError) as error:
        await forward
    assert error.value.code is ErrorCode.CONFLICT
    edge.ranks.calling.set()
    await edge.wait_for(lambda: _called(edge, "remove_lora", 1))
    await edge.wait_for(lambda: _registered(edge, "/a"))
    assert [document.digest for document in records(edge.engine, "a")] == [fake_digest("/a")]


async def _registered(edge: Edge, *paths: str) -> bool:
    return sorted(edge.ranks.registered.values()) == list(paths)


async def test_a_version_that_is_loaded_while_a_request_wants_the_old_one_back_stays(loading_edge: Edge) -> None:
    """Evict the old version while the new one downloads, and ask for the name while the new one loads.

    The image, and the record afterwards, must have the new one.
    """
    edge = loading_edge
    await put(edge, "a")
    edge.fetcher.arriving.clear()
    replacing = asyncio.create_task(edge.engine.put_adapter("a", remote("org/a")))
    await edge.wait_for(lambda: _half_fetched(edge, "a"))
    await put(edge, "b", "c")
    assert states(edge)["b"] == states(edge)["c"] == "Loaded"
    edge.ranks.calling.clear()
    edge.fetcher.arriving.set()
    await edge.wait_for(lambda: _called(edge, "add_lora", 4))
    asking = asyncio.create_task(made(edge, "a"))
    await edge.wait_state(queued=1)
    edge.ranks.calling.set()
    assert (await replacing).digest == fake_digest("/cache/org/a")
    for generation in (await asking, await made(edge, "a")):
        assert generation.provenance.adapters[0].digest == fake_digest("/cache/org/a")
    assert [document.digest for document in records(edge.engine, "a")] == [fake_digest("/cache/org/a")]


async def test_the_same_put_twice_is_one_load(edge: Edge) -> None:
    edge.fetcher.arriving.clear()
    puts = [asyncio.create_task(edge.engine.put_adapter("a", remote("org/a", scale=scale))) for scale in (0.5, 0.75)]
    await until(edge, a="Fetching")
    edge.fetcher.arriving.set()
    documents = await asyncio.gather(*puts)
    assert [document.scale for document in documents] == [0.75, 0.75]
    assert edge.fetcher.fetches == ["org/a"]


async def test_scale_residency_and_priority_are_no_reason_to_load_again(edge: Edge) -> None:
    await put(edge, "a")
    await put(edge, "a", scale=0.25, priority=5, residency=Residency.RESIDENT)
    [document] = records(edge.engine, "a")
    assert (document.scale, document.priority, document.residency) == (0.25, 5, Residency.RESIDENT)
    assert edge.ranks.calls.count("add_lora") == 1


async def test_an_adapter_that_is_removed_while_it_is_fetched_is_unknown_and_nothing_of_it_stays(edge: Edge) -> None:
    edge.fetcher.arriving.clear()
    putting = asyncio.create_task(edge.engine.put_adapter("a", remote("org/a")))
    await edge.wait_for(lambda: _half_fetched(edge, "a"))
    await edge.engine.delete_adapter("a", operation_id="d", boot_id=None, drain_s=1.0)
    with pytest.raises(RequestError, match="removed while it was loading"):
        await putting
    assert (states(edge), edge.fetcher.cancelled, edge.ranks.registered) == ({}, ["org/a"], {})


async def test_a_removed_adapter_gives_its_file_back_and_an_evicted_one_does_not(edge: Edge) -> None:
    await put(edge, "a", "b", "c")
    assert edge.fetcher.released == []
    for name in ("a", "b"):  # a is evicted, b is loaded
        await edge.engine.delete_adapter(name, operation_id="d", boot_id=None, drain_s=1.0)
    assert edge.fetcher.released == ["/a", "/b"]


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_changes_meanwhile_an_image_is_made_with_what_its_names_stood_for(loading_edge: Edge, seed: int) -> None:
    """Run random changes and requests over four names, six contents and two slots, with gates on ranks and sources.

    Each image must have a content that its name had meanwhile.
    """
    edge, rng = loading_edge, random.Random(seed)
    names, contents = [f"a{n}" for n in range(4)], [f"/content-{n}" for n in range(4)] + ["org/one", "org/two"]
    # The contents that a name may have stood for since the last request began; None stands for an unknown name.
    could_be: dict[str, list[str | None]] = {name: [None] for name in names}
    watched: dict[int, dict[str, set[str | None]]] = {}

    def becomes(name: str, content: str | None) -> None:
        could_be[name].append(content)
        for seen in watched.values():
            seen[name].add(content)

    async def change() -> None:
        name, content = rng.choice(names), rng.choice([*contents, *contents, None])
        if len(could_be[name]) > 1:
            return  # a name changes once at a time, so that the test knows its content
        becomes(name, content)
        if content is None:
            with contextlib.suppress(RequestError):
                await edge.engine.delete_adapter(name, operation_id="d", boot_id=None, drain_s=5.0)
        else:
            await edge.engine.put_adapter(name, remote(content) if content.startswith("org") else call(content))
        could_be[name] = [content]

    async def ask() -> None:
        wanted = rng.sample(names, rng.choice([1, 1, 2]))
        seen = {name: set(could_be[name]) for name in names}
        watched[id(seen)] = seen
        try:
            generation = await made(edge, *wanted)
        except RequestError as error:
            assert error.code is ErrorCode.MODEL_NOT_FOUND and any(None in seen[name] for name in wanted), error.message
            return
        finally:
            del watched[id(seen)]
        for name, applied in zip(wanted, generation.provenance.adapters, strict=True):
            assert applied.digest in {_digest_of(content) for content in seen[name] if content}, (name, seen[name])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(250):
            tasks.create_task(change() if rng.random() < 0.3 else ask())
            for event in (edge.ranks.calling, edge.fetcher.arriving, edge.ranks.stepping):
                (event.set if rng.random() < 0.6 else event.clear)()
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
        for event in (edge.ranks.calling, edge.fetcher.arriving, edge.ranks.stepping):
            event.set()
    await edge.wait_for(lambda: _settled(edge))
    document = edge.engine.state_document()
    held = {name: content for name, (content,) in could_be.items() if content}
    assert {adapter.name for adapter in document.adapters} == set(held)
    assert all(adapter.digest == _digest_of(held[adapter.name]) for adapter in document.adapters)
    loaded = {adapter.digest for adapter in document.adapters if adapter.state is AdapterState.LOADED}
    assert loaded == {fake_digest(path) for path in edge.ranks.registered.values()}
    assert edge.ranks.most_active <= 2


def _digest_of(content: str) -> str:
    return fake_digest(f"/cache/{content}" if content.startswith("org") else content)


async def _settled(edge: Edge) -> bool:
    adapters = edge.engine.state_document().adapters
    return len({adapter.name for adapter in adapters}) == len(adapters) and len(set(edge.ranks.registered.values())) <= 2


# Ranks


async def test_a_load_that_one_rank_refuses_is_rolled_back_on_all_and_names_it(edge: Edge) -> None:
    """Let one of two ranks refuse an adapter: the put fails, names that rank, and no rank keeps the adapter.

    A request would otherwise be computed with the adapter on some ranks only.
    """
    edge.ranks.adapter_errors_of_one["/a"] = ErrorReport(ErrorCode.RANK_FAILED, "no memory")
    with pytest.raises(RequestError, match="rank 1: no memory") as error:
        await put(edge, "a")
    assert (error.value.code, error.value.details) == (ErrorCode.RANK_FAILED, {"ranks": [1]})
    await edge.wait_for(lambda: _registered(edge))
    [document] = records(edge.engine, "a")
    assert (document.state, document.ranks_loaded) == (AdapterState.FAILED, 0)


async def test_after_a_loss_of_the_ranks_what_was_loaded_is_and_what_was_evicted_is_not(edge: Edge) -> None:
    await put(edge, "a", "b", "c")
    before = dict(edge.ranks.registered)
    edge.ranks.lose("rank 1 was ended by SIGKILL")
    await edge.wait_state(generation=2, state="ready")
    assert edge.ranks.registered == before
    assert states(edge) == {"a": "Cached", "b": "Loaded", "c": "Loaded"}


async def test_an_adapter_wanted_while_the_ranks_start_again_is_loaded_on_the_new_ones(loading_edge: Edge) -> None:
    edge = loading_edge
    await put(edge, "a", "b", "c")
    edge.ranks.loading.clear()
    edge.ranks.lose("rank 1 was ended by SIGKILL")
    await edge.wait_state(state="restarting")
    asking = asyncio.create_task(made(edge, "a"))
    await edge.wait_held(1)
    edge.ranks.loading.set()
    assert (await asking).provenance.adapters[0].name == "a"


# At start


async def test_at_start_all_are_known_and_the_most_wanted_are_loaded_as_many_as_fit(tmp_path: Path) -> None:
    desired = [
        DesiredAdapter("resident", Source(path="/resident"), residency=Residency.RESIDENT, scale=0.5),
        DesiredAdapter("low", Source(path="/low"), priority=-1),
        DesiredAdapter("high", Source(path="/high"), priority=1, digest=fake_digest("/high")),
        DesiredAdapter("wrong", Source(path="/wrong"), digest=fake_digest("/other"), priority=2),
        DesiredAdapter("digits", Source(path="/base")),  # the base model's name, which no adapter can have
        DesiredAdapter("later", Source(path="/later"), residency=Residency.ON_DEMAND),
    ]
    path = MountedFolder(tmp_path).write(*desired)
    async with serving_edge(max_loras=2, max_cached_loras=3, desired_path=path, preload_loras={"mine": "/mine"}) as edge:
        assert states(edge) == {
            "resident": "Loaded",
            "high": "Loaded",
            "mine": "Cached",
            "low": "Cached",
            "wrong": "Failed",
            "later": "Cached",
        }
        assert edge.fetcher.fetches == ["/resident", "/wrong", "/high"], "the most wanted first, and nothing that has no room"
        assert records(edge.engine, "resident")[0].scale == 0.5
        error = records(edge.engine, "wrong")[0].error
        assert error is not None and error.code == "DigestMismatch"


async def test_a_source_that_stalls_at_start_keeps_nothing_from_serving_past_its_timeout(tmp_path: Path) -> None:
    stalling = DesiredAdapter("a", Source(hugging_face=HuggingFaceSource("org/a")), load_timeout_seconds=0.05)
    edge = Edge(FakeRankGroup(), desired_path=MountedFolder(tmp_path).write(stalling))
    edge.fetcher.arriving.clear()
    async with asyncio.timeout(DEADLINE_S):
        await edge.engine.start()
        assert states(edge) == {"a": "Failed"}
        await made(edge)
        await edge.engine.terminate()


async def test_a_put_that_is_replaced_before_its_load_takes_a_step_leaves_no_load_behind(edge: Edge) -> None:
    calls = (edge.engine.put_adapter("x", call(path)) for path in ("/a", "/b"))
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, RequestError)
    assert first.code is ErrorCode.CONFLICT
    assert isinstance(second, AdapterDocument)
    assert edge.engine._parts.runner._loads == {}
