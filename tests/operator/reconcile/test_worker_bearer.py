# SPDX-License-Identifier: Apache-2.0
"""A worker is sent a bearer that is good for its pod alone, since another pod may have its address."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.source import AdapterSource
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.observed.observed import AttemptKey
from diffusion_operator.plan.results.actions import PutAdapter, WorkerAddress
from diffusion_operator.reconcile.control_tokens import ControlTokens
from diffusion_operator.settings import Settings
from diffusion_operator.worker_client import HttpWorkerClient, bearer
from support.operator.fake_cluster import EPOCH

IP = "127.0.0.1"


class Worker:
    """A control port of one pod that takes bearers for it alone, and records each."""

    def __init__(self, token: str = "right", uid: str = "pod-7") -> None:
        self.token, self.uid = token, uid
        self.bearers: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.bearers.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if self.bearers[-1] != bearer(self.token, self.uid):
            return web.json_response({"code": "Unauthorized"}, status=401)
        return web.json_response({"bootId": "b", "state": "ready", "revision": "b.1", "podUid": self.uid})


@asynccontextmanager
async def listening(worker: Worker) -> AsyncIterator[int]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", worker.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, IP, 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
async def client(worker: Worker) -> AsyncIterator[HttpWorkerClient]:
    async with AsyncExitStack() as stack:
        made = HttpWorkerClient(poll_timeout_s=5, call_timeout_s=5, port=await stack.enter_async_context(listening(worker)))
        stack.push_async_callback(made.close)
        yield made


async def state(client: HttpWorkerClient, token: str = "right", uid: str = "pod-7") -> Any:
    return await client.state(IP, token=token, pod_uid=uid)


async def test_a_worker_is_sent_a_bearer_for_its_pod_and_never_the_token(client: HttpWorkerClient, worker: Worker) -> None:
    assert (await state(client)).boot_id == "b"
    assert worker.bearers == [bearer("right", "pod-7")]
    assert "right" not in worker.bearers[0]


async def test_another_pod_at_the_address_gets_a_bearer_that_it_cannot_use(client: HttpWorkerClient, worker: Worker) -> None:
    with pytest.raises(ControlRefused) as refused:
        await state(client, uid="pod-8")
    assert (refused.value.status, refused.value.code) == (401, "Unauthorized")
    assert worker.bearers == [bearer("right", "pod-8")] != [bearer("right", "pod-7")]


async def test_an_answer_of_another_pod_that_takes_any_bearer_is_none(client: HttpWorkerClient, worker: Worker) -> None:
    async def take_any(request: web.Request) -> web.Response:
        return web.json_response({"bootId": "b", "state": "ready", "podUid": "pod-8"})

    worker.answer = take_any  # type: ignore[method-assign]
    async with listening(worker) as port:
        client._port = port
        with pytest.raises(ControlUnreachable, match="of another pod, with the UID pod-8, expected the pod with the UID pod-7"):
            await state(client)


async def test_calls_carry_the_bearer_as_well(client: HttpWorkerClient, worker: Worker) -> None:
    address = WorkerAddress(pod_uid="pod-8", ip=IP, boot_id="b")
    key = AttemptKey(adapter_uid="u", generation=1, boot_id="b")
    load = AdapterLoad(source=AdapterSource(path="/l"))
    put = PutAdapter(worker=address, key=key, operation_id="o", name="x", load=load, deadline_s=9)
    with pytest.raises(ControlRefused):
        await client.put_adapter(put, token="right")
    assert worker.bearers == [bearer("right", "pod-8")]


async def test_after_a_rotation_the_token_is_found_that_the_worker_has(client: HttpWorkerClient, worker: Worker) -> None:
    settings = Settings(engine_image="i", operator_key=b"n" * 32, previous_keys=(b"k" * 32,))
    tokens = ControlTokens(settings, ObjectMeta(name="d", namespace="n", uid="u", creation_timestamp=EPOCH, generation=1))
    tried: list[str] = []

    async def ask(token: str) -> Any:
        tried.append(token)
        return await state(client, token=token)

    new, old = tokens._tokens
    worker.token = old
    assert (await tokens.call(IP, ask)).boot_id == "b"
    assert tried == [new, old]
    worker.token = new
    assert (await tokens.call(IP, ask)).boot_id == "b"
    assert worker.bearers[-1] == bearer(new, "pod-7")


async def test_a_worker_that_gets_the_new_token_between_two_tries_is_tried_with_it_again(client: HttpWorkerClient, worker: Worker) -> None:
    settings = Settings(engine_image="i", operator_key=b"n" * 32, previous_keys=(b"k" * 32,))
    tokens = ControlTokens(settings, ObjectMeta(name="d", namespace="n", uid="u", creation_timestamp=EPOCH, generation=1))
    new, worker.token = tokens._tokens

    async def ask(token: str) -> Any:
        if token != new:
            worker.token = new
        return await state(client, token=token)

    assert (await tokens.call(IP, ask)).boot_id == "b"
    assert worker.bearers[-1] == bearer(new, "pod-7")


async def test_an_adopted_worker_is_tried_with_the_new_objects_token_before_that_of_the_object_that_its_pod_was_made_for(
    client: HttpWorkerClient, worker: Worker
) -> None:
    settings = Settings(engine_image="i", operator_key=b"k" * 32)
    before, after = (ObjectMeta(name="d", namespace="n", uid=uid, creation_timestamp=EPOCH, generation=1) for uid in ("u1", "u2"))
    tokens = ControlTokens(settings, after)
    tried: list[str] = []

    async def ask(token: str) -> Any:
        tried.append(token)
        return await state(client, token=token)

    [new], [old] = tokens._tokens, ControlTokens(settings, before)._tokens
    worker.token = old
    with pytest.raises(ControlRefused):
        await tokens.call(IP, ask)
    tokens.inherit({IP: "u1"})
    assert (await tokens.call(IP, ask)).boot_id == "b"
    assert tried == [new, new, old]
