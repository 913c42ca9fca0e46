# SPDX-License-Identifier: Apache-2.0
"""vLLM's routes for adapters on the control port, and all fields of a put, over a fake rank group."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from diffusion_worker.engine.state.state_document import AdapterCall, Residency
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport
from diffusion_worker.server.schemas.control import AdapterBody
from diffusion_worker.sources.source import Source
from support.worker.fake_rank_group import fake_digest
from support.worker.server_edge import Edge, serving_edge

STRIPES = "/loras/stripes"


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge() as edge:
        yield edge


async def load(edge: Edge, **body: Any) -> httpx2.Response:
    return await edge.control.post("/v1/load_lora_adapter", json=body)


async def unload(edge: Edge, **body: Any) -> httpx2.Response:
    return await edge.control.post("/v1/unload_lora_adapter", json=body)


def problem(answer: httpx2.Response) -> tuple[int, str, str | None]:
    told = answer.json()
    return answer.status_code, told["code"], told["details"].get("field")


async def test_a_name_that_is_there_already_is_refused_unless_loaded_in_place(edge: Edge) -> None:
    await load(edge, lora_name="stripes", lora_path=STRIPES)
    assert problem(await load(edge, lora_name="stripes", lora_path="/loras/other")) == (400, "InvalidRequest", "lora_name")
    assert (await edge.state())["adapters"][0]["digest"] == fake_digest(STRIPES)
    assert (await load(edge, lora_name="stripes", lora_path="/loras/other", load_inplace=True)).status_code == 200
    assert (await edge.data.get("/v1/models/stripes")).json()["digest"] == fake_digest("/loras/other")


async def test_an_unknown_adapter_cannot_be_unloaded(edge: Edge) -> None:
    assert problem(await unload(edge, lora_name="nobody"))[:2] == (404, "NotFound")


async def test_a_load_that_fails_has_the_code_and_words_of_a_put(edge: Edge) -> None:
    edge.ranks.adapter_errors["/loras/broken"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "no adapter_config.json")
    answer = await load(edge, lora_name="broken", lora_path="/loras/broken")
    assert problem(answer)[:2] == (400, "InvalidAdapter") and "no adapter_config.json" in answer.json()["message"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lora_path": "/x"}, "lora_name"),
    ({"lora_name": "stripes"}, "lora_path"),
    ({"lora_name": "Stripes", "lora_path": "/x"}, "lora_name"),
    ({"lora_name": "stripes", "lora_path": ""}, "lora_path"),
    ({"lora_name": "stripes", "lora_path": "ftp://host/x"}, "lora_path"),
    ({"lora_name": "stripes", "lora_path": "{}"}, "lora_path"),
    ({"lora_name": "stripes", "lora_path": "/x", "load_inplace": "yes"}, "load_inplace"),
    ({"lora_name": "stripes", "lora_path": "/x", "base_model_name": "digits"}, "base_model_name"),
]


async def test_a_wrong_field_of_a_load_is_refused_by_name(edge: Edge) -> None:
    for body, field in WRONG:
        assert problem(await load(edge, **body)) == (400, "InvalidRequest", field), body
    assert edge.ranks.calls == []


async def test_where_the_operator_says_which_adapters_there_are_both_routes_are_refused_and_a_put_is_not(tmp_path: Path) -> None:
    desired = tmp_path / "desired.json"
    desired.write_text("{}")
    async with serving_edge(desired_path=str(desired)) as edge:
        for answer in (await load(edge, lora_name="stripes", lora_path=STRIPES), await unload(edge, lora_name="stripes")):
            assert problem(answer)[:2] == (409, "Managed") and not answer.json()["retryable"]
        assert edge.ranks.calls == []
        assert (await edge.put_adapter("stripes", STRIPES)).status_code == 200


# All fields of a put

SOURCES: list[dict[str, Any]] = [
    {"path": STRIPES},
    {"huggingFace": {"repo": "org/name"}},
    {
        "huggingFace": {
            "repo": "org/name",
            "revision": "0" * 40,
            "file": "a/b.safetensors",
            "tokenSecretRef": {"name": "hub", "key": "token"},
        }
    },
    {"huggingFace": {"repo": "org/name", "subfolder": "lora", "allowPatterns": ["*.json"]}},
    {"s3": {"uri": "s3://bucket/key", "endpoint": "https://s3.host", "region": "eu-1", "credentialsSecretRef": {"name": "store"}}},
    {"pvc": {"claimName": "models", "path": "loras/stripes"}},
    {"http": {"url": "https://host/stripes.safetensors", "sha256": "0" * 64}},
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: next(iter(source)))
def test_every_kind_of_source_reaches_the_engine_as_it_is_written_everywhere(source: dict[str, Any]) -> None:
    call = AdapterBody.model_validate({"operationId": "1", "source": source}).call()
    assert call.source == msgspec.convert(source, Source)


def test_everything_that_a_put_says_reaches_the_engine() -> None:
    told = {
        "operationId": "1",
        "bootId": "2",
        "deadlineSeconds": 3.0,
        "source": {"path": STRIPES},
        "digest": "sha256:" + "0" * 64,
        "identity": "v1:" + "0" * 64,
        "scale": 0.5,
        "components": ["transformer", "text_encoder_2"],
        "format": "kohya",
        "expectedRank": 16,
        "residency": "Resident",
        "priority": -3,
    }
    call = AdapterBody.model_validate(told).call()
    assert call == msgspec.convert(told, AdapterCall) and call.residency is Residency.RESIDENT
    # The last two are set by the routes: by the call's token, and for `load_inplace`.
    assert set(told) | {"publicOnly", "readAgain"} == {field.encode_name for field in msgspec.structs.fields(AdapterCall)}
