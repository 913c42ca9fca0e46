# SPDX-License-Identifier: Apache-2.0
"""Adapters in requests for images, over a fake rank group: every form of the reference's object, and every invalid one."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from diffusion_worker.config import OnMissing
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport, LoRAUse, Recipe, RequestSpec
from support.worker.fake_rank_group import fake_digest, fake_identity, fake_pixels
from support.worker.process import decode_image
from support.worker.server_edge import Edge, serving_edge

STRIPES, FRAME = "/loras/stripes", "/loras/frame"
REQUEST = {"prompt": "p kumquatfen", "seed": 7}


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge() as edge:
        await edge.put_adapter("stripes", STRIPES, scale=0.5)
        await edge.put_adapter("frame", FRAME)
        yield edge


def pixels(*adapters: tuple[str, float]) -> bytes:
    """Return the image that the fake ranks make with adapters from these paths at these scales."""
    uses = [LoRAUse(index, scale) for index, (_, scale) in enumerate(adapters)]
    spec = RequestSpec(request_id="", prompt="p kumquatfen", seed=7, loras=uses)
    return fake_pixels(spec, " + ".join(path for path, _ in adapters) or None)


async def image(edge: Edge, **body: Any) -> tuple[bytes, list[dict[str, Any]]]:
    """Make a single image from REQUEST as overridden by `body`, which must succeed; return its pixels and `provenance.adapters`."""
    answer = await edge.request_images(**{**REQUEST, **body})
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["data"]
    return decode_image(item["b64_json"]).tobytes(), item["provenance"]["adapters"]


def refusal(answer: httpx2.Response) -> tuple[int, str, str | None]:
    problem = answer.json()["error"]
    return answer.status_code, problem["code"], problem["param"]


@pytest.mark.parametrize(
    "asked",
    [
        {"name": "stripes", "scale": 0.25},
        {"lora_name": "stripes", "lora_scale": 0.25},
        {"adapter": "stripes", "scale": 0.25, "int_id": 7},
        {"name": "stripes", "scale": 0.25, "lora_int_id": 1},
        {"name": "stripes", "scale": 0.25, "path": STRIPES},
        {"name": "stripes", "scale": 0.25, "local_path": STRIPES + "/"},
        {"name": "stripes", "scale": 0.25, "lora_path": "/loras/./stripes"},
        {"name": "stripes", "scale": 0.25, "lora_local_path": STRIPES, "path": None},
        [{"name": "stripes", "scale": 0.25}],
    ],
)
async def test_every_form_of_the_references_object_asks_for_the_adapter(edge: Edge, asked: Any) -> None:
    made, adapters = await image(edge, lora=asked)
    assert made == pixels((STRIPES, 0.25))
    assert adapters == [{"name": "stripes", "digest": fake_digest(STRIPES), "scale": 0.25, "identity": fake_identity(STRIPES)}]


@pytest.mark.parametrize(
    ("body", "uses"),
    [
        ({"lora": {"name": "stripes"}}, [(STRIPES, 0.5)]),
        ({"lora": {"name": "stripes"}, "lora_scale": 2}, [(STRIPES, 2.0)]),
        ({"model": "stripes", "lora_scale": 2}, [(STRIPES, 2.0)]),
        ({"lora": [{"name": "stripes", "scale": 0.75}, {"name": "frame", "scale": -1}]}, [(STRIPES, 0.75), (FRAME, -1.0)]),
        ({"lora": [{"name": "frame"}, {"name": "stripes"}]}, [(FRAME, 1.0), (STRIPES, 0.5)]),
        ({"model": "stripes", "lora": {"name": "frame", "scale": 0.3}}, [(STRIPES, 0.5), (FRAME, 0.3)]),
        ({"lora": [{"name": "stripes"}, {"name": "frame", "scale": 0.3}], "lora_scale": 2}, [(STRIPES, 2.0), (FRAME, 0.3)]),
        ({"model": "digits", "lora": {"name": "frame"}}, [(FRAME, 1.0)]),
        ({"lora": []}, []),
        ({"lora": None}, []),
    ],
)
async def test_a_request_may_have_several_adapters_each_with_its_strength(
    edge: Edge, body: dict[str, Any], uses: list[tuple[str, float]]
) -> None:
    made, adapters = await image(edge, **body)
    assert made == pixels(*uses)
    assert [(adapter["digest"], adapter["scale"]) for adapter in adapters] == [(fake_digest(path), scale) for path, scale in uses]


WRONG: list[tuple[Any, str]] = [
    ("stripes", "lora"),
    (7, "lora"),
    (["stripes"], "lora[0]"),
    ([[{"name": "stripes"}]], "lora[0]"),
    ({}, "lora[0].name"),
    ({"path": STRIPES}, "lora[0].name"),
    ([{"name": "stripes"}, {"scale": 1}], "lora[1].name"),
    ([{"name": "stripes"}, {"name": "frame", "scale": "1"}], "lora[1].scale"),
    ({"name": "stripes", "scale": 4.5}, "lora[0].scale"),
    ({"name": "stripes", "scale": True}, "lora[0].scale"),
    ({"name": 7}, "lora[0].name"),
    ({"name": ""}, "lora[0].name"),
    ({"name": "stripes", "lora_name": "stripes"}, "lora[0].lora_name"),
    ({"name": "stripes", "scale": 1, "lora_scale": 1}, "lora[0].lora_scale"),
    ({"name": "stripes", "path": STRIPES, "lora_path": STRIPES}, "lora[0].lora_path"),
    ({"name": "stripes", "int_id": 0}, "lora[0].int_id"),
    ({"name": "stripes", "int_id": 1.5}, "lora[0].int_id"),
    ({"name": "stripes", "int_id": 1, "lora_int_id": 1}, "lora[0].lora_int_id"),
    ({"name": "stripes", "weight": 1}, "lora[0].weight"),
    ({"name": "stripes", "path": "/etc/passwd"}, "lora[0].path"),
    ([{"name": "frame"}, {"name": "stripes", "lora_path": FRAME}], "lora[1].path"),
    ({"name": "stripes", "path": "s3://bucket/key"}, "lora[0].path"),
    ([{"name": "stripes"}] * 2, "lora"),
    ([{"name": f"a{number}"} for number in range(5)], "lora"),
    ([{"name": f"a{number}"} for number in range(65)], "lora"),
]


async def test_a_wrong_form_is_refused_with_the_place_of_what_is_wrong(edge: Edge) -> None:
    calls = list(edge.ranks.calls)
    for lora, field in WRONG:
        answer = await edge.request_images(**REQUEST, lora=lora)
        assert refusal(answer) == (400, "InvalidRequest", field), f"{lora}: {answer.text}"
    assert edge.ranks.calls == calls


async def test_a_path_that_is_not_the_adapters_own_is_refused_without_naming_that_and_nothing_is_read(edge: Edge) -> None:
    answer = await edge.request_images(**REQUEST, lora={"name": "stripes", "path": "/etc/shadow"})
    assert answer.json()["error"]["message"] == ("lora[0].path: expected none, or the source of adapter 'stripes', found '/etc/shadow'")
    assert edge.ranks.calls.count("add_lora") == 2


@pytest.mark.parametrize(
    "body",
    [
        {"lora_scale": 0.5},
        {"lora": {"name": "stripes", "scale": 1}, "lora_scale": 0.5},
        {"lora": [{"name": "stripes"}, {"name": "frame"}], "lora_scale": 0.5},
        {"model": "stripes", "lora": {"name": "frame"}, "lora_scale": 0.5},
    ],
)
async def test_a_lora_scale_that_is_not_for_exactly_one_adapter_is_refused(edge: Edge, body: dict[str, Any]) -> None:
    assert refusal(await edge.request_images(**REQUEST, **body)) == (400, "InvalidRequest", "lora_scale")


@pytest.mark.parametrize("body", [{"lora": {"name": "nobody"}}, {"lora": [{"name": "stripes"}, {"name": "nobody", "path": "/x"}]}])
async def test_an_unknown_adapter_is_not_found_never_the_base(edge: Edge, body: dict[str, Any]) -> None:
    answer = await edge.request_images(**REQUEST, **body)
    assert refusal(answer)[:2] == (404, "model_not_found")
    assert "'nobody'" in answer.json()["error"]["message"]


async def test_an_adapter_that_failed_to_load_is_not_loaded_never_the_base(edge: Edge) -> None:
    edge.ranks.adapter_errors["/loras/broken"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "no config")
    await edge.put_adapter("broken", "/loras/broken")
    for body in ({"lora": {"name": "broken"}}, {"model": "broken"}, {"lora": [{"name": "stripes"}, {"name": "broken"}]}):
        answer = await edge.request_images(**REQUEST, **body)
        assert refusal(answer)[:2] == (422, "AdapterNotLoaded")
        answer = await edge.request_images(**REQUEST, **body, stream=True)
        assert refusal(answer)[:2] == (422, "AdapterNotLoaded")


# An adapter that was evicted, or is loaded on demand


async def evicted(edge: Edge, **body: Any) -> None:
    """Put the adapter `old` and two newer ones, and wait until `old` is in no rank's memory but still cached on the disk."""
    await edge.put_adapter("old", "/loras/old", **body)
    for name in ("newer", "newest"):
        await edge.put_adapter(name, f"/loras/{name}")

    async def gone() -> bool:
        return {each["name"]: each["state"] for each in (await edge.state())["adapters"]}["old"] == "Cached"

    await edge.wait_for(gone)


