# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI documents of both ports agree with the ports."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from diffusion_worker.messages import RequestSpec
from support.worker.server_edge import Edge, serving_edge

PAGE = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(ranks=2) as edge:
        yield edge


async def test_the_data_ports_document_has_its_routes_and_the_error_body(edge: Edge) -> None:
    document = (await edge.data.get("/openapi.json")).json()
    assert sorted(document["paths"]) == [
        "/health",
        "/healthz",
        "/metrics",
        "/readyz",
        "/v1/images/edits",
        "/v1/images/generations",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/requests/{request_id}",
        "/v1/status",
    ]
    body = document["components"]["schemas"]["ImagesRequest"]
    assert (body["required"], body["additionalProperties"]) == (["prompt"], False)
    assert set(body["properties"]) >= {"prompt", "model", "n", "size", "seed", "num_inference_steps", "guidance_scale", "response_format"}
    error = document["components"]["schemas"]["ErrorObject"]
    assert list(error["properties"]) == ["message", "type", "param", "code", "retryable", "retry_after_seconds", "details"]
    for route in ("generations", "edits"):
        answers = document["paths"][f"/v1/images/{route}"]["post"]["responses"]
        assert answers["default"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorEnvelope"}
        forms = {"application/json", "text/event-stream", "image/png", "image/jpeg", "image/webp", "application/zip"}
        assert set(answers["200"]["content"]) == forms


async def test_the_page_of_the_http_api_has_every_route_and_every_field(edge: Edge) -> None:
    document = (await edge.data.get("/openapi.json")).json()
    routes = [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
    forms = [form["schema"] for form in document["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"].values()]
    cards = [document["components"]["schemas"][name] for name in ("ImagesRequest", "ModelCard", "LimitsCard", "DefaultsCard", "ImageData")]
    fields = {field for schema in (*forms, *cards) for field in schema["properties"]} - {"id", "object", "created", "owned_by"}
    assert [what for what in (*routes, *sorted(fields)) if f"`{what}" not in PAGE] == []


async def test_the_page_has_every_route_of_the_control_port_and_every_field_of_sleep_and_wake(edge: Edge) -> None:
    document = (await edge.control.get("/openapi.json")).json()
    routes = [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
    bodies = [document["components"]["schemas"][name] for name in ("SleepBody", "WakeBody", "PauseBody", "OmniSleepBody", "AckAnswer")]
    fields = {field for schema in bodies for field in schema["properties"]}
    assert [what for what in (*routes, *sorted(fields)) if f"`{what}" not in PAGE and f'"{what}"' not in PAGE] == []


@pytest.mark.parametrize("port", ["data", "control"])
async def test_head_is_answered_as_get_and_a_slash_at_the_end_changes_nothing(edge: Edge, port: str) -> None:
    client: httpx2.AsyncClient = getattr(edge, port)
    document = (await client.get("/openapi.json")).json()
    paths = [path.format(model="digits") for path, methods in document["paths"].items() if "get" in methods] + ["/openapi.json"]
    assert len(paths) > 2
    for path in paths:
        got, head, slashed = await client.get(path), await client.head(path), await client.get(path + "/")
        assert (head.status_code, head.headers["content-type"], head.content) == (200, got.headers["content-type"], b""), path
        assert (slashed.status_code, slashed.headers["content-type"]) == (200, got.headers["content-type"]), path
        assert "HEAD" in (await client.patch(path)).headers["allow"]


async def test_a_slash_at_the_end_changes_nothing_for_what_makes_images_or_changes_the_worker(edge: Edge) -> None:
    made = await edge.data.post("/v1/images/generations/", json={"prompt": "p kumquatfen"})
    slept = await edge.control.post("/v1/sleep/", json={"operationId": "1"})
    assert (made.status_code, slept.status_code) == (200, 202)
    assert 'requests_total{code="OK",route="generations"} 1.0' in (await edge.data.get("/metrics")).text


async def test_allow_names_every_method_of_a_path(edge: Edge) -> None:
    for method, path, allowed in (("POST", "/v1/adapters/stripes", "PUT, DELETE"), ("PUT", "/v1/state", "GET, HEAD")):
        answer = await edge.control.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


async def test_the_control_ports_document_has_its_routes_in_camel_case(edge: Edge) -> None:
    document = (await edge.control.get("/openapi.json")).json()
    assert sorted(document["paths"]) == [
        "/is_sleeping",
        "/sleep",
        "/v1/adapters/{name}",
        "/v1/drain",
        "/v1/load_lora_adapter",
        "/v1/omni/sleep",
        "/v1/omni/wakeup",
        "/v1/pause",
        "/v1/probe",
        "/v1/profile",
        "/v1/resume",
        "/v1/sleep",
        "/v1/state",
        "/v1/unload_lora_adapter",
        "/v1/wake",
        "/wake_up",
    ]
    schemas = document["components"]["schemas"]
    error = {"$ref": "#/components/schemas/ErrorBody"}
    routes = [route for methods in document["paths"].values() for route in methods.values()]
    assert [list(route["responses"]["default"]["content"].items()) for route in routes] == [[("application/json", {"schema": error})]] * 17
    assert list(document["paths"]["/v1/load_lora_adapter"]["post"]["responses"]["200"]["content"]) == ["text/plain"]
    assert set(schemas["SleepBody"]["properties"]) == {
        "operationId",
        "bootId",
        "level",
        "mode",
        "deadlineSeconds",
        "ifIdleSince",
        "policy",
    }
    assert set(schemas["WakeBody"]["properties"]) == {"operationId", "bootId", "deadlineSeconds", "tags", "policy"}
    assert schemas["AdapterBody"]["additionalProperties"] is False
    for path in ("/sleep", "/wake_up"):
        assert "content" not in document["paths"][path]["post"]["responses"]["200"]
    query = {parameter["name"]: parameter["schema"] for parameter in document["paths"]["/sleep"]["post"]["parameters"]}
    assert (query["level"]["default"], query["mode"]["default"]) == (1, "abort")
    parameters = document["paths"]["/v1/adapters/{name}"]["delete"]["parameters"]
    assert [parameter["name"] for parameter in parameters] == ["name", "operationId", "bootId", "drainSeconds", "X-Operator-Epoch"]


async def test_the_wrong_answer_of_the_framework_itself_is_nowhere_in_the_documents(edge: Edge) -> None:
    for client in (edge.data, edge.control):
        text = (await client.get("/openapi.json")).text
        assert "HTTPValidationError" not in text and '"422"' not in text


async def test_there_are_no_pages_that_load_scripts_from_elsewhere(edge: Edge) -> None:
    for path in ("/docs", "/redoc"):
        assert (await edge.data.get(path)).status_code == 404


def test_a_spec_of_the_wire_has_the_fields_that_a_request_may_set() -> None:
    wanted = {"prompt", "negative_prompt", "seed", "height", "width", "steps", "guidance_scale", "loras"}
    assert wanted < set(RequestSpec.__struct_fields__)
