# SPDX-License-Identifier: Apache-2.0
"""The control port over a fake rank group: its token, its operations, its refusals."""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.errors import ConfigError, ErrorCode
from diffusion_worker.messages import ErrorReport
from diffusion_worker.server.http.bearer_token import TokenFile
from support.worker.fake_rank_group import fake_digest, fake_identity
from support.worker.server_edge import Edge, serving_edge

ALL_ROUTES = [
    ("GET", "/v1/state"),
    ("POST", "/v1/sleep"),
    ("POST", "/v1/wake"),
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
    ("POST", "/v1/drain"),
    ("POST", "/v1/probe"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/v1/omni/sleep"),
    ("POST", "/v1/omni/wakeup"),
    ("POST", "/v1/profile"),
    ("PUT", "/v1/adapters/stripes"),
    ("DELETE", "/v1/adapters/stripes"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/nothing"),
]


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(ranks=2) as edge:
        yield edge


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


# The control token


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer right2", "Basic right", "right", "Bearer r\xefght"]
)
async def test_no_route_is_open_without_the_token(token_path: Path, method: str, path: str, header: str | None) -> None:
    async with serving_edge(token_path=token_path) as edge:
        headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
        answer = await edge.control.request(method, path, headers=headers, content=b"not even JSON")
        assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (401, "Unauthorized", False)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "right" not in answer.text


async def test_the_right_token_opens_the_port(token_path: Path) -> None:
    async with serving_edge(token_path=token_path) as edge:
        for scheme in ("Bearer", "bearer"):
            answer = await edge.control.get("/v1/state", headers={"authorization": f"{scheme} right"})
            assert answer.status_code == 200


async def test_a_rotated_token_counts_from_the_next_request(token_path: Path) -> None:
    async with serving_edge(token_path=token_path) as edge:

        async def status(token: str) -> int:
            return (await edge.control.get("/v1/state", headers={"authorization": f"Bearer {token}"})).status_code

        assert await status("right") == 200
        replace(token_path, "other")
        assert (await status("right"), await status("other")) == (401, 200)
        take_away(token_path)
        assert (await status("other"), await status("")) == (401, 401)


def for_pod(token: str, pod_uid: str) -> dict[str, str]:
    """Return the header of the operator's calls to a pod."""
    return {"authorization": f"Bearer {hmac.new(token.encode(), pod_uid.encode(), hashlib.sha256).hexdigest()}"}


async def test_a_bearer_for_this_pod_opens_the_port_and_one_for_another_pod_does_not(token_path: Path) -> None:
    async with serving_edge(token_path=token_path, pod_uid="pod-7") as edge:

        async def status(token: str, pod_uid: str) -> int:
            return (await edge.control.get("/v1/state", headers=for_pod(token, pod_uid))).status_code

        assert [await status("right", "pod-7"), await status("right", "pod-8"), await status("right", ""), await status("", "pod-7")] == [
            200, 401, 401, 401,
        ]  # fmt: skip
        replace(token_path, "other")
        assert [await status("right", "pod-7"), await status("other", "pod-7")] == [401, 200]
        take_away(token_path)
        assert [await status("other", "pod-7"), await status("", "pod-7")] == [401, 401]


async def test_a_worker_that_knows_no_uid_takes_the_token_alone(token_path: Path) -> None:
    async with serving_edge(token_path=token_path) as edge:
        assert (await edge.control.get("/v1/state", headers=for_pod("right", ""))).status_code == 401
        assert (await edge.control.get("/v1/state", headers={"authorization": "Bearer right"})).status_code == 200


async def test_the_api_description_needs_no_token(token_path: Path) -> None:
    async with serving_edge(token_path=token_path) as edge:
        document = (await edge.control.get("/openapi.json")).json()
    assert "HTTPBearer" in document["components"]["securitySchemes"]
    assert document["paths"]["/v1/sleep"]["post"]["security"] == [{"HTTPBearer": []}]


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_token_file_without_a_token_is_an_error_at_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"--control-token-file.*token"):
        TokenFile(path, "--control-token-file").require()


# State


