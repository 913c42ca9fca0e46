# SPDX-License-Identifier: Apache-2.0
"""Held requests at the HTTP edge: their clients' view while the model loads, restarts, sleeps and wakes."""

import asyncio
import contextlib
import io
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from PIL import Image

from diffusion_worker.engine.state.state_document import Residency, SleepCall
from diffusion_worker.errors import ErrorCode, GroupFailed
from diffusion_worker.messages import ErrorReport, RequestSpec, Task
from support.worker.fake_rank_group import FakeRankGroup, fake_pixels
from support.worker.process import decode_image
from support.worker.server_edge import DEADLINE_S, Edge, code, fall_asleep, serving_edge, sleeping_edge
from support.worker.sleep_rig import write_desired

KILLED = "rank 0 was ended by SIGKILL"


@contextlib.asynccontextmanager
async def loading_model(**settings: Any) -> AsyncIterator[Edge]:
    """Yield an edge in state `starting`; the test may let its model load.

    At the end of the block the model loads at the latest, and the engine ends.
    """
    edge = Edge(FakeRankGroup(), **settings)
    edge.ranks.loading.clear()
    starting = asyncio.create_task(edge.engine.start())
    await edge.wait_state(state="starting")
    try:
        yield edge
    finally:
        edge.ranks.loading.set()
        await starting
        await edge.engine.terminate()


def half_transparent() -> bytes:
    """Encode a red PNG of 16x16 pixels whose left half is transparent, from which an inpainting can take its mask."""
    image, out = Image.new("RGBA", (16, 16), (200, 0, 0, 255)), io.BytesIO()
    image.paste((0, 0, 0, 0), (0, 0, 8, 16))
    image.save(out, "PNG")
    return out.getvalue()


# Invalid requests are refused at once


WRONG = {"prompt": "p kumquatfen", "size": "65x65"}, {"prompt": "p kumquatfen", "num_inference_steps": 1000}, {"prompt": ""}


async def test_while_the_model_sleeps_a_bad_request_has_its_error_at_once_and_wakes_nobody(tmp_path: Path) -> None:
    async with sleeping_edge(tmp_path) as edge:
        for body in WRONG:
            assert code(await edge.request_images(**body)) == (400, "InvalidRequest")
        assert code(await edge.request_images(prompt="p kumquatfen", model="nobody")) == (404, "model_not_found")
        assert (await edge.state())["state"] == "asleep"
        assert (await edge.state())["held"] == {"current": 0, "oldestAgeSeconds": None}


async def test_while_the_model_is_unknown_its_part_of_a_request_is_checked_when_it_is_known() -> None:
    async with loading_model() as edge:
        for body in WRONG[1:]:
            assert code(await edge.request_images(**body)) == (400, "InvalidRequest")
        odd = asyncio.create_task(edge.request_images(**WRONG[0]))
        unknown = asyncio.create_task(edge.request_images(prompt="p kumquatfen", model="nobody"))
        good = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
        await edge.wait_held(3)
        edge.ranks.loading.set()
        assert (code(await odd), code(await unknown)) == ((400, "InvalidRequest"), (404, "model_not_found"))
        assert (await good).status_code == 200


async def test_an_image_with_its_own_mask_is_edited_by_a_model_that_was_not_known_when_it_came() -> None:
    async with loading_model() as edge:
        edge.ranks.model = msgspec.structs.replace(edge.ranks.model, tasks=[Task.INPAINT], max_input_images=1)
        early = asyncio.create_task(
            edge.data.post("/v1/images/edits", data={"prompt": "p kumquatfen"}, files={"image": half_transparent()})
        )
        await edge.wait_held(1)
        edge.ranks.loading.set()
        answer = await early
        assert answer.status_code == 200, answer.text
        assert answer.json()["data"][0]["provenance"]["task"] == "inpaint"


# They wait


