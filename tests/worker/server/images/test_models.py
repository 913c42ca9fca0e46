# SPDX-License-Identifier: Apache-2.0
"""The data port's reports of a worker that starts, serves, sleeps and dies, and of its models' abilities."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diffusion_worker.config import RequestDefaults, RequestLimits
from diffusion_worker.errors import ConfigError
from diffusion_worker.messages import ModelInfo, Task
from support.worker.fake_rank_group import FakeRankGroup, fake_digest
from support.worker.server_edge import Edge, serving_edge


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge() as edge:
        yield edge


async def card(edge: Edge, name: str = "digits") -> dict[str, Any]:
    answer = await edge.data.get(f"/v1/models/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def states(edge: Edge) -> list[str]:
    """Return the states whose gauge in `/metrics` is 1."""
    text = (await edge.data.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [sample.labels["state"] for sample in samples if sample.name == "diffusion_worker_state" and sample.value == 1]


async def told(edge: Edge) -> tuple[int, int, list[str], str]:
    """Return the statuses of `/healthz` and `/readyz`, the states by the metrics, and the state by the model's card.

    Asserts that `/health`, which clients of vLLM probe, has the status of `/readyz`.
    """
    alive, ready, health = [(await edge.data.get(path)).status_code for path in ("/healthz", "/readyz", "/health")]
    assert health == ready
    return alive, ready, await states(edge), (await card(edge))["state"]


async def test_health_readiness_models_and_metrics_are_right_starting_serving_asleep_and_dead() -> None:
    edge = Edge(FakeRankGroup(), max_restarts=0)
    edge.ranks.loading.clear()
    starting = asyncio.create_task(edge.engine.start())
    assert await told(edge) == (200, 503, ["starting"], "starting")
    edge.ranks.loading.set()
    await starting
    assert await told(edge) == (200, 200, ["ready"], "ready")
    await edge.operate("sleep")
    await edge.wait_state(state="asleep")
    assert await told(edge) == (200, 200, ["asleep"], "asleep")
    edge.ranks.lose("rank 0 was ended by SIGKILL")
    await edge.engine.run_until_failure()
    assert await told(edge) == (200, 503, ["failed"], "failed")
    await edge.engine.terminate()


async def test_a_card_lists_tasks_limits_and_defaults() -> None:
    limits = RequestLimits(max_images=2, max_steps=5, max_pixels=4096, max_prompt_chars=10)
    async with serving_edge(limits=limits, defaults=RequestDefaults(steps=3, guidance_scale=2.5, width=48, height=32)) as edge:
        found = await card(edge)
    assert (found["object"], found["id"], found["pipeline"], found["tasks"]) == ("model", "digits", "FakePipeline", [Task.GENERATE])
    assert found["limits"] == {
        "max_images": 2,
        "max_steps": 5,
        "max_pixels": 4096,
        "max_prompt_characters": 10,
        "max_partial_images": 3,
        "max_adapters": 4,
        "max_input_images": 0,
        "size_multiple": 8,
    }
    assert found["defaults"] == {"size": "48x32", "num_inference_steps": 3, "guidance_scale": 2.5}


async def test_a_model_of_several_names_is_listed_by_all_serves_by_all_and_answers_by_the_first() -> None:
    async with serving_edge(other_names=["openai/gpt-image-1", "other"]) as edge:
        listed = (await edge.data.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["digits", "openai/gpt-image-1", "other"]
        assert (await card(edge, "openai/gpt-image-1"))["pipeline"] == "FakePipeline"
        answer = await edge.request_images(prompt="a kumquatfen", model="openai/gpt-image-1")
        assert answer.json()["data"][0]["provenance"]["model"] == "digits"
        refused = await edge.put_adapter("other", "/a")
        assert (refused.status_code, refused.json()["code"]) == (409, "Conflict")


async def test_without_options_the_defaults_are_the_models_own(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await card(edge))["defaults"] == {}
    assert edge.engine.model is not None
    known = {"default_width": 64, "default_height": 48, "default_steps": 28, "default_guidance_scale": 4.0}
    monkeypatch.setattr(edge.engine._parts.requests, "model", msgspec.structs.replace(edge.engine.model, **known))
    assert (await card(edge))["defaults"] == {"size": "64x48", "num_inference_steps": 28, "guidance_scale": 4.0}


async def test_a_card_says_what_became_of_the_options_that_speed_the_model_up() -> None:
    edge = Edge(FakeRankGroup())
    edge.ranks.features = {"compile": "default"}
    await edge.engine.start()
    assert (await card(edge))["features"] == {"compile": "default"}
    await edge.engine.terminate()


async def test_a_default_size_that_the_model_cannot_make_is_an_error_at_start() -> None:
    edge = Edge(FakeRankGroup(), defaults=RequestDefaults(width=60, height=64))
    with pytest.raises(ConfigError, match=r"--default-size 60x64: size: expected width and height that are multiples of 8"):
        await edge.engine.start()
    await edge.engine.terminate()


OWN_SIZE = ModelInfo("P", "float32", size_multiple=8, weights_bytes=1, default_width=64, default_height=48)


async def test_a_model_whose_own_size_is_over_the_limit_does_not_start_without_a_default_size() -> None:
    group = FakeRankGroup()
    group.model = OWN_SIZE
    edge = Edge(group, limits=RequestLimits(max_pixels=64 * 48 - 1))
    says = r"--max-pixels: expected at least 3072, for the model's own default size 64x48, or a smaller --default-size, found 3071"
    with pytest.raises(ConfigError, match=says):
        await edge.engine.start()
    await edge.engine.terminate()


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (OWN_SIZE, {"limits": RequestLimits(max_pixels=64 * 48)}),
        (OWN_SIZE, {"limits": RequestLimits(max_pixels=4096 // 4), "defaults": RequestDefaults(width=32, height=32)}),
        (msgspec.structs.replace(OWN_SIZE, tasks=[Task.EDIT]), {"limits": RequestLimits(max_pixels=64)}),
    ],
    ids=["it is at the limit", "a smaller default is given", "edits take the size of their image"],
)
async def test_a_model_whose_own_size_nobody_gets_over_the_limit_starts(model: ModelInfo, settings: dict[str, Any]) -> None:
    async with serving_edge(model=model, **settings) as edge:
        assert (await card(edge))["state"] == "ready"


async def test_an_adapter_has_a_card_with_its_parent_and_its_content(edge: Edge) -> None:
    assert (await edge.data.get("/v1/models/stripes")).status_code == 404
    await edge.put_adapter("stripes", "/loras/stripes")
    found = await card(edge, "stripes")
    assert (found["parent"], found["digest"], found["tasks"]) == ("digits", fake_digest("/loras/stripes"), [Task.GENERATE])
    assert found["limits"] == (await card(edge))["limits"]
    listed = (await edge.data.get("/v1/models")).json()["data"]
    assert listed == [await card(edge), found]


async def test_a_model_that_is_not_here_is_not_found_by_name(edge: Edge) -> None:
    answer = await edge.data.get("/v1/models/nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "digits" in answer.json()["error"]["message"] and "'nobody'" in answer.json()["error"]["message"]


async def test_while_the_model_loads_its_card_says_only_what_is_known() -> None:
    edge = Edge(FakeRankGroup())
    found = await card(edge)
    assert not {"tasks", "pipeline", "features"} & set(found)
    assert "size_multiple" not in found["limits"] and found["limits"]["max_steps"] == 200