async def test_state_tells_all_that_the_operator_reads(edge: Edge) -> None:
    document = await edge.state()
    assert {name: document[name] for name in ("bootId", "generation", "state", "operation", "lastOperation", "inFlight", "failure")} == {
        "bootId": "boot-1",
        "generation": 1,
        "state": "ready",
        "operation": None,
        "lastOperation": None,
        "inFlight": 0,
        "failure": None,
    }
    assert document["load"] == {"stage": "Done", "bytesDone": 1_000_000, "bytesTotal": 1_000_000}
    assert document["model"]["servedName"] == "digits"
    assert [rank["state"] for rank in document["ranks"]] == ["ready", "ready"]
    assert document["ranks"][0]["memory"]["weightsResidentBytes"] == 1_000_000


# Sleep and wake


async def test_sleep_is_accepted_then_observed_then_done(edge: Edge) -> None:
    edge.ranks.calling.clear()
    call = {"operationId": "op-1", "bootId": "boot-1", "level": "HostMemory", "mode": "Wait", "deadlineSeconds": 30}
    accepted = await edge.control.post("/v1/sleep", json=call)
    assert (accepted.status_code, accepted.json()["operationId"]) == (202, "op-1")
    document = await edge.wait_state(state="sleeping")
    assert (document["operation"]["operationId"], document["operation"]["kind"]) == ("op-1", "sleep")
    repeated = await edge.control.post("/v1/sleep", json=call)
    assert repeated.status_code == 202
    edge.ranks.calling.set()
    document = await edge.wait_state(state="asleep", operation=None)
    assert document["lastOperation"].items() >= {"operationId": "op-1", "kind": "sleep", "error": None}.items()
    assert [rank["memory"]["weightsResidentBytes"] for rank in document["ranks"]] == [0, 0]
    repeated = await edge.control.post("/v1/sleep", json=call)
    assert (repeated.status_code, repeated.json()) == (200, {"operationId": "op-1", "state": "asleep"})
    assert edge.ranks.calls.count("handle_sleep_task") == 1


async def test_sleep_of_a_sleeper_and_wake_of_an_awake_one_have_nothing_to_do(edge: Edge) -> None:
    assert (await edge.operate("wake")).status_code == 200
    await edge.operate("sleep")
    await edge.wait_state(state="asleep")
    assert (await edge.operate("sleep")).status_code == 200
    assert "handle_wake_task" not in edge.ranks.calls


async def test_sleep_waits_for_a_running_request_and_refuses_new_ones(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    running = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_state(inFlight=1)
    await edge.operate("sleep", mode="Wait")
    await edge.wait_state(state="draining")
    assert (await edge.request_images(prompt="p kumquatfen")).json()["error"]["code"] == "Asleep"
    edge.ranks.stepping.set()
    assert (await running).status_code == 200
    await edge.wait_state(state="asleep")


async def test_the_policy_of_a_call_counts_from_then_on(edge: Edge) -> None:
    assert (await edge.state())["policy"] == "AlwaysAwake"
    await edge.operate("sleep", policy="Asleep")
    assert (await edge.wait_state(state="asleep"))["policy"] == "Asleep"
    await edge.operate("wake", policy="OnIdle")
    assert (await edge.wait_state(state="ready"))["policy"] == "OnIdle"
    assert (await edge.operate("wake")).status_code == 200
    assert (await edge.state())["policy"] == "OnIdle"


async def test_a_failed_sleep_is_in_the_state_document_and_the_model_serves_on(edge: Edge) -> None:
    edge.ranks.method_errors["handle_sleep_task"] = ErrorReport(ErrorCode.RANK_FAILED, "no memory to map")
    await edge.operate("sleep", operationId="op-1")
    document = await edge.wait_state(state="ready", operation=None)
    assert document["lastOperation"]["error"]["code"] == "RankFailed"
    assert "no memory to map" in document["lastOperation"]["error"]["message"]
    assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/sleep", {}, "operationId"),
        ("/v1/sleep", {"operationId": ""}, "operationId"),
        ("/v1/sleep", {"operationId": 5}, "operationId"),
        ("/v1/sleep", {"operationId": "x" * 200}, "operationId"),
        ("/v1/sleep", {"operationId": "a", "mode": "Never"}, "mode"),
        ("/v1/sleep", {"operationId": "a", "level": "Disk"}, "level"),
        ("/v1/sleep", {"operationId": "a", "deadlineSeconds": 0}, "deadlineSeconds"),
        ("/v1/sleep", {"operationId": "a", "deadlineSeconds": 1e9}, "deadlineSeconds"),
        ("/v1/sleep", {"operationId": "a", "deadlineSeconds": "5"}, "deadlineSeconds"),
        ("/v1/sleep", {"operationId": "a", "force": True}, "force"),
        ("/v1/wake", {"operationId": "a", "mode": "Wait"}, "mode"),
        ("/v1/wake", {"operation_id": "a"}, "operationId"),
        ("/v1/sleep", {"operationId": "a", "ifIdleSince": -1}, "ifIdleSince"),
        ("/v1/sleep", {"operationId": "a", "policy": "Never"}, "policy"),
        ("/v1/wake", {"operationId": "a", "tags": []}, "tags"),
        ("/v1/wake", {"operationId": "a", "tags": ["weights", "graphs"]}, "tags[1]"),
        ("/v1/pause", {"operationId": "a", "deadlineSeconds": 0}, "deadlineSeconds"),
        ("/v1/resume", {"operationId": "a", "deadlineSeconds": 1}, "deadlineSeconds"),
        ("/v1/probe", {}, "operationId"),
        ("/v1/drain", {}, "operationId"),
        ("/v1/drain", {"operationId": "a", "deadlineSeconds": 0}, "deadlineSeconds"),
    ],
)
async def test_a_wrong_field_of_an_operation_is_refused_by_name(edge: Edge, path: str, body: dict[str, Any], field: str) -> None:
    answer = await edge.control.post(path, json=body)
    assert (answer.status_code, answer.json()["code"], answer.json()["details"]) == (400, "InvalidRequest", {"field": field})
    assert edge.ranks.calls == []


