# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI documents of both ports say what the ports do."""

from collections.abc import AsyncIterator

import pytest

from diffusion_worker.messages import RequestSpec
from server_edge import Edge, serving_edge


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(ranks=2) as edge:
        yield edge


async def test_the_data_ports_document_has_its_routes_and_the_error_body(edge: Edge) -> None:
    document = (await edge.data.get("/openapi.json")).json()
    assert sorted(document["paths"]) == [
        "/healthz",
        "/metrics",
        "/readyz",
        "/v1/images/edits",
        "/v1/images/generations",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/requests/{request_id}",
    ]
    body = document["components"]["schemas"]["ImagesRequest"]
    assert (body["required"], body["additionalProperties"]) == (["prompt"], False)
    assert set(body["properties"]) >= {"prompt", "model", "n", "size", "seed", "num_inference_steps", "guidance_scale", "response_format"}
    error = document["components"]["schemas"]["ErrorBody"]
    assert sorted(error["properties"]) == ["code", "details", "message", "retryAfterSeconds", "retryable"]
    answers = document["paths"]["/v1/images/generations"]["post"]["responses"]
    assert answers["default"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


async def test_the_control_ports_document_has_its_routes_in_camel_case(edge: Edge) -> None:
    document = (await edge.control.get("/openapi.json")).json()
    assert sorted(document["paths"]) == ["/v1/adapters/{name}", "/v1/profile", "/v1/sleep", "/v1/state", "/v1/wake"]
    schemas = document["components"]["schemas"]
    assert set(schemas["SleepBody"]["properties"]) == {"operationId", "bootId", "level", "mode", "deadlineSeconds"}
    assert schemas["AdapterBody"]["additionalProperties"] is False
    parameters = document["paths"]["/v1/adapters/{name}"]["delete"]["parameters"]
    assert [parameter["name"] for parameter in parameters] == ["name", "operationId", "bootId", "drainSeconds"]


async def test_the_wrong_answer_of_the_framework_itself_is_nowhere_in_the_documents(edge: Edge) -> None:
    for client in (edge.data, edge.control):
        text = (await client.get("/openapi.json")).text
        assert "HTTPValidationError" not in text and '"422"' not in text


async def test_there_are_no_pages_that_load_scripts_from_elsewhere(edge: Edge) -> None:
    for path in ("/docs", "/redoc"):
        assert (await edge.data.get(path)).status_code == 404


def test_a_spec_of_the_wire_has_the_fields_that_a_request_may_set() -> None:
    wanted = {"prompt", "negative_prompt", "seed", "height", "width", "steps", "guidance_scale", "lora"}
    assert wanted < set(RequestSpec.__struct_fields__)
