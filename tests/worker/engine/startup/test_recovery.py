# SPDX-License-Identifier: Apache-2.0
"""The loss of a rank group: its effect on requests, adapters, sleep and control calls, over a fake group."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diffusion_worker.engine.scheduling.poison import MOST_IN_A_ROW
from diffusion_worker.engine.state.restart_budget import WINDOW_S, RestartBudget
from diffusion_worker.engine.state.state_document import AdapterCall, EngineState
from diffusion_worker.errors import ConfigError, ErrorCode, Fault, GroupFailed, LoadTimeout
from diffusion_worker.messages import ErrorReport, RequestSpec
from diffusion_worker.sources.source import Source
from support.worker.fake_rank_group import FakeRankGroup, fake_pixels
from support.worker.process import decode_image
from support.worker.server_edge import Edge, code, serving_edge

KILLED = "rank 1 (pid 7) was ended by SIGKILL"


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(ranks=2, max_batch_size=2) as edge:
        yield edge


async def asked(edge: Edge, count: int = 1, **body: Any) -> list[asyncio.Task[Any]]:
    """Start `count` requests with seeds from 0 up, whose ranks hang in the first step until the test sets `stepping`.

    Return their tasks once as many as fit run and the rest is queued.
    """
    edge.ranks.stepping.clear()
    tasks = [asyncio.create_task(edge.request_images(**{"prompt": "p kumquatfen", "seed": seed, **body})) for seed in range(count)]
    await edge.wait_state(inFlight=min(count, edge.config.max_batch_size), queued=max(0, count - edge.config.max_batch_size))
    return tasks


async def restarted(edge: Edge, generation: int = 2, **wanted: Any) -> dict[str, Any]:
    return await edge.wait_state(**{"generation": generation, "state": "ready", **wanted})


def image(seed: int) -> bytes:
    return fake_pixels(RequestSpec(request_id="", prompt="p kumquatfen", seed=seed))


# Requests


async def test_running_and_queued_requests_are_answered_by_the_next_group_as_if_nothing_had_happened(edge: Edge) -> None:
    tasks = await asked(edge, 5)
    edge.ranks.lose(KILLED)
    edge.ranks.stepping.set()
    answers = await asyncio.gather(*tasks)
    for seed, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        assert decode_image(answer.json()["data"][0]["b64_json"]).tobytes() == image(seed)
    assert edge.engine.stats.replayed == 2


async def test_a_request_that_loses_the_ranks_again_when_it_is_alone_fails_and_its_like_is_refused(edge: Edge) -> None:
    (task,) = await asked(edge)
    edge.ranks.lose(KILLED)
    await restarted(edge, inFlight=1)
    edge.ranks.lose(KILLED)
    answer = await task
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["retryable"]) == (422, "RequestFailed", False)
    assert KILLED in answer.json()["error"]["message"]
    await restarted(edge, 3)
    edge.ranks.stepping.set()
    again = await edge.request_images(prompt="p kumquatfen", seed=99)
    assert (again.status_code, again.json()["error"]["code"], again.headers["x-should-retry"]) == (422, "RequestFailed", "false")
    assert (await edge.request_images(prompt="q kumquatfen")).status_code == 200


async def test_a_request_that_comes_while_the_group_is_started_again_waits_for_it(edge: Edge) -> None:
    edge.ranks.loading.clear()
    edge.ranks.lose(KILLED)
    await edge.wait_state(state="restarting")
    task = asyncio.create_task(edge.request_images(prompt="p kumquatfen", seed=0))
    await edge.wait_held(1)
    edge.ranks.loading.set()
    assert (await task).status_code == 200


async def test_a_request_that_is_wrong_is_refused_at_once_while_the_group_is_started_again(edge: Edge) -> None:
    edge.ranks.loading.clear()
    edge.ranks.lose(KILLED)
    await edge.wait_state(state="restarting")
    assert (await edge.request_images(prompt="p kumquatfen", size="65x65")).status_code == 400
    assert (await edge.request_images(prompt="p kumquatfen", model="nobody")).status_code == 404
    edge.ranks.loading.set()


async def test_a_step_that_is_overdue_loses_the_group_and_the_request_is_made_by_the_next_one() -> None:
    async with serving_edge(ranks=2, tick_timeout_s=0.05) as edge:
        (task,) = await asked(edge)
        await restarted(edge)
        edge.ranks.stepping.set()
        assert (await task).status_code == 200
        assert (await edge.state())["lastLoss"]["fault"] == "Stalled"


# Reports of a loss


async def test_the_state_document_tells_the_generation_the_restarts_and_the_last_loss(edge: Edge) -> None:
    edge.ranks.loading.clear()
    edge.ranks.lose(KILLED, Fault.DEVICE)
    document = await edge.wait_state(state="restarting")
    assert (document["failure"]["code"], document["failure"]["message"]) == ("RankFailed", KILLED)
    assert (await edge.data.get("/readyz")).status_code == 200
    edge.ranks.loading.set()
    document = await restarted(edge)
    assert (document["restarts"], document["failure"]) == (1, None)
    assert {name: document["lastLoss"][name] for name in ("fault", "message", "generation")} == {
        "fault": "Device",
        "message": KILLED,
        "generation": 1,
    }


async def test_metrics_count_restarts_and_losses_by_their_fault(edge: Edge) -> None:
    edge.ranks.lose(KILLED, Fault.DEVICE)
    await restarted(edge)
    text = (await edge.data.get("/metrics")).text
    assert "diffusion_worker_rank_group_restarts_total 1.0" in text
    assert 'diffusion_worker_rank_group_losses_total{fault="Device"} 1.0' in text
    assert 'diffusion_worker_rank_group_losses_total{fault="Died"} 0.0' in text
    assert 'diffusion_worker_state{state="restarting"} 0.0' in text


async def test_control_operations_are_told_to_come_back_while_the_group_is_started_again(edge: Edge) -> None:
    await edge.put_adapter("style", "/loras/style")
    edge.ranks.loading.clear()
    edge.ranks.lose(KILLED)
    await edge.wait_state(state="restarting")
    answers = [
        await edge.operate("sleep"),
        await edge.operate("wake"),
        await edge.operate("profile", action="Start"),
        await edge.put_adapter("other", "/loras/other"),
    ]
    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(503, "Busy")] * 4
    edge.ranks.loading.set()


async def test_an_adapter_is_removed_while_the_group_is_started_again_and_does_not_come_back_with_it(edge: Edge) -> None:
    await edge.put_adapter("style", "/loras/style")
    edge.ranks.loading.clear()
    edge.ranks.lose(KILLED)
    await edge.wait_state(state="restarting")
    assert (await edge.delete_adapter("style")).status_code == 200
    edge.ranks.loading.set()
    await restarted(edge)
    assert ((await edge.state())["adapters"], edge.ranks.registered) == ([], {})


# Adapters


async def test_adapters_are_loaded_again_under_their_ids_and_serve_the_requests_that_waited(edge: Edge) -> None:
    await edge.put_adapter("one", "/loras/one")
    await edge.put_adapter("two", "/loras/two", scale=0.5)
    before = (await edge.request_images(prompt="p kumquatfen", seed=0, model="two")).json()["data"]
    (task,) = await asked(edge, model="two")
    edge.ranks.lose(KILLED)
    edge.ranks.stepping.set()
    assert (await task).json()["data"] == before
    document = await restarted(edge)
    assert [(adapter["name"], adapter["state"], adapter["scale"]) for adapter in document["adapters"]] == [
        ("one", "Loaded", 1.0),
        ("two", "Loaded", 0.5),
    ]


async def test_an_adapter_whose_bytes_changed_is_failed_after_a_restart_and_its_requests_with_it(edge: Edge) -> None:
    await edge.put_adapter("style", "/loras/style")
    (task,) = await asked(edge, model="style")
    edge.ranks.adapter_errors["/loras/style"] = ErrorReport(ErrorCode.DIGEST_MISMATCH, "expected one, found another")
    edge.ranks.lose(KILLED)
    answer = await task
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "AdapterNotLoaded")
    document = await restarted(edge)
    assert (document["adapters"][0]["state"], document["adapters"][0]["error"]["code"]) == ("Failed", "DigestMismatch")
    edge.ranks.stepping.set()
    assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


async def test_an_adapter_that_was_loading_when_the_group_was_lost_is_failed_and_can_be_put_again(edge: Edge) -> None:
    edge.ranks.calling.clear()
    putting = asyncio.create_task(edge.put_adapter("style", "/loras/style"))

    async def loading() -> bool:
        return "add_lora" in edge.ranks.calls

    await edge.wait_for(loading)
    edge.ranks.lose(KILLED)
    answer = await putting
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (500, "RankFailed", True)
    edge.ranks.calling.set()
    document = await restarted(edge)
    assert document["adapters"][0]["state"] == "Failed"
    assert (await edge.put_adapter("style", "/loras/style")).status_code == 200


async def test_an_adapter_that_drains_when_the_group_is_lost_serves_its_requests_to_their_end(edge: Edge) -> None:
    await edge.put_adapter("style", "/loras/style")
    (task,) = await asked(edge, model="style")
    deleting = asyncio.create_task(edge.delete_adapter("style"))

    async def drains() -> bool:
        return bool((await edge.state())["adapters"][0]["state"] == "Draining")

    await edge.wait_for(drains)
    edge.ranks.lose(KILLED)
    await restarted(edge)
    edge.ranks.stepping.set()
    assert (await task).status_code == 200
    assert (await deleting).status_code == 200
    assert (await edge.state())["adapters"] == []


# Sleep and wake


# When it is no use


async def test_a_group_that_is_lost_while_it_starts_again_is_started_once_more(edge: Edge) -> None:
    (task,) = await asked(edge)
    edge.ranks.restart_errors = [GroupFailed("rank 0 (pid 9) was ended by SIGKILL"), None]
    edge.ranks.lose(KILLED)
    edge.ranks.stepping.set()
    assert (await task).status_code == 200
    assert (await restarted(edge, 3))["restarts"] == 2


@pytest.mark.parametrize("error", [ConfigError("no model_index.json in it"), LoadTimeout("not within 5 s")])
async def test_a_model_that_cannot_be_loaded_again_fails_the_engine_with_the_reason(edge: Edge, error: Exception) -> None:
    (task,) = await asked(edge)
    edge.ranks.restart_errors = [error]
    edge.ranks.lose(KILLED)
    async with asyncio.timeout(30):
        reason = await edge.engine.run_until_failure()
    assert str(error) in reason and KILLED in reason
    answer = await task
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "EngineFailed")
    assert (edge.engine.state, (await edge.data.get("/readyz")).status_code) == (EngineState.FAILED, 503)


async def test_losses_by_poisons_do_not_count_and_a_loss_that_nobody_explains_does() -> None:
    async with serving_edge(ranks=2, max_batch_size=2, max_restarts=1) as edge:
        for number in range(3):
            (task,) = await asked(edge, prompt=f"poison kumquatfen {number}")
            for generation in (2 * number + 2, 2 * number + 3):
                edge.ranks.lose(KILLED)
                await restarted(edge, generation)
            assert (await task).status_code == 422
            edge.ranks.stepping.set()
            assert (await edge.request_images(prompt="p kumquatfen", seed=0)).status_code == 200
        edge.ranks.lose(KILLED)
        await restarted(edge, 8)
        edge.ranks.lose(KILLED)
        async with asyncio.timeout(30):
            assert "lost too often" in await edge.engine.run_until_failure()


async def test_ranks_that_every_request_loses_are_given_up_although_each_request_looked_guilty() -> None:
    async with serving_edge(ranks=2, max_batch_size=2, max_restarts=1) as edge:
        for number in range(MOST_IN_A_ROW + 1):
            (task,) = await asked(edge, prompt=f"innocent kumquatfen {number}")
            edge.ranks.lose(KILLED)
            await restarted(edge, 2 * number + 2)
            edge.ranks.lose(KILLED)
            answer = await task
        assert answer.status_code == 422
        async with asyncio.timeout(30):
            assert "lost too often" in await edge.engine.run_until_failure()


def test_restarts_count_for_ten_minutes() -> None:
    budget = RestartBudget(2)
    assert [budget.spend(number, at) for number, at in enumerate((0.0, 1.0, 2.0))] == [True, True, False]
    assert budget.spend(3, WINDOW_S + 2.5)


def test_explained_losses_give_their_restarts_back() -> None:
    budget = RestartBudget(1)
    assert budget.spend(1, 0.0)
    budget.explain({1, 2})
    assert [budget.spend(number, 1.0) for number in (3, 4)] == [True, False]


async def test_an_engine_that_ends_while_it_loads_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    edge = Edge(FakeRankGroup())
    edge.ranks.loading.clear()
    starting = asyncio.create_task(edge.engine.start())
    held = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_held(1)
    async with asyncio.timeout(30):
        await edge.engine.terminate()
        with pytest.raises(GroupFailed, match="the ranks were ended"):
            await starting
        assert code(await held) == (503, "Terminating")
    assert edge.engine.state is EngineState.TERMINATING
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_request_that_runs_while_the_server_ends_is_replayed_within_the_drain(edge: Edge) -> None:
    (task,) = await asked(edge)
    ending = asyncio.create_task(edge.engine.terminate())
    await edge.wait_state(state="terminating")
    edge.ranks.lose(KILLED)
    edge.ranks.stepping.set()
    assert (await task).status_code == 200
    await ending


async def test_an_adapter_waiting_for_its_turn_to_load_is_loaded_by_the_next_group(edge: Edge) -> None:
    """Lose the ranks while the first of two adapters loads, so that the second begins in the group that replaces them.

    The state document has to agree with what each put returned.
    """
    edge.ranks.calling.clear()
    call = AdapterCall(operation_id="a", source=Source(path="/loras/one"))
    puts = [asyncio.create_task(edge.engine.put_adapter(name, call)) for name in ("one", "two")]

    async def loading() -> bool:
        return "add_lora" in edge.ranks.calls

    await edge.wait_for(loading)
    edge.ranks.lose(KILLED)
    edge.ranks.calling.set()
    await asyncio.gather(*puts, return_exceptions=True)
    document = await restarted(edge)
    # The document agrees with the outcome of each put: nothing is left in between.
    told = ["Loaded" if put.exception() is None else "Failed" for put in puts]
    assert [adapter["state"] for adapter in document["adapters"]] == told


# Standbys


async def test_standbys_are_wanted_whenever_the_model_begins_to_serve_and_never_by_one_that_is_lost_asleep(edge: Edge) -> None:
    assert edge.ranks.standbys_kept == [True]
    edge.ranks.lose(KILLED)
    await restarted(edge)
    assert edge.ranks.standbys_kept == [True, True]
    await edge.operate("sleep")
    await edge.wait_state(state="asleep", operation=None)
    edge.ranks.lose(KILLED)
    await edge.wait_state(generation=3, state="asleep")
    assert edge.ranks.standbys_kept == [True, True]
    await edge.operate("wake")
    await edge.wait_state(state="ready", operation=None)
    assert edge.ranks.standbys_kept == [True, True, True]


async def test_standbys_are_ended_before_the_requests_that_still_run_when_the_worker_ends(edge: Edge) -> None:
    (task,) = await asked(edge)
    await edge.operate("drain")
    assert edge.ranks.standbys_kept == [True, False] and not task.done()
    edge.ranks.stepping.set()
    assert (await task).status_code == 200


async def test_the_state_says_how_many_standbys_are_ready(edge: Edge) -> None:
    edge.ranks.standbys = 2
    assert (await edge.state())["standbyRanks"] == 2