# Pause and probe


async def test_a_pause_keeps_requests_waiting_and_a_resume_makes_their_images(edge: Edge) -> None:
    answer = await edge.operate("pause", operationId="p-1")
    assert (answer.status_code, answer.json()) == (200, {"operationId": "p-1", "paused": True})
    waiting = [asyncio.create_task(edge.request_images(prompt="p kumquatfen", seed=seed)) for seed in range(2)]
    document = await edge.wait_state(queued=2)
    assert (document["paused"], document["state"], document["inFlight"]) == (True, "ready", 0)
    assert (await edge.operate("pause")).status_code == 200
    for _ in range(2):
        answer = await edge.operate("resume", operationId="p-2")
        assert (answer.status_code, answer.json()) == (200, {"operationId": "p-2", "paused": False})
    assert [(await each).status_code for each in waiting] == [200, 200]


async def test_a_pause_that_the_ranks_do_not_join_in_time_is_an_error_and_changes_nothing(edge: Edge) -> None:
    edge.ranks.hanging.add("synchronize")
    answer = await edge.operate("pause", deadlineSeconds=0.02)
    assert (answer.status_code, answer.json()["code"]) == (504, "Timeout")
    assert (await edge.state())["paused"] is False
    assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


async def test_an_error_of_a_rank_in_a_pause_is_the_answer(edge: Edge) -> None:
    edge.ranks.method_errors["synchronize"] = ErrorReport(ErrorCode.RANK_FAILED, "rank 1: the copy failed")
    answer = await edge.operate("pause")
    assert (answer.status_code, answer.json()["code"]) == (500, "RankFailed")
    assert "rank 1" in answer.json()["message"]
    assert (await edge.state())["paused"] is False


async def test_a_probe_tells_what_each_rank_holds_and_makes_of_it(edge: Edge) -> None:
    await edge.put_adapter("style", "/loras/style")
    answer = await edge.operate("probe", operationId="p-1")
    assert answer.status_code == 200
    ranks = [
        {"rank": rank, "weights": "weights", "adapters": [f"{fake_identity('/loras/style')} kept"], "probe": "probe"} for rank in range(2)
    ]
    assert answer.json() == {"operationId": "p-1", "ranks": ranks}


async def wake(edge: Edge, operation: str, *, epoch: str | None) -> tuple[int, str | None]:
    headers = {"X-Operator-Epoch": epoch} if epoch is not None else {}
    answer = await edge.control.post("/v1/wake", json={"operationId": operation}, headers=headers)
    return answer.status_code, answer.json().get("code")