@pytest.mark.parametrize("during", ["draining", "sleeping"])
async def test_a_request_that_races_with_the_decision_to_sleep_is_served(tmp_path: Path, during: str) -> None:
    async with serving_edge(desired_path=write_desired(tmp_path, "OnIdle")) as edge:
        edge.ranks.stepping.clear()
        running = [asyncio.create_task(edge.request_images(prompt="p kumquatfen"))] if during == "draining" else []
        await edge.wait_state(inFlight=len(running))
        edge.ranks.calling.clear()
        await edge.operate("sleep")
        await edge.wait_state(state=during)
        late = asyncio.create_task(edge.request_images(prompt="q kumquatfen"))
        await edge.wait_state(queued=0)
        edge.ranks.stepping.set()
        edge.ranks.calling.set()
        assert {answer.status_code for answer in [await late, *await asyncio.gather(*running)]} == {200}


async def test_requests_of_a_restart_are_held_up_to_the_limit_and_those_with_the_ranks_stay_there(tmp_path: Path) -> None:
    async with serving_edge(desired_path=write_desired(tmp_path, "AlwaysAwake", coldRequests={"maxHeld": 1})) as edge:
        edge.ranks.stepping.clear()
        running = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
        await edge.wait_state(inFlight=1)
        edge.ranks.loading.clear()
        edge.ranks.lose(KILLED)
        await edge.wait_state(state="restarting", queued=1)
        held = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
        await edge.wait_held(1)
        answer = await edge.request_images(prompt="p kumquatfen")
        assert (code(answer), answer.json()["error"]["retryable"]) == ((429, "Overloaded"), True)
        assert float(answer.headers["retry-after"]) >= 1
        edge.ranks.loading.set()
        edge.ranks.stepping.set()
        assert {(await running).status_code, (await held).status_code} == {200}


# They do not wait for ever


async def test_with_the_mode_reject_a_sleeping_model_is_woken_for_those_that_come_back(tmp_path: Path) -> None:
    async with sleeping_edge(tmp_path, mode="Reject") as edge:
        edge.ranks.calling.set()
        answer = await edge.request_images(prompt="p kumquatfen")
        assert code(answer) == (503, "Asleep") and float(answer.headers["retry-after"]) >= 1
        await edge.wait_state(state="ready")
        assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


@pytest.mark.parametrize("policy", ["AlwaysAwake", "Asleep"])
async def test_a_sleep_that_somebody_asked_for_is_not_ended_by_a_request(tmp_path: Path, policy: str) -> None:
    async with sleeping_edge(tmp_path, policy) as edge:
        answer = await edge.request_images(prompt="p kumquatfen")
        assert code(answer) == (422 if policy == "Asleep" else 503, "Asleep") and "retry-after" not in answer.headers
        assert answer.headers["x-should-retry"] == ("false" if policy == "Asleep" else "true")
        assert (await edge.state())["state"] == "asleep"


async def test_a_held_request_can_be_cancelled_by_its_id(tmp_path: Path) -> None:
    async with sleeping_edge(tmp_path) as edge:
        held = asyncio.create_task(
            edge.data.post("/v1/images/generations", json={"prompt": "p kumquatfen"}, headers={"X-Request-ID": "mine"})
        )
        await edge.wait_held(1)
        assert (await edge.data.delete("/v1/requests/mine")).status_code == 204
        assert (await held).json()["error"]["code"] == "Cancelled"
        await edge.wait_held(0)


async def test_a_group_that_is_lost_for_good_ends_held_requests(tmp_path: Path) -> None:
    async with serving_edge(desired_path=write_desired(tmp_path, "OnIdle"), max_restarts=1) as edge:
        edge.ranks.loading.clear()
        edge.ranks.lose(KILLED)
        await edge.wait_state(state="restarting", generation=2)
        held = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
        await edge.wait_held(1)
        edge.ranks.lose(KILLED)
        assert code(await held) == (500, "EngineFailed")


async def test_a_model_that_cannot_be_loaded_ends_requests_that_wait_for_it() -> None:
    edge = Edge(FakeRankGroup())
    edge.ranks.loading.clear()
    starting = asyncio.create_task(edge.engine.start())
    held = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_held(1)
    edge.ranks.lose(KILLED)
    assert code(await held) == (500, "EngineFailed")
    with pytest.raises(GroupFailed):
        await starting
    await edge.engine.terminate()


# Adapters


