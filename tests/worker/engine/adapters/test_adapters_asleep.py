# SPDX-License-Identifier: Apache-2.0
"""Adapters that change while the model sleeps, over fake ranks: applied before it serves again, whatever the level."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.engine.adapters.declared import changes
from diffusion_worker.engine.requests.admission import AdapterChoice, GenerationParams
from diffusion_worker.engine.state.state_document import (
    AdapterCall,
    AdapterDocument,
    AdapterState,
    DesiredAdapter,
    DesiredSleep,
    Residency,
    SleepCall,
    SleepPolicy,
    WakeCall,
)
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ErrorReport, SleepLevel
from diffusion_worker.sources.source import HuggingFaceSource, Source
from support.worker.fake_rank_group import FakeRankGroup, fake_digest
from support.worker.mounted_folder import MountedFolder
from support.worker.server_edge import DEADLINE_S, Edge, serving_edge

NO_FILE = ErrorReport(ErrorCode.INVALID_ADAPTER, "no adapter_config.json in /b")
LEVELS = list(SleepLevel)


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(ranks=2, max_loras=2, max_cached_loras=2) as edge:
        yield edge


async def put(edge: Edge, name: str, path: str = "", **fields: Any) -> AdapterDocument:
    return await edge.engine.put_adapter(name, AdapterCall(operation_id="o", source=Source(path=path or f"/{name}"), **fields))


async def put_remote(edge: Edge, name: str, repo: str) -> AdapterDocument:
    return await edge.engine.put_adapter(name, AdapterCall(operation_id="o", source=Source(hugging_face=HuggingFaceSource(repo))))


async def delete(edge: Edge, name: str) -> None:
    await edge.engine.delete_adapter(name, operation_id="o", boot_id=None, drain_s=1.0)


async def sleep(edge: Edge, level: SleepLevel = SleepLevel.HOST_MEMORY, **fields: Any) -> None:
    edge.engine.sleep(SleepCall(operation_id=f"sleep-{len(edge.ranks.calls)}", level=level, **fields))
    await edge.wait_state(state="asleep", operation=None)
    edge.ranks.calls.clear()


async def wake(edge: Edge, **fields: Any) -> None:
    edge.engine.wake(WakeCall(operation_id=f"wake-{len(edge.ranks.calls)}", **fields))
    await edge.wait_state(state="ready", operation=None)


async def made_with(edge: Edge, *names: str) -> list[str]:
    """Make an image with these adapters; return their digests from its provenance."""
    params = GenerationParams(prompt="p kumquatfen", seed=1, loras=[AdapterChoice(name) for name in names])
    async with asyncio.timeout(DEADLINE_S):
        generation = await edge.engine.generate(params)
    return [applied.digest for applied in generation.provenance.adapters]


def states(edge: Edge) -> list[tuple[str, str]]:
    return [(adapter.name, adapter.state.value) for adapter in edge.engine.state_document().adapters]


def record(edge: Edge, name: str) -> AdapterDocument:
    [found] = [adapter for adapter in edge.engine.state_document().adapters if adapter.name == name]
    return found


def told_at_the_wake(edge: Edge) -> list[str]:
    """Return the calls since the last wake that load adapters on the ranks or remove them."""
    calls = edge.ranks.calls
    return [call for call in calls[calls.index("handle_wake_task") :] if call in ("add_lora", "remove_lora")]


# Put


@pytest.mark.parametrize("level", LEVELS)
async def test_what_is_put_while_the_model_sleeps_is_deferred_and_loaded_before_it_serves(edge: Edge, level: SleepLevel) -> None:
    await sleep(edge, level)
    document = await put(edge, "a", scale=0.5)
    assert (document.state, document.scale, document.ranks_loaded, edge.ranks.calls) == (AdapterState.DEFERRED, 0.5, 0, [])
    await wake(edge)
    assert told_at_the_wake(edge) == ["add_lora"]
    assert (record(edge, "a").state, record(edge, "a").ranks_loaded) == (AdapterState.LOADED, 2)
    assert await made_with(edge, "a") == [fake_digest("/a")]


async def test_what_is_wrong_with_a_file_is_told_at_once_as_far_as_it_can_be_without_the_ranks(edge: Edge) -> None:
    await sleep(edge)
    edge.fetcher.unread_errors["/a"] = RequestError(ErrorCode.INVALID_ADAPTER, "adapter 'a': its header is not a JSON object")
    with pytest.raises(RequestError, match="header") as error:
        await put(edge, "a")
    assert (error.value.code, states(edge)) == (ErrorCode.INVALID_ADAPTER, [("a", "Failed")])
    await wake(edge)
    assert (states(edge), edge.ranks.registered, edge.fetcher.released) == ([("a", "Failed")], {}, ["/a"])


async def test_the_same_put_again_is_answered_without_another_fetch_and_scale_and_priority_are_taken_over(edge: Edge) -> None:
    await sleep(edge)
    await put_remote(edge, "a", "org/a")
    await put_remote(edge, "a", "org/a")
    assert (edge.fetcher.fetches, states(edge)) == (["org/a"], [("a", "Deferred")])
    assert (await put(edge, "b", scale=0.25, priority=3)).state is AdapterState.DEFERRED
    assert (await put(edge, "b", scale=0.75)).scale == 0.75
    await wake(edge)
    assert edge.ranks.calls.count("add_lora") == 2


async def test_a_put_whose_file_comes_after_the_model_fell_asleep_is_deferred(edge: Edge) -> None:
    edge.fetcher.arriving.clear()
    putting = asyncio.create_task(put_remote(edge, "a", "org/a"))
    await edge.wait_for(lambda: _has(edge, ("a", "Fetching")))
    await sleep(edge)
    edge.fetcher.arriving.set()
    assert (await putting).state is AdapterState.DEFERRED
    await wake(edge)
    assert await made_with(edge, "a") == [fake_digest("/cache/org/a")]


async def test_a_put_whose_file_comes_after_the_model_woke_is_loaded_then_and_no_wake_waits_for_it(edge: Edge) -> None:
    await sleep(edge)
    edge.fetcher.arriving.clear()
    putting = asyncio.create_task(put_remote(edge, "a", "org/a"))
    await edge.wait_for(lambda: _has(edge, ("a", "Fetching")))
    await wake(edge)
    assert states(edge) == [("a", "Fetching")]
    edge.fetcher.arriving.set()
    assert (await putting).state is AdapterState.LOADED


async def test_a_put_in_the_middle_of_a_verification_is_loaded_right_after_it(edge: Edge) -> None:
    await sleep(edge)
    edge.ranks.calling.clear()
    edge.engine.wake(WakeCall(operation_id="w"))
    await edge.wait_state(state="waking")
    assert (await put(edge, "a")).state is AdapterState.DEFERRED
    edge.ranks.calling.set()
    await edge.wait_state(state="ready")
    await edge.wait_for(lambda: _has(edge, ("a", "Loaded")))


async def test_what_is_put_while_the_model_drains_is_loaded_by_ranks_that_still_serve(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    running = asyncio.create_task(made_with(edge))
    await edge.wait_state(inFlight=1)
    edge.engine.sleep(SleepCall(operation_id="s"))
    await edge.wait_state(state="draining")
    assert (await put(edge, "a")).state is AdapterState.LOADED
    edge.ranks.stepping.set()
    await running
    await edge.wait_state(state="asleep")


async def _has(edge: Edge, *wanted: tuple[str, str]) -> bool:
    return set(wanted) <= set(states(edge))


# Replaced


@pytest.mark.parametrize("level", LEVELS)
async def test_new_content_of_a_name_serves_after_the_wake_and_the_old_never_does(edge: Edge, level: SleepLevel) -> None:
    await put(edge, "a")
    await sleep(edge, level)
    assert (await put(edge, "a", "/new")).state is AdapterState.DEFERRED
    assert states(edge) == [("a", "Loaded" if level is SleepLevel.HOST_MEMORY else "Deferred"), ("a", "Deferred")]
    await wake(edge)
    assert await made_with(edge, "a") == [fake_digest("/new")]
    await edge.wait_for(lambda: _holds(edge, "/new"))
    assert (edge.fetcher.released, record(edge, "a").digest) == (["/a"], fake_digest("/new"))


@pytest.mark.parametrize("level", LEVELS)
async def test_a_name_whose_new_content_fails_keeps_what_it_had_and_shows_the_error(edge: Edge, level: SleepLevel) -> None:
    await put(edge, "a")
    await sleep(edge, level)
    edge.ranks.adapter_errors["/new"] = NO_FILE
    await put(edge, "a", "/new")
    await wake(edge)
    document = record(edge, "a")
    assert (document.state, document.digest, document.error and document.error.code) == (
        AdapterState.LOADED,
        fake_digest("/a"),
        "InvalidAdapter",
    )
    assert await made_with(edge, "a") == [fake_digest("/a")]


async def test_of_several_contents_the_last_one_counts_and_the_others_are_given_back(edge: Edge) -> None:
    await put(edge, "a")
    await sleep(edge, SleepLevel.DISCARD)
    await put(edge, "a", "/one")
    await put(edge, "a", "/two")
    await put(edge, "b", "/three")
    await put(edge, "b", "/four")
    assert edge.fetcher.released == ["/one", "/three"]
    await wake(edge)
    assert await made_with(edge, "a", "b") == [fake_digest("/two"), fake_digest("/four")]
    assert edge.ranks.calls.count("add_lora") == 2


async def test_the_old_content_put_again_takes_the_new_one_back(edge: Edge) -> None:
    await put(edge, "a")
    await sleep(edge)
    await put(edge, "a", "/new")
    assert (await put(edge, "a", scale=0.5)).state is AdapterState.LOADED
    assert edge.fetcher.released == ["/new"]
    await wake(edge)
    assert await made_with(edge, "a") == [fake_digest("/a")]


# Deleted


@pytest.mark.parametrize("level", LEVELS)
async def test_what_is_deleted_is_unknown_at_once_and_gone_from_the_ranks_before_they_serve(edge: Edge, level: SleepLevel) -> None:
    """Delete an adapter while the ranks sleep, name it in a request, delete it again, and wake.

    The ranks can remove the adapter only when they wake.
    """
    await put(edge, "a")
    await put(edge, "b")
    await sleep(edge, level)
    await delete(edge, "a")
    with pytest.raises(RequestError) as error:
        await made_with(edge, "a")
    assert (error.value.code, edge.ranks.calls) == (ErrorCode.MODEL_NOT_FOUND, [])
    with pytest.raises(RequestError, match="not known"):
        await delete(edge, "a")
    await wake(edge)
    assert told_at_the_wake(edge) == (["remove_lora"] if level is SleepLevel.HOST_MEMORY else ["add_lora"])
    assert (states(edge), list(edge.ranks.registered.values()), edge.fetcher.released) == ([("b", "Loaded")], ["/b"], ["/a"])


async def test_what_is_deleted_before_it_was_ever_loaded_is_not_loaded(edge: Edge) -> None:
    await sleep(edge)
    await put(edge, "a")
    await delete(edge, "a")
    assert (states(edge), edge.fetcher.released) == ([], ["/a"])
    await wake(edge)
    assert told_at_the_wake(edge) == []


async def test_a_name_that_is_deleted_and_put_again_has_its_new_content(edge: Edge) -> None:
    await put(edge, "a")
    await put(edge, "b")
    await sleep(edge)
    await delete(edge, "a")
    await put(edge, "a", "/new")
    await wake(edge)
    assert told_at_the_wake(edge) == ["remove_lora", "add_lora"]
    assert await made_with(edge, "a", "b") == [fake_digest("/new"), fake_digest("/b")]


async def test_a_replaced_name_that_is_deleted_leaves_nothing_of_either_content(edge: Edge) -> None:
    await put(edge, "a")
    await sleep(edge, SleepLevel.DISCARD)
    await put(edge, "a", "/new")
    await delete(edge, "a")
    assert (states(edge), sorted(edge.fetcher.released)) == ([], ["/a", "/new"])
    await wake(edge)
    assert edge.ranks.registered == {}


async def _holds(edge: Edge, *paths: str) -> bool:
    return sorted(edge.ranks.registered.values()) == sorted(paths)


# Discarded


async def test_after_a_sleep_that_discards_all_is_loaded_again_from_the_files_that_were_kept(edge: Edge) -> None:
    await put_remote(edge, "a", "org/a")
    await put(edge, "b", residency=Residency.ON_DEMAND)
    assert await made_with(edge, "b") == [fake_digest("/b")]
    await sleep(edge, SleepLevel.DISCARD)
    assert states(edge) == [("a", "Deferred"), ("b", "Cached")]
    assert (record(edge, "a").digest, record(edge, "a").ranks_loaded) == (fake_digest("/cache/org/a"), 0)
    await wake(edge)
    assert states(edge) == [("a", "Loaded"), ("b", "Cached")]
    assert (edge.fetcher.fetches, edge.fetcher.released) == (["org/a", "/b"], [])
    assert await made_with(edge, "a", "b") == [fake_digest("/cache/org/a"), fake_digest("/b")]


async def test_what_was_fetched_is_not_fetched_again_by_a_put_and_what_lies_in_place_is_read_again(edge: Edge) -> None:
    await put_remote(edge, "a", "org/a")
    await put(edge, "b")
    await sleep(edge, SleepLevel.DISCARD)
    await put_remote(edge, "a", "org/a")
    await put(edge, "b")
    assert edge.fetcher.fetches == ["org/a", "/b", "/b"]
    await wake(edge)
    assert (edge.ranks.calls.count("add_lora"), edge.fetcher.released) == (2, ["/b"])
    assert await made_with(edge, "a", "b") == [fake_digest("/cache/org/a"), fake_digest("/b")]


async def test_a_sleep_that_keeps_host_memory_loads_nothing_again(edge: Edge) -> None:
    await put(edge, "a")
    await sleep(edge)
    await wake(edge)
    assert (told_at_the_wake(edge), states(edge)) == ([], [("a", "Loaded")])


async def test_the_most_wanted_are_loaded_where_there_is_no_room_for_all(edge: Edge) -> None:
    await sleep(edge, SleepLevel.DISCARD)
    await put(edge, "high", priority=1)
    await put(edge, "low", priority=-1)
    await put(edge, "plain")
    await put(edge, "resident", residency=Residency.RESIDENT, priority=-5)
    await wake(edge)
    assert dict(states(edge)) == {"high": "Loaded", "low": "Cached", "plain": "Cached", "resident": "Loaded"}
    assert [path for _, path in sorted(edge.ranks.registered.items())] == ["/resident", "/high"]


async def test_what_is_put_while_the_model_sleeps_evicts_what_is_wanted_less(edge: Edge) -> None:
    await put(edge, "a", priority=1)
    await put(edge, "b")
    await sleep(edge)
    await put(edge, "c")
    await wake(edge)
    assert dict(states(edge)) == {"a": "Loaded", "b": "Cached", "c": "Loaded"}


# Failures


async def test_one_that_cannot_be_loaded_is_failed_and_keeps_nothing_else_from_serving(edge: Edge) -> None:
    await put(edge, "a")
    await put(edge, "b")
    await sleep(edge, SleepLevel.DISCARD)
    edge.ranks.adapter_errors["/b"] = NO_FILE
    await wake(edge)
    document = record(edge, "b")
    assert (document.state, document.error and document.error.message) == (AdapterState.FAILED, NO_FILE.message)
    assert await made_with(edge, "a") == [fake_digest("/a")]
    with pytest.raises(RequestError, match="no adapter_config") as error:
        await made_with(edge, "b")
    assert error.value.code is ErrorCode.ADAPTER_NOT_LOADED


@pytest.mark.slow
async def test_a_load_that_takes_too_long_does_not_cost_the_wake(edge: Edge) -> None:
    await put(edge, "a")
    await sleep(edge, SleepLevel.DISCARD)
    edge.ranks.hanging.add("add_lora")
    await wake(edge, deadline_seconds=2.0)
    problem = record(edge, "a").error
    assert (states(edge), problem and problem.code, edge.ranks.generation) == ([("a", "Failed")], "Timeout", 1)
    assert await made_with(edge) == []


async def test_a_load_that_one_rank_refuses_is_undone_before_the_ranks_are_looked_at(edge: Edge) -> None:
    """Let a rank refuse an adapter during a wake; the wake must succeed and leave the adapter on no rank.

    A check of the ranks before the undo would find an adapter that the table does not have.
    """
    await put(edge, "a")
    await sleep(edge, SleepLevel.DISCARD)
    edge.ranks.adapter_errors_of_one["/a"] = ErrorReport(ErrorCode.RANK_FAILED, "no memory")
    await wake(edge)
    problem = record(edge, "a").error
    assert (states(edge), problem and problem.code, edge.ranks.generation) == ([("a", "Failed")], "RankFailed", 1)
    assert edge.ranks.registered == {}


async def test_a_sleep_that_fails_leaves_adapters_as_they_are_and_loads_what_was_put_meanwhile(edge: Edge) -> None:
    await put(edge, "a")
    edge.ranks.sleep_errors = [NO_FILE]
    edge.ranks.calling.clear()
    edge.engine.sleep(SleepCall(operation_id="s"))
    await edge.wait_state(state="sleeping")
    assert (await put(edge, "b")).state is AdapterState.DEFERRED
    edge.ranks.calling.set()
    await edge.wait_state(state="ready", operation=None)
    assert await made_with(edge, "a", "b") == [fake_digest("/a"), fake_digest("/b")]


@pytest.mark.parametrize("level", LEVELS)
async def test_ranks_that_are_lost_while_they_sleep_get_all_of_it_at_their_wake(edge: Edge, level: SleepLevel) -> None:
    await put(edge, "a")
    await put(edge, "gone")
    await sleep(edge, level)
    await put(edge, "b")
    await delete(edge, "gone")
    edge.ranks.lose("rank 1 was ended by SIGKILL")
    await edge.wait_state(generation=2, state="asleep")
    assert (sorted(states(edge)), edge.ranks.registered) == ([("a", "Deferred"), ("b", "Deferred")], {})
    await wake(edge)
    assert await made_with(edge, "a", "b") == [fake_digest("/a"), fake_digest("/b")]
    assert edge.fetcher.released == ["/gone"]


@pytest.mark.parametrize("level", LEVELS)
async def test_ranks_that_are_lost_in_the_middle_of_a_wake_get_all_of_it_as_they_start_again(edge: Edge, level: SleepLevel) -> None:
    await put(edge, "a")
    await sleep(edge, level)
    await put(edge, "b")
    edge.ranks.killers["add_lora"] = "rank 1 was ended by SIGKILL"
    await wake(edge)
    assert edge.ranks.generation == 2
    assert await made_with(edge, "a", "b") == [fake_digest("/a"), fake_digest("/b")]


# Requests


async def test_a_request_for_a_deferred_adapter_wakes_an_idle_model_and_is_made_with_it(edge: Edge) -> None:
    await sleep(edge, SleepLevel.DISCARD, policy=SleepPolicy.ON_IDLE)
    await put(edge, "a")
    assert [adapter.name for adapter in edge.engine.served_adapters()] == ["a"]
    assert await made_with(edge, "a") == [fake_digest("/a")]


# The desired file


def wanted(name: str, path: str = "", **fields: Any) -> DesiredAdapter:
    return DesiredAdapter(name, Source(path=path or f"/{name}"), **fields)


def write(path: Path, *adapters: DesiredAdapter, age_s: float = 0.0, policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE) -> None:
    """Replace the desired files as a kubelet does, with a time of change this many seconds ago."""
    MountedFolder(path.parent).write(*adapters, age_s=age_s, sleep=DesiredSleep(policy=policy))


def test_of_a_file_only_what_changed_counts() -> None:
    before = [wanted("same"), wanted("gone"), wanted("other"), wanted("scaled")]
    after = [wanted("same"), wanted("other", "/new"), wanted("scaled", scale=0.5), wanted("added")]
    removed, put = changes(before, after)
    assert (removed, [adapter.name for adapter in put]) == (["gone"], ["other", "scaled", "added"])
    assert changes(after, after) == ([], [])


@pytest.mark.parametrize("level", LEVELS)
async def test_a_file_that_changed_is_followed_before_the_model_serves_and_calls_that_it_never_knew_stay(
    tmp_path: Path, level: SleepLevel
) -> None:
    path = tmp_path / "desired.json"
    write(path, wanted("same"), wanted("gone"), wanted("other"), age_s=60)
    async with serving_edge(desired_path=str(path)) as edge:
        await put(edge, "pushed")
        await sleep(edge, level)
        write(path, wanted("same"), wanted("other", "/new"), wanted("added"), wanted("digits"))
        await wake(edge)
        assert dict(states(edge)) == dict.fromkeys(("same", "other", "added", "pushed"), "Loaded")
        assert await made_with(edge, "other", "added") == [fake_digest("/new"), fake_digest("/added")]
        await edge.wait_for(lambda: _holds(edge, "/same", "/new", "/added", "/pushed"))


async def test_a_file_that_did_not_change_undoes_no_call(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    write(path, wanted("a"), wanted("b"))
    async with serving_edge(desired_path=str(path)) as edge:
        await sleep(edge)
        await delete(edge, "a")
        await put(edge, "b", "/new")
        await wake(edge)
        assert (states(edge), record(edge, "b").digest) == ([("b", "Loaded")], fake_digest("/new"))


@pytest.mark.parametrize(("age_s", "of_the_file"), [(60.0, False), (-60.0, True)])
async def test_of_a_file_and_a_call_that_speak_of_one_name_the_newer_counts(tmp_path: Path, age_s: float, of_the_file: bool) -> None:
    path = tmp_path / "desired.json"
    write(path, wanted("a"), wanted("b"), wanted("c"), age_s=120)
    async with serving_edge(desired_path=str(path)) as edge:
        await sleep(edge)
        await delete(edge, "a")
        await put(edge, "b", "/by-call")
        await put(edge, "c", scale=0.5)
        write(path, wanted("a", "/by-file"), wanted("b", "/by-file"), age_s=age_s)
        await wake(edge)
        digests = {adapter.name: adapter.digest for adapter in edge.engine.state_document().adapters if adapter.state == "Loaded"}
    by_file = dict.fromkeys(("a", "b"), fake_digest("/by-file"))
    assert digests == (by_file if of_the_file else {"b": fake_digest("/by-call"), "c": fake_digest("/c")})


@pytest.mark.slow
async def test_a_source_of_the_file_that_stalls_does_not_cost_the_wake(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    write(path, wanted("a"), age_s=60)
    async with serving_edge(desired_path=str(path)) as edge:
        await sleep(edge)
        edge.fetcher.arriving.clear()
        stalling = DesiredAdapter("b", Source(hugging_face=HuggingFaceSource("org/b")))
        write(path, wanted("a"), stalling)
        await wake(edge, deadline_seconds=2.0)
        assert (states(edge), edge.ranks.generation) == ([("a", "Loaded"), ("b", "Fetching")], 1)
        edge.fetcher.arriving.set()
        await edge.wait_for(lambda: _has(edge, ("b", "Loaded")))


async def test_a_worker_that_comes_back_asleep_knows_its_adapters_and_its_ranks_hear_of_them_at_the_wake(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    write(path, wanted("a"), wanted("later", residency=Residency.ON_DEMAND), policy=SleepPolicy.ASLEEP)
    settings: dict[str, Any] = {"desired_path": str(path), "state_dir": str(tmp_path), "preload_loras": {"mine": "/mine"}}
    async with serving_edge(**settings) as first:
        assert first.engine.state_document().state == "asleep"
    edge = Edge(FakeRankGroup(), **settings)
    async with asyncio.timeout(DEADLINE_S):
        await edge.engine.start()
        assert edge.engine.state_document().state == "asleep"
        assert dict(states(edge)) == {"a": "Deferred", "mine": "Deferred", "later": "Cached"}
        assert "add_lora" not in edge.ranks.calls
        await wake(edge)
        assert dict(states(edge)) == {"a": "Loaded", "mine": "Loaded", "later": "Cached"}
        assert told_at_the_wake(edge) == ["add_lora", "add_lora"]
        await edge.engine.terminate()