async def test_a_leader_that_was_replaced_changes_nothing_and_reads_the_highest_epoch(edge: Edge) -> None:
    assert (await edge.state())["operatorEpoch"] == 0
    assert await wake(edge, "w-1", epoch="7") == (200, None)
    assert await wake(edge, "w-2", epoch="6") == (409, "StaleEpoch")
    answer = await edge.control.get("/v1/state", headers={"X-Operator-Epoch": "6"})
    assert (answer.status_code, answer.json()["operatorEpoch"]) == (200, 7)
    assert await wake(edge, "w-3", epoch="7") == (200, None)
    assert await wake(edge, "w-4", epoch=None) == (200, None), "an operator from before there were epochs"
    answer = await edge.control.get("/v1/state", headers={"X-Operator-Epoch": "8"})
    assert answer.json()["operatorEpoch"] == 8, "a look is enough to know the next leader"
    assert await wake(edge, "w-5", epoch="7") == (409, "StaleEpoch")


@pytest.mark.parametrize("epoch", ["0", "-1", "next", str(2**63)])
async def test_an_epoch_that_is_none_is_refused_by_its_name_and_not_taken(edge: Edge, epoch: str) -> None:
    assert await wake(edge, "w", epoch=epoch) == (400, "InvalidRequest")
    assert (await edge.state())["operatorEpoch"] == 0


async def test_without_the_token_nobody_raises_the_epoch(token_path: Path) -> None:
    async with serving_edge(token_path=token_path) as edge:
        for method, path in ALL_ROUTES:
            answer = await edge.control.request(method, path, headers={"X-Operator-Epoch": "9", "Authorization": "Bearer wrong"})
            assert answer.status_code == 401
        answer = await edge.control.get("/v1/state", headers={"Authorization": "Bearer right"})
        assert answer.json()["operatorEpoch"] == 0


async def test_a_sleeping_model_is_neither_probed_nor_paused(edge: Edge) -> None:
    await edge.operate("sleep")
    await edge.wait_state(state="asleep")
    for kind in ("probe", "pause"):
        answer = await edge.operate(kind)
        assert (answer.status_code, answer.json()["code"]) == (503, "Asleep")


@pytest.mark.parametrize("kind", ["pause", "resume", "probe"])
async def test_a_pause_or_a_probe_for_another_boot_is_refused(edge: Edge, kind: str) -> None:
    answer = await edge.operate(kind, bootId="boot-0")
    assert (answer.status_code, answer.json()["code"]) == (409, "WrongBoot")


# Adapters


async def test_a_put_adapter_is_answered_as_it_is_in_the_state(edge: Edge) -> None:
    answer = await edge.put_adapter("stripes", "/loras/stripes", digest=fake_digest("/loras/stripes"), scale=0.5)
    assert answer.status_code == 200
    [adapter] = (await edge.state())["adapters"]
    assert answer.json() == adapter
    assert adapter.pop("loadSeconds") > 0
    assert adapter == {
        "name": "stripes",
        "digest": fake_digest("/loras/stripes"),
        "identity": fake_identity("/loras/stripes"),
        "source": {"path": "/loras/stripes"},
        "state": "Loaded",
        "scale": 0.5,
        "rank": 8,
        "modules": 24,
        "sizeBytes": 4096,
        "ranksLoaded": 2,
        "ranksTotal": 2,
        "refs": 0,
        "error": None,
        "revision": None,
        "components": [],
        "format": "peft",
        "alpha": None,
        "baseModel": None,
        "recipe": None,
        "residency": "Cached",
        "priority": 0,
        "fetchedBytes": None,
        "totalBytes": None,
        "requestsTotal": 0,
        "lastRequestAgeSeconds": None,
        "verificationFailed": False,
    }


async def test_a_repeated_put_only_changes_the_scale(edge: Edge) -> None:
    await edge.put_adapter("stripes", "/loras/stripes")
    answer = await edge.put_adapter("stripes", "/loras/stripes", scale=0.25)
    assert answer.json()["scale"] == 0.25
    assert edge.ranks.calls.count("add_lora") == 1