async def test_a_request_whose_adapter_is_on_its_way_when_the_model_falls_asleep_is_held_and_served(tmp_path: Path) -> None:
    async with serving_edge(desired_path=write_desired(tmp_path, "OnIdle")) as edge:
        await edge.put_adapter("rare", "", source={"huggingFace": {"repo": "org/rare"}}, residency=Residency.ON_DEMAND)
        edge.fetcher.arriving.clear()
        waiting = asyncio.create_task(edge.request_images(prompt="p kumquatfen", model="rare"))
        await edge.wait_state(queued=1)
        edge.ranks.calling.clear()
        edge.engine.sleep(SleepCall(operation_id="s"))
        await edge.wait_held(1)
        assert (await edge.state())["queued"] == 0
        edge.ranks.calling.set()
        edge.fetcher.arriving.set()
        answer = await waiting
        assert answer.status_code == 200, answer.text
        assert [used["name"] for used in answer.json()["data"][0]["provenance"]["adapters"]] == ["rare"]


async def test_a_request_for_an_adapter_of_a_sleeping_model_is_held_and_one_for_a_broken_one_is_not(tmp_path: Path) -> None:
    async with serving_edge(desired_path=write_desired(tmp_path, "OnIdle")) as edge:
        await edge.put_adapter("stripes", "/loras/stripes")
        edge.ranks.adapter_errors["/loras/broken"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "no config")
        await edge.put_adapter("broken", "/loras/broken")
        await fall_asleep(edge)
        assert code(await edge.request_images(prompt="p kumquatfen", model="broken")) == (422, "AdapterNotLoaded")
        held = asyncio.create_task(edge.request_images(prompt="p kumquatfen", model="stripes"))
        await edge.wait_held(1)
        edge.ranks.calling.set()
        assert (await held).status_code == 200


async def test_a_worker_that_starts_asleep_holds_a_request_for_an_adapter_that_is_still_to_come(tmp_path: Path) -> None:
    sources = [{"name": f"a{number}", "source": {"huggingFace": {"repo": f"org/a{number}"}}} for number in range(6)]
    settings = {"desired_path": write_desired(tmp_path, "OnIdle", adapters=sources), "state_dir": str(tmp_path / "state"), "max_loras": 8}
    async with serving_edge(**settings) as edge:
        await fall_asleep(edge)
    edge = Edge(FakeRankGroup(), **settings)
    edge.fetcher.arriving.clear()
    starting = asyncio.create_task(edge.engine.start())
    await edge.wait_state(state="asleep")
    edge.ranks.calling.clear()
    held = asyncio.create_task(edge.request_images(prompt="p kumquatfen", model="a5"))
    await edge.wait_held(1)
    edge.fetcher.arriving.set()
    edge.ranks.calling.set()
    assert (await held).status_code == 200
    await starting
    await edge.engine.terminate()


# All at once


@pytest.mark.parametrize("seed", [1, 2])
async def test_bursts_of_requests_beside_sleeps_and_losses_of_the_ranks_are_all_served(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with serving_edge(desired_path=write_desired(tmp_path, "OnIdle"), max_batch_size=2) as edge:
        asked: dict[int, asyncio.Task[httpx2.Response]] = {}
        losses = 0
        for number in range(80):
            match rng.choice(["ask", "ask", "ask", "leave", "sleep", "turn", "lose"]):
                case "ask":
                    asked[number] = asyncio.create_task(edge.request_images(prompt="p kumquatfen", seed=number, num_inference_steps=2))
                case "leave" if asked:
                    rng.choice(list(asked.values())).cancel()
                case "sleep":
                    await edge.operate("sleep")
                case "lose" if losses < 2:
                    losses += 1
                    edge.ranks.lose(KILLED)
            for _ in range(rng.choice([0, 1, 10, 100])):
                await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait(asked.values())
        kept = {number: task.result() for number, task in asked.items() if not task.cancelled()}
        assert {answer.status_code for answer in kept.values()} == {200}
        for number, answer in kept.items():
            expected = fake_pixels(RequestSpec(request_id="", prompt="p kumquatfen", seed=number, steps=2))
            assert decode_image(answer.json()["data"][0]["b64_json"]).tobytes() == expected
        document = await edge.state()
        assert (document["held"]["current"], document["inFlight"], document["queued"]) == (0, 0, 0)
        assert edge.engine.operations_done.durations["sleep"].total_s > 0 and edge.engine.held.outcomes["served"] > 0
