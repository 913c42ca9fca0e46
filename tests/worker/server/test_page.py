# SPDX-License-Identifier: Apache-2.0
"""The page's files and the state that it shows, at the edge; a browser's view of them is in test_page_browser.py."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from diffusion_worker.server import ui
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.process import REPOSITORY
from support.worker.server_edge import Edge, serving_edge

FILES = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
PAGE = Path(ui.__file__).parent / "page"
LOAD_CODES = {
    "InvalidAdapter",
    "UnsupportedFormat",
    "NoMatchingModules",
    "ModulesOutsideEnvelope",
    "RankTooLarge",
    "DigestMismatch",
    "IdentityMismatch",
    "SourceNotFound",
    "SourceUnauthorized",
    "SecretMissing",
    "NetworkError",
    "TooLarge",
    "CacheFull",
    "CapacityExceeded",
}


async def test_the_page_is_three_files_that_may_load_nothing_from_elsewhere() -> None:
    async with serving_edge() as edge:
        for path, media_type in FILES.items():
            answer = await edge.data.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, f"{media_type}; charset=utf-8")
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self';" in policy and "unsafe" not in policy and "http" not in policy
            assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")


@pytest.mark.parametrize("path", FILES)
async def test_a_file_that_a_browser_has_already_is_not_sent_again(path: str) -> None:
    async with serving_edge() as edge:
        first = await edge.data.get(path)
        again = await edge.data.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert (await edge.data.get(path, headers={"If-None-Match": '"another"'})).content == first.content
        assert first.headers["cache-control"] == "no-cache"
        asked = await edge.data.head(path)
        assert (asked.status_code, asked.content, asked.headers["etag"]) == (200, b"", first.headers["etag"])


def test_the_page_has_nothing_inline_and_names_no_other_host() -> None:
    text = {path.name: path.read_text() for path in PAGE.iterdir()}
    assert sorted(text) == ["page.css", "page.html", "page.js"]
    assert [name for name, content in text.items() if re.search(r"https?://|//\w+\.\w", content)] == []
    page = text["page.html"]
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == [] and "<style" not in page and "style=" not in page
    assert re.findall(r"\son\w+=", page) == []


def test_every_field_of_the_page_has_a_label() -> None:
    page = (PAGE / "page.html").read_text()
    fields = set(re.findall(r'<(?:input|select|textarea) id="(\w+)"', page))
    assert fields and fields == set(re.findall(r'<label for="(\w+)"', page))


def test_every_state_and_code_has_words_for_people() -> None:
    script = (PAGE / "page.js").read_text()
    states = set(re.findall(r"^  (\w+): \[\"(?:good|wait|rest|bad)\"", script, re.MULTILINE))
    assert states == {state.value for state in ui.EngineState}
    advice = script.partition("const ADVICE = {")[2].partition("};")[0]
    # Codes of the control port, and of routes that the page does not call, are left out. A request that waits for a load gets one code for
    # all its errors.
    control = {"NotFound", "Conflict", "WrongBoot", "StaleEpoch", "Managed", "VerificationFailed", "MemoryNotReleased", *LOAD_CODES}
    assert set(re.findall(r"^  (\w+):", advice, re.MULTILINE)) - {"Unreachable"} == {code.value for code in ui.ErrorCode} - control


async def test_without_the_page_there_is_neither_it_nor_its_status() -> None:
    async with serving_edge(ui=False) as edge:
        for path in [*FILES, "/v1/status"]:
            answer = await edge.data.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NotFound")
        assert "/v1/status" not in (await edge.data.get("/openapi.json")).json()["paths"]


async def test_the_status_says_what_the_worker_does_and_nothing_of_its_inside() -> None:
    async with serving_edge(ranks=2) as edge:
        answer = await edge.data.get("/v1/status")
        documented = re.search(r"^```json\n(.*?)^```", (REPOSITORY / "docs" / "page.md").read_text(), re.MULTILINE | re.DOTALL)
        assert documented is not None and json.loads(documented[1]) == answer.json() | {"ranks": answer.json()["ranks"][:1]}
        assert answer.json() == {
            "model": "digits",
            "state": "ready",
            "asleep": False,
            "stage": "Done",
            "percent": None,
            "generation": 1,
            "in_flight": 0,
            "queued": 0,
            "held": 0,
            "paused": False,
            "policy": "AlwaysAwake",
            "ranks": [{"rank": 0, "state": "ready"}, {"rank": 1, "state": "ready"}],
            "problem": None,
        }
        assert "/v1/status" in (await edge.data.get("/openapi.json")).json()["paths"]


async def test_the_status_tells_how_much_of_the_model_is_loaded() -> None:
    edge = Edge(FakeRankGroup(1))
    status = (await edge.data.get("/v1/status")).json()
    assert (status["state"], status["percent"]) == ("starting", 0)


async def test_the_status_tells_of_sleep() -> None:
    async with serving_edge() as edge:
        await edge.operate("sleep")
        await edge.wait_state(state="asleep")
        status = (await edge.data.get("/v1/status")).json()
        assert (status["state"], status["asleep"], status["ranks"]) == ("asleep", True, [{"rank": 0, "state": "asleep"}])


async def test_the_status_tells_of_held_requests_and_of_the_policy_that_lets_them_wake_the_model(tmp_path: Path) -> None:
    desired = tmp_path / "desired.json"
    desired.write_text('{"sleep": {"policy": "OnIdle"}}')
    async with serving_edge(desired_path=str(desired)) as edge:
        await edge.operate("sleep")
        await edge.wait_state(state="asleep", operation=None)
        edge.ranks.calling.clear()
        held = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
        await edge.wait_held(1)
        status = (await edge.data.get("/v1/status")).json()
        assert (status["held"], status["queued"], status["policy"]) == (1, 0, "OnIdle")
        edge.ranks.calling.set()
        assert (await held).status_code == 200


def test_every_state_that_a_request_waits_through_has_words_for_it() -> None:
    script = (PAGE / "page.js").read_text()
    words = script.partition("const WAITS = {")[2].partition("};")[0]
    serving_or_over = {"ready", "failed", "terminating"}
    assert set(re.findall(r"^  (\w+):", words, re.MULTILINE)) == {state.value for state in ui.EngineState} - serving_or_over


async def test_the_status_tells_of_a_failure_by_its_code_alone() -> None:
    async with serving_edge(max_restarts=0) as edge:
        edge.ranks.lose("rank 0 cannot read /secret/model")
        await edge.wait_state(state="failed")
        answer = await edge.data.get("/v1/status")
        assert answer.json()["problem"] == "EngineFailed" and "/secret" not in answer.text


async def test_with_a_key_the_page_is_open_and_the_status_is_not(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the-key\n")
    async with serving_edge(api_key_path=str(key)) as edge:
        assert {(await edge.data.get(path)).status_code for path in FILES} == {200}
        assert (await edge.data.get("/v1/status")).status_code == 401
        assert (await edge.data.get("/v1/status", headers={"Authorization": "Bearer the-key"})).status_code == 200