async def test_another_source_replaces_an_adapter_without_a_gap(edge: Edge) -> None:
    await edge.put_adapter("style", "/loras/one")
    before = (await edge.request_images(prompt="p kumquatfen", seed=1, model="style")).json()["data"]
    edge.ranks.calling.clear()
    replacing = asyncio.create_task(edge.put_adapter("style", "/loras/two"))

    async def second_load_runs() -> bool:
        return edge.ranks.calls.count("add_lora") == 2

    await edge.wait_for(second_load_runs)
    assert (await edge.request_images(prompt="p kumquatfen", seed=1, model="style")).json()["data"] == before
    edge.ranks.calling.set()
    assert (await replacing).json()["digest"] == fake_digest("/loras/two")
    assert (await edge.request_images(prompt="p kumquatfen", seed=1, model="style")).json()["data"] != before


async def test_an_adapter_that_is_none_is_refused_and_recorded_as_failed(edge: Edge) -> None:
    edge.ranks.adapter_errors["/loras/broken"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "adapter 'b': no adapter_config.json")
    answer = await edge.put_adapter("broken", "/loras/broken")
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (400, "InvalidAdapter", False)
    [adapter] = (await edge.state())["adapters"]
    assert (adapter["state"], adapter["error"]["code"]) == ("Failed", "InvalidAdapter")
    assert (await edge.put_adapter("broken", "/loras/mended")).status_code == 200


async def test_more_resident_adapters_than_there_are_slots_are_refused(edge: Edge) -> None:
    for number in range(edge.config.max_loras):
        assert (await edge.put_adapter(f"style-{number}", f"/loras/{number}", residency="Resident")).status_code == 200
    answer = await edge.put_adapter("one-more", "/loras/one-more", residency="Resident")
    assert (answer.status_code, answer.json()["code"]) == (409, "CapacityExceeded")
    assert "style-0" in answer.json()["message"]


async def test_a_load_over_its_deadline_is_a_timeout(edge: Edge) -> None:
    edge.ranks.calling.clear()
    answer = await edge.put_adapter("style", "/loras/style", deadlineSeconds=0.05)
    assert (answer.status_code, answer.json()["code"]) == (504, "Timeout")


async def test_a_delete_lets_running_requests_finish_and_refuses_new_ones(edge: Edge) -> None:
    await edge.put_adapter("style", "/loras/style")
    edge.ranks.stepping.clear()
    running = asyncio.create_task(edge.request_images(prompt="p kumquatfen", model="style"))
    await edge.wait_state(inFlight=1)
    deleting = asyncio.create_task(edge.delete_adapter("style"))

    async def drains() -> bool:
        return bool((await edge.state())["adapters"][0]["state"] == "Draining")

    await edge.wait_for(drains)
    assert (await edge.request_images(prompt="p kumquatfen", model="style")).status_code == 404
    edge.ranks.stepping.set()
    assert (await running).status_code == 200
    assert (await deleting).status_code == 200


async def test_a_delete_ends_requests_that_outlast_the_drain(edge: Edge) -> None:
    await edge.put_adapter("style", "/loras/style")
    edge.ranks.stepping.clear()
    running = asyncio.create_task(edge.request_images(prompt="p kumquatfen", model="style"))
    await edge.wait_state(inFlight=1)
    assert (await edge.delete_adapter("style", drainSeconds=0)).status_code == 200
    answer = await running
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "AdapterRemoved")


async def test_an_adapter_with_the_models_own_name_is_refused(edge: Edge) -> None:
    answer = await edge.put_adapter("digits", "/loras/style")
    assert (answer.status_code, answer.json()["code"]) == (409, "Conflict")


