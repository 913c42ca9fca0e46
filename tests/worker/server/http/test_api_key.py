# SPDX-License-Identifier: Apache-2.0
"""The API key of the data port: the routes that need it, its replacement, and the routes that stay open."""

from pathlib import Path

import pytest

from diffusion_worker.errors import ConfigError
from support.worker.server_edge import serving_edge

GUARDED = [
    ("POST", "/v1/images/generations"),
    ("DELETE", "/v1/requests/x"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/digits"),
    ("GET", "/v1/nothing"),
]
OPEN = ["/healthz", "/readyz", "/metrics", "/openapi.json"]


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("sk-right\n")
    return path


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer sk-right2", "Basic sk-right", "sk-right"])
async def test_the_api_is_closed_without_the_key_and_says_so(key_path: Path, header: str | None) -> None:
    async with serving_edge(api_key_path=str(key_path)) as edge:
        for method, path in GUARDED:
            headers = {} if header is None else {"authorization": header}
            answer = await edge.data.request(method, path, headers=headers, content=b"not even JSON")
            assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["retryable"]) == (401, "Unauthorized", False)
            assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
            assert "the API key" in answer.json()["error"]["message"] and "sk-right" not in answer.text
        assert 'code="Unauthorized"' in (await edge.data.get("/metrics")).text


async def test_the_right_key_opens_the_api(key_path: Path) -> None:
    async with serving_edge(api_key_path=str(key_path)) as edge:
        edge.data.headers["authorization"] = "Bearer sk-right"
        assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200
        assert (await edge.data.get("/v1/models")).status_code == 200
        assert (await edge.data.get("/v1/nothing")).status_code == 404


@pytest.mark.parametrize("path", OPEN)
async def test_probes_metrics_and_the_apis_description_need_no_key(key_path: Path, path: str) -> None:
    async with serving_edge(api_key_path=str(key_path)) as edge:
        assert (await edge.data.get(path)).status_code == 200


async def test_a_changed_key_counts_from_the_next_request_without_a_restart(key_path: Path) -> None:
    async with serving_edge(api_key_path=str(key_path)) as edge:

        async def status(key: str) -> int:
            return (await edge.data.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

        assert await status("sk-right") == 200
        replacement = key_path.with_name("new")
        replacement.write_text("sk-other")
        replacement.rename(key_path)
        assert (await status("sk-right"), await status("sk-other")) == (401, 200)


async def test_the_control_port_has_nothing_to_do_with_the_key(key_path: Path) -> None:
    async with serving_edge(api_key_path=str(key_path)) as edge:
        assert (await edge.control.get("/v1/state")).status_code == 200


async def test_the_apis_description_says_that_it_wants_a_key_where_it_does(key_path: Path) -> None:
    for key, wanted in ((str(key_path), [{"HTTPBearer": []}]), (None, None)):
        async with serving_edge(api_key_path=key) as edge:
            document = (await edge.data.get("/openapi.json")).json()
        assert document["paths"]["/v1/images/generations"]["post"].get("security") == wanted
        assert "security" not in document["paths"]["/healthz"]["get"]


@pytest.fixture(params=[None, "", " \n"])
def keyless_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Provide the path of a file that does not exist or has no key in it."""
    path = tmp_path / "keyless"
    if request.param is not None:
        path.write_text(request.param)
    return path


async def test_a_file_without_a_key_is_an_error_at_start_that_names_the_option(keyless_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file .*keyless"):
        async with serving_edge(api_key_path=str(keyless_path)):
            pass
