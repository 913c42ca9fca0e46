# SPDX-License-Identifier: Apache-2.0
"""Sleep for clients that know the routes of vLLM or vLLM-Omni, over a fake rank group: answered at the end of the operation."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from diffusion_worker.config import Offload
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport
from diffusion_worker.server.control import sleep_routes
from support.worker.fake_rank_group import WEIGHTS_BYTES
from support.worker.server_edge import Edge, serving_edge

BROKEN = ErrorReport(ErrorCode.RANK_FAILED, "no memory to map")


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(ranks=2) as edge:
        yield edge


async def post(edge: Edge, path: str, **options: Any) -> httpx2.Response:
    return await edge.control.post(path, **options)


async def is_sleeping(edge: Edge) -> bool:
    answer = await edge.control.get("/is_sleeping")
    assert answer.status_code == 200
    assert list(answer.json()) == ["is_sleeping"]
    return bool(answer.json()["is_sleeping"])


async def levels(edge: Edge) -> list[str | None]:
    return [rank["memory"]["level"] for rank in (await edge.state())["ranks"]]


# vLLM's


@pytest.mark.parametrize(("query", "level"), [("", "HostMemory"), ("?level=1", "HostMemory"), ("?level=2&mode=wait", "Discard")])
async def test_a_sleep_is_answered_when_it_is_over_and_a_wake_when_the_model_serves(edge: Edge, query: str, level: str) -> None:
    assert not await is_sleeping(edge)
    answer = await post(edge, f"/sleep{query}")
    assert (answer.status_code, answer.content) == (200, b"")
    assert ((await edge.state())["state"], await levels(edge), await is_sleeping(edge)) == ("asleep", [level] * 2, True)
    answer = await post(edge, "/wake_up")
    assert (answer.status_code, answer.content) == (200, b"")
    assert ((await edge.state())["state"], await levels(edge), await is_sleeping(edge)) == ("ready", [None] * 2, False)
    assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


async def test_a_sleep_of_a_sleeper_and_a_wake_of_an_awake_one_are_harmless(edge: Edge) -> None:
    assert (await post(edge, "/wake_up")).status_code == 200
    assert [(await post(edge, "/sleep")).status_code for _ in range(2)] == [200, 200]
    assert (edge.ranks.calls.count("handle_sleep_task"), edge.ranks.calls.count("handle_wake_task")) == (1, 0)


async def test_two_clients_that_sleep_at_once_wait_for_one_sleep(edge: Edge) -> None:
    edge.ranks.calling.clear()
    asking = [asyncio.create_task(post(edge, "/sleep")) for _ in range(2)]
    await edge.wait_state(state="sleeping")
    assert await is_sleeping(edge)
    assert not any(each.done() for each in asking)
    edge.ranks.calling.set()
    assert [(await each).status_code for each in asking] == [200, 200]
    assert edge.ranks.calls.count("handle_sleep_task") == 1


@pytest.mark.parametrize(("query", "outcome"), [("", (503, "Asleep")), ("?mode=abort", (503, "Asleep")), ("?mode=wait", (200, None))])
async def test_running_requests_are_ended_or_waited_for_by_the_mode(edge: Edge, query: str, outcome: tuple[int, str | None]) -> None:
    edge.ranks.stepping.clear()
    running = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_state(inFlight=1)
    sleeping = asyncio.create_task(post(edge, f"/sleep{query}"))
    await edge.wait_state(state="draining")
    edge.ranks.stepping.set()
    answer = await running
    assert (answer.status_code, answer.json().get("error", {}).get("code")) == outcome
    assert (await sleeping).status_code == 200


async def test_a_wake_while_the_model_drains_ends_the_sleep_of_another_client_as_cancelled(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    running = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_state(inFlight=1)
    sleeping = asyncio.create_task(post(edge, "/sleep?mode=wait"))
    await edge.wait_state(state="draining")
    assert (await post(edge, "/wake_up")).status_code == 200
    assert (await sleeping).json()["code"] == "Cancelled"
    edge.ranks.stepping.set()
    assert (await running).status_code == 200
    assert not await is_sleeping(edge)


async def test_level_0_pauses_and_a_wake_ends_that(edge: Edge) -> None:
    assert (await post(edge, "/sleep?level=0")).status_code == 200
    document = await edge.state()
    assert (document["state"], document["paused"], await is_sleeping(edge)) == ("ready", True, True)
    assert (await post(edge, "/wake_up")).status_code == 200
    assert ((await edge.state())["paused"], await is_sleeping(edge)) == (False, False)
    assert "handle_sleep_task" not in edge.ranks.calls


async def test_tags_wake_a_part_and_those_of_a_language_model_are_the_rest_of_it(edge: Edge) -> None:
    await post(edge, "/sleep")
    assert (await post(edge, "/wake_up?tags=weights")).status_code == 200
    document = await edge.state()
    assert (document["state"], document["ranks"][0]["memory"]["asleep"]) == ("asleep", ["adapters", "caches"])
    assert await is_sleeping(edge)
    assert (await post(edge, "/wake_up?tags=kv_cache&tags=weights")).status_code == 200
    assert ((await edge.state())["state"], await is_sleeping(edge)) == ("ready", False)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=-1", "level"),
        ("/sleep?level=one", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/sleep?force=1", "force"),
        ("/wake_up?tags=graphs", "tags[0]"),
        ("/wake_up?tag=weights", "tag"),
    ],
)
async def test_a_query_that_is_none_is_refused_by_name(edge: Edge, path: str, field: str) -> None:
    answer = await post(edge, path)
    assert (answer.status_code, answer.json()["code"], answer.json()["details"]) == (400, "InvalidRequest", {"field": field})
    assert edge.ranks.calls == []


# Errors


@pytest.mark.parametrize("path", ["/sleep", "/v1/omni/sleep"])
async def test_an_error_of_a_rank_in_a_sleep_is_an_http_error_that_names_it_and_the_model_serves_on(edge: Edge, path: str) -> None:
    edge.ranks.sleep_errors = [BROKEN]
    answer = await post(edge, path, json={})
    assert (answer.status_code, answer.json()["code"]) == (500, "RankFailed")
    assert "rank 1: no memory to map" in answer.json()["message"]
    assert not await is_sleeping(edge)
    assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


@pytest.mark.parametrize(("sleep", "wake"), [("/sleep", "/wake_up"), ("/v1/omni/sleep", "/v1/omni/wakeup")])
async def test_a_wake_without_enough_memory_leaves_the_model_asleep_and_may_be_tried_again(edge: Edge, sleep: str, wake: str) -> None:
    await post(edge, sleep, json={})
    edge.ranks.wake_errors = [ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "expected 2 GB, found 1 GB")]
    answer = await post(edge, wake, json={})
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (507, "InsufficientMemory", True)
    assert "rank 1" in answer.json()["message"]
    assert await is_sleeping(edge)
    assert (await post(edge, wake, json={})).status_code == 200
    assert not await is_sleeping(edge)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/sleep?level=0", "/v1/omni/sleep", "/v1/omni/wakeup"])
async def test_a_model_that_cannot_sleep_says_so_with_the_option(path: str) -> None:
    async with serving_edge(offload=Offload.MODEL) as edge:
        answer = await post(edge, path, json={})
        assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (501, "InvalidRequest", False)
        assert "--offload model" in answer.json()["message"]
        assert not await is_sleeping(edge)


async def test_an_operation_that_takes_too_long_is_not_waited_for_and_goes_on(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_routes, "OVER_TIMEOUT_S", 0.02)
    edge.ranks.calling.clear()
    answer = await post(edge, "/sleep")
    assert (answer.status_code, answer.json()["code"]) == (504, "Timeout")
    edge.ranks.calling.set()
    await edge.wait_state(state="asleep")


# vLLM-Omni's


async def test_every_rank_acknowledges_a_sleep_and_a_wake(edge: Edge) -> None:
    answer = await post(edge, "/v1/omni/sleep", json={"stage_ids": [0]})
    assert (answer.status_code, answer.json()["status"]) == (200, "SUCCESS")
    acks = answer.json()["acks"]
    assert [sorted(ack) for ack in acks] == [
        ["error_msg", "freed_bytes", "metadata", "rank", "stage_id", "status", "task_id"] for _ in range(2)
    ]
    assert [(ack["rank"], ack["stage_id"], ack["status"], ack["freed_bytes"], ack["error_msg"]) for ack in acks] == [
        (rank, 0, "SUCCESS", WEIGHTS_BYTES, None) for rank in range(2)
    ]
    assert acks[0]["metadata"]["total_freed_gib"] == 2 * WEIGHTS_BYTES / 2**30
    assert acks[0]["metadata"]["rank_residual_gib"] == 0
    assert await levels(edge) == ["Discard"] * 2
    answer = await post(edge, "/v1/omni/wakeup", json={"stage_ids": [0]})
    assert (answer.status_code, answer.json()["status"]) == (200, "SUCCESS")
    assert [ack["metadata"]["state"] for ack in answer.json()["acks"]] == ["WARM", "WARM"]
    assert answer.json()["acks"][0]["metadata"]["current_vram_gib"] == WEIGHTS_BYTES / 2**30
    assert (await edge.state())["state"] == "ready"


async def test_a_level_may_be_given_and_all_stages_are_meant_without_any(edge: Edge) -> None:
    assert (await post(edge, "/v1/omni/sleep", json={"level": 1})).json()["status"] == "SUCCESS"
    assert await levels(edge) == ["HostMemory"] * 2


async def test_a_wake_with_nothing_asleep_is_skipped_and_a_sleep_of_a_sleeper_succeeded(edge: Edge) -> None:
    answer = await post(edge, "/v1/omni/wakeup", json={"stage_ids": [0]})
    assert (answer.status_code, answer.json()) == (200, {"status": "SKIPPED", "acks": []})
    await post(edge, "/v1/omni/sleep", json={})
    answer = await post(edge, "/v1/omni/sleep", json={})
    assert (answer.status_code, answer.json()) == (200, {"status": "SUCCESS", "acks": []})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stage_ids": [1]}, "stage_ids"),
        ({"stage_ids": []}, "stage_ids"),
        ({"stage_ids": ["0"]}, "stage_ids[0]"),
        ({"level": 0}, "level"),
        ({"level": 3}, "level"),
        ({"mode": "abort"}, "mode"),
    ],
)
async def test_a_body_that_is_none_is_refused_by_name(edge: Edge, body: dict[str, Any], field: str) -> None:
    answer = await post(edge, "/v1/omni/sleep", json=body)
    assert (answer.status_code, answer.json()["code"], answer.json()["details"]) == (400, "InvalidRequest", {"field": field})
    assert edge.ranks.calls == []