@pytest.mark.parametrize("name", ["A", "-a", "a-", "a%20b", "a" * 64, "..", "%00", "ä"])
async def test_a_name_that_no_adapter_can_have_is_refused(edge: Edge, name: str) -> None:
    answer = await edge.put_adapter(name, "/loras/style")
    assert answer.status_code in (400, 404)  # the client resolves `..` itself
    assert edge.ranks.calls == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"source": {}}, "source"),
        ({"source": {"path": ""}}, "source.path"),
        ({"source": {"path": "/x", "uri": "s3://x"}}, "source.uri"),
        ({"source": {"path": "/x", "s3": {"uri": "s3://bucket/key"}}}, "source"),
        ({"source": "/x"}, "source"),
        ({"source": {"huggingFace": {"repo": "no-owner"}}}, "source.huggingFace.repo"),
        ({"source": {"huggingFace": {"repo": "a/b", "file": "a.bin"}}}, "source.huggingFace.file"),
        ({"source": {"huggingFace": {"repo": "a/b", "tokenSecretRef": {"name": "../x"}}}}, "source.huggingFace.tokenSecretRef.name"),
        (
            {"source": {"huggingFace": {"repo": "a/b", "tokenSecretRef": {"name": "x", "key": ".."}}}},
            "source.huggingFace.tokenSecretRef.key",
        ),
        ({"source": {"s3": {"uri": "http://bucket/key"}}}, "source.s3.uri"),
        ({"source": {"s3": {"uri": "s3://bucket/key", "secret": "x"}}}, "source.s3.secret"),
        ({"source": {"pvc": {"claimName": "c"}}}, "source.pvc.path"),
        ({"source": {"http": {"url": "file:///etc/passwd", "sha256": "0" * 64}}}, "source.http.url"),
        ({"source": {"http": {"url": "https://host/file", "sha256": "sha256:" + "0" * 64}}}, "source.http.sha256"),
        ({"digest": "md5:abc"}, "digest"),
        ({"scale": 5}, "scale"),
        ({"scale": "1"}, "scale"),
        ({"deadlineSeconds": -1}, "deadlineSeconds"),
        ({"components": "transformer"}, "components"),
        ({"components": ["../unet"]}, "components[0]"),
        ({"format": "dora"}, "format"),
        ({"expectedRank": 0}, "expectedRank"),
        ({"residency": "Pinned"}, "residency"),
        ({"priority": 2**31}, "priority"),
        ({"pinned": True}, "pinned"),
    ],
)
async def test_a_wrong_field_of_an_adapter_is_refused_by_name(edge: Edge, body: dict[str, Any], field: str) -> None:
    answer = await edge.put_adapter("style", "/loras/style", **body)
    assert (answer.status_code, answer.json()["details"]) == (400, {"field": field})
    assert edge.ranks.calls == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"drainSeconds": -1}, "drainSeconds"),
        ({"drainSeconds": "nan"}, "drainSeconds"),
        ({"force": "1"}, "force"),
        ({"operationId": ""}, "operationId"),
    ],
)
async def test_a_wrong_query_of_a_delete_is_refused_by_name(edge: Edge, query: dict[str, Any], field: str) -> None:
    answer = await edge.delete_adapter("style", **query)
    assert (answer.status_code, answer.json()["details"]) == (400, {"field": field})


# Profile


async def test_a_profile_is_begun_and_ended_on_every_rank(edge: Edge) -> None:
    begun = await edge.operate("profile", action="Start", prefix="first")
    assert (begun.status_code, begun.json()) == (200, {"running": True, "files": []})
    ended = await edge.operate("profile", action="Stop")
    assert (ended.status_code, ended.json()) == (200, {"running": False, "files": ["/traces/1.json", "/traces/1.json"]})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "action"),
        ({"action": "start"}, "action"),
        ({"action": "Start", "prefix": "../x"}, "prefix"),
        ({"action": "Stop", "to": 1}, "to"),
    ],
)
async def test_a_wrong_field_of_a_profile_is_refused_by_name(edge: Edge, body: dict[str, Any], field: str) -> None:
    answer = await edge.operate("profile", **body)
    assert (answer.status_code, answer.json()["details"]) == (400, {"field": field})
    assert edge.ranks.calls == []


async def test_only_a_call_by_the_token_may_name_addresses_that_are_not_global(token_path: Path) -> None:
    for token, public_only in ((None, True), (token_path, False)):
        async with serving_edge(token_path=token) as edge:
            if token is not None:
                edge.control.headers["Authorization"] = f"Bearer {token.read_text().strip()}"
            await edge.put_adapter("stripes", "/loras/stripes")
            await edge.control.post("/v1/load_lora_adapter", json={"lora_name": "papercut", "lora_path": "/loras/papercut"})
            assert edge.fetcher.public_only == {"/loras/stripes": public_only, "/loras/papercut": public_only}
