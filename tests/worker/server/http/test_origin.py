# SPDX-License-Identifier: Apache-2.0
"""Pages of other origins change nothing on either port, and no name that resolves to loopback reaches a worker without a key."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.worker.server_edge import Edge, code, serving_edge

APP = "https://app.example"
REBOUND = "attacker.example:8000"


async def ask(edge: Edge, method: str, path: str, **headers: str) -> httpx2.Response:
    """Send a request to the data port, and return the answer. A POST has a JSON body that asks for an image in one step.

    In the name of a header `_` stands for `-`.
    """
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    body: dict[str, Any] = {"json": {"prompt": "p kumquatfen", "num_inference_steps": 1}} if method == "POST" else {}
    return await edge.data.request(method, path, headers=names, **body)


async def generate(edge: Edge, **headers: str) -> httpx2.Response:
    return await ask(edge, "POST", "/v1/images/generations", **headers)


FOREIGN = [APP, "null", "http://worker:81", "http://worker.example", "garbage", "http://[", "http://w:x", "file://", ""]


@pytest.mark.parametrize("origin", FOREIGN)
async def test_another_origin_changes_nothing_on_the_data_port(origin: str) -> None:
    async with serving_edge() as edge:
        answer = await generate(edge, Origin=origin)
        assert code(answer) == (403, "Forbidden")
        assert "--cors-origin" in answer.json()["error"]["message"] and answer.headers["x-should-retry"] == "false"
        assert code(await ask(edge, "DELETE", "/v1/requests/one", Origin=origin)) == (403, "Forbidden")
        # A page cannot read an answer without CORS headers, so a GET needs no refusal.
        answer = await ask(edge, "GET", "/v1/models", Origin=origin)
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("origin", "host"),
    [("http://worker", "worker"), ("https://i.example", "i.example"), ("https://i.example", "i.example:443"), ("http://w:8000", "W:8000")],
)
async def test_a_page_of_the_workers_own_host_may_ask_also_behind_tls(origin: str, host: str) -> None:
    async with serving_edge() as edge:
        assert (await generate(edge, Origin=origin, Host=host)).status_code == 200


@pytest.mark.parametrize("allowed", [[APP, "http://localhost:3000"], ["*"]])
async def test_an_allowed_origin_may_ask_and_read_also_with_a_key(allowed: list[str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    async with serving_edge(cors_origins=allowed, api_key_path=str(key)) as edge:
        wanted = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type"}
        preflight = await ask(edge, "OPTIONS", "/v1/images/generations", Origin=APP, **wanted)
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] in (APP, "*")
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        for token, status in (("secret", 200), ("wrong", 401)):
            answer = await generate(edge, Origin=APP, Authorization=f"Bearer {token}")
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] in (APP, "*")
            assert "X-Request-ID" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("host", [REBOUND, "", "127.0.0.1.attacker.example", "10.0.0.1", "localhost@attacker.example"])
async def test_a_name_that_leads_to_loopback_reaches_no_worker_without_a_key(host: str) -> None:
    async with serving_edge(local=True) as edge:
        assert code(await generate(edge, Host=host)) == (403, "Forbidden")
        for path in ("/v1/models", "/"):
            assert code(await ask(edge, "GET", path, Host=host)) == (403, "Forbidden")
        control = await edge.control.get("/v1/state", headers={"Host": host})
        assert (control.status_code, control.json()["code"]) == (403, "Forbidden")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "w.localhost", "[::1]:8000", "127.8.8.8", "app.example"])
async def test_a_loopback_host_and_that_of_an_allowed_origin_reach_it(host: str) -> None:
    async with serving_edge(local=True, cors_origins=[APP]) as edge:
        assert (await generate(edge, Host=host)).status_code == 200


async def test_a_key_or_another_interface_makes_every_host_good(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    async with serving_edge(local=True, api_key_path=str(key), token_path=key) as edge:
        assert (await generate(edge, Host=REBOUND, Authorization="Bearer secret")).status_code == 200
        state = await edge.control.get("/v1/state", headers={"Host": REBOUND, "Authorization": "Bearer secret"})
        assert state.status_code == 200
    async with serving_edge() as edge:
        assert (await generate(edge, Host="any.example")).status_code == 200


@pytest.mark.parametrize("origin", [APP, "null", "http://127.0.0.1:8000"])
async def test_no_page_sleeps_a_worker_without_a_token(origin: str) -> None:
    async with serving_edge(cors_origins=["*"]) as edge:
        for path in ("/sleep?level=1", "/v1/sleep", "/v1/pause", "/v1/load_lora_adapter"):
            answer = await edge.control.post(path, headers={"Origin": origin})
            assert (answer.status_code, answer.json()["code"]) == (403, "Forbidden"), path
        assert (await edge.state())["state"] == "ready"
        assert (await edge.control.post("/sleep?level=0", headers={"Origin": "http://127.0.0.1:8001"})).status_code == 200