async def test_an_evicted_adapter_is_refused_for_now_and_not_listed() -> None:
    async with serving_edge(max_cached_loras=2, max_loras=2) as edge:
        await evicted(edge)
        answer = await edge.request_images(**REQUEST, lora={"name": "old"})
        assert refusal(answer)[:2] == (503, "AdapterNotLoaded") and int(answer.headers["retry-after"]) >= 1
        assert [card["id"] for card in (await edge.data.get("/v1/models")).json()["data"]] == ["digits", "newer", "newest"]
        assert refusal(await edge.data.get("/v1/models/old"))[:2] == (503, "AdapterNotLoaded")


async def test_an_evicted_adapter_is_loaded_for_its_request_where_the_worker_may() -> None:
    async with serving_edge(max_cached_loras=2, max_loras=2, lora_on_missing=OnMissing.LOAD) as edge:
        await evicted(edge)
        listed = {card["id"]: card["state"] for card in (await edge.data.get("/v1/models")).json()["data"]}
        assert listed["old"] == "Cached" == (await edge.data.get("/v1/models/old")).json()["state"]
        made, adapters = await image(edge, lora={"name": "old"})
        assert made == pixels(("/loras/old", 1.0)) and adapters[0]["digest"] == fake_digest("/loras/old")


async def test_an_adapter_on_demand_is_listed_and_loaded_by_its_first_request(edge: Edge) -> None:
    answer = await edge.put_adapter("rare", "/loras/rare", residency="OnDemand")
    assert (answer.status_code, answer.json()["state"]) == (200, "Cached")
    assert (await edge.data.get("/v1/models/rare")).json()["state"] == "Cached"
    assert (await image(edge, model="rare"))[0] == pixels(("/loras/rare", 1.0))
    assert (await edge.data.get("/v1/models/rare")).json()["state"] == "Loaded"


