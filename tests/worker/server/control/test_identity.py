# SPDX-License-Identifier: Apache-2.0
"""`GET /v1/identity`: a worker proves that it has the token, before it is sent one."""

import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest

from support.worker.server_edge import Edge, serving_edge

NONCE = "ab" * 32


@pytest.fixture
def token_path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("right\n")
    return path


def replace(path: Path, content: str) -> None:
    """Replace a file in one step, as Kubernetes does with a mounted Secret."""
    replacement = path.with_name("new")
    replacement.write_text(content)
    replacement.rename(path)


def take_away(path: Path) -> None:
    path.unlink()


async def ask(edge: Edge, **query: Any) -> Any:
    return await edge.control.get("/v1/identity", params={"nonce": NONCE} | query)


def proof(token: str, pod_uid: str) -> str:
    return hmac.new(token.encode(), f"diffusion-worker identity\n{NONCE}\nworker\n{pod_uid}".encode(), hashlib.sha256).hexdigest()


async def test_the_proof_is_over_nonce_address_and_uid_and_shows_no_token(token_path: Path) -> None:
    async with serving_edge(token_path=token_path, pod_uid="pod-7") as edge:
        answer = await ask(edge)
        assert (answer.status_code, answer.json()) == (200, {"podUid": "pod-7", "proof": proof("right", "pod-7")})
        assert "right" not in answer.text


async def test_after_a_rotation_the_proof_is_with_the_new_token(token_path: Path) -> None:
    async with serving_edge(token_path=token_path) as edge:
        replace(token_path, "another")
        assert (await ask(edge)).json() == {"podUid": "", "proof": proof("another", "")}
        take_away(token_path)
        refused = await ask(edge)
        assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (503, "Starting", True)


@pytest.mark.parametrize("nonce", ["", "short", "z" * 64, "a" * 200])
async def test_a_nonce_is_of_hexadecimal_digits(token_path: Path, nonce: str) -> None:
    async with serving_edge(token_path=token_path) as edge:
        answer = await ask(edge, nonce=nonce)
        assert (answer.status_code, answer.json()["details"]) == (400, {"field": "nonce"})


async def test_without_a_token_there_is_nothing_to_prove() -> None:
    async with serving_edge() as edge:
        assert (await ask(edge)).status_code == 404


async def test_every_answer_of_the_control_port_names_the_pod(token_path: Path) -> None:
    async with serving_edge(token_path=token_path, pod_uid="pod-7") as edge:
        right = {"Authorization": "Bearer right"}
        answers = [
            await ask(edge),
            await edge.control.get("/v1/state"),
            await edge.control.get("/v1/state", headers=right),
            await edge.control.get("/nothing", headers=right),
            await edge.control.post("/v1/sleep", headers=right, content=b"nonsense"),
        ]
        assert [one.status_code for one in answers] == [200, 401, 200, 404, 400]
        assert {one.headers["x-pod-uid"] for one in answers} == {"pod-7"}
        assert answers[2].json()["podUid"] == "pod-7"