async def test_a_client_that_goes_away_while_its_adapter_loads_frees_its_place(edge: Edge) -> None:
    await edge.put_adapter("rare", "/loras/rare", residency="OnDemand")
    before = asyncio.all_tasks()
    edge.ranks.calling.clear()
    waiting = asyncio.create_task(edge.request_images(**REQUEST, model="rare"))

    async def loads() -> bool:
        return any(each["state"] == "Loading" for each in (await edge.state())["adapters"])

    await edge.wait_for(loads)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    edge.ranks.calling.set()
    await edge.wait_tasks(before)
    state = await edge.state()
    assert (state["inFlight"], state["queued"]) == (0, 0)
    assert all(each["refs"] == 0 for each in state["adapters"])


async def test_a_failed_load_ends_the_request_that_waits_for_it_with_the_reason(edge: Edge) -> None:
    edge.ranks.adapter_errors["/loras/rare"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "layer x has no such tensor")
    await edge.put_adapter("rare", "/loras/rare", residency="OnDemand")
    answer = await edge.request_images(**REQUEST, model="rare")
    assert refusal(answer)[:2] == (422, "AdapterNotLoaded")
    assert "layer x has no such tensor" in answer.json()["error"]["message"]


# Cards and provenance of adapters


async def test_a_card_of_an_adapter_says_its_state_its_strength_its_rank_and_its_content(edge: Edge) -> None:
    card = (await edge.data.get("/v1/models/stripes")).json()
    wanted = {
        "state": "Loaded",
        "scale": 0.5,
        "rank": 8,
        "digest": fake_digest(STRIPES),
        "identity": fake_identity(STRIPES),
        "parent": "digits",
    }
    assert {name: card[name] for name in wanted} == wanted
    assert "recipe" not in card and card["limits"]["max_adapters"] == 4
    base = (await edge.data.get("/v1/models/digits")).json()
    assert base["state"] == "ready" and not {"scale", "rank", "parent"} & set(base)


RECIPE = Recipe(steps=3, guidance_scale=1.0, sigmas=[1.0, 0.7, 0.3], shift=3.0)


async def test_a_recipe_is_what_a_request_gets_and_what_its_image_says(edge: Edge) -> None:
    edge.ranks.adapter_recipes["/loras/fast"] = RECIPE
    await edge.put_adapter("fast", "/loras/fast")
    card = (await edge.data.get("/v1/models/fast")).json()
    assert card["recipe"] == {"num_inference_steps": 3, "guidance_scale": 1.0, "sigmas": [1.0, 0.7, 0.3], "shift": 3.0}
    assert (card["defaults"]["num_inference_steps"], card["defaults"]["guidance_scale"]) == (3, 1.0)
    answer = await edge.request_images(**REQUEST, lora=[{"name": "fast"}, {"name": "stripes"}])
    made = answer.json()["data"][0]
    assert {name: made["provenance"][name] for name in ("steps", "guidance_scale", "sigmas", "shift")} == {
        "steps": 3,
        "guidance_scale": 1.0,
        "sigmas": [1.0, 0.7, 0.3],
        "shift": 3.0,
    }
    # The image's file has the same provenance.
    assert json.loads(decode_image(made["b64_json"]).info["provenance"]) == made["provenance"]


@pytest.mark.parametrize(("field", "value"), [("num_inference_steps", 4), ("guidance_scale", 2.0)])
async def test_a_request_that_contradicts_a_recipe_is_refused_by_name(edge: Edge, field: str, value: float) -> None:
    edge.ranks.adapter_recipes["/loras/fast"] = RECIPE
    await edge.put_adapter("fast", "/loras/fast")
    answer = await edge.request_images(**REQUEST, model="fast", **{field: value})
    assert refusal(answer) == (400, "InvalidRequest", field) and "'fast'" in answer.json()["error"]["message"]


async def test_a_model_that_a_request_would_not_get_is_the_same_error(edge: Edge) -> None:
    edge.ranks.adapter_errors["/loras/broken"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "no config")
    await edge.put_adapter("broken", "/loras/broken")
    for name in ("nobody", "broken"):
        card, made = await edge.data.get(f"/v1/models/{name}"), await edge.request_images(**REQUEST, model=name)
        assert (card.status_code, card.json()) == (made.status_code, made.json())
