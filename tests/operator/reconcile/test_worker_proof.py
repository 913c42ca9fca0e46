# SPDX-License-Identifier: Apache-2.0
"""The token is sent only over a connection on which the worker has proved itself, since another pod may have its address (fault 85)."""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web

from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.source import AdapterSource
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.observed.observed import AttemptKey
from diffusion_operator.plan.results.actions import PutAdapter, WorkerAddress
from diffusion_operator.reconcile.control_tokens import ControlTokens
from diffusion_operator.settings import Settings
from diffusion_operator.worker_client import HttpWorkerClient
from support.operator.fake_cluster import EPOCH

IP = "127.0.0.1"
STATE = {"bootId": "b", "state": "ready", "revision": "b.1"}


class ProvingWorker:
    """A control port that proves itself with its token, and records each token it gets and the connection."""

    def __init__(self, token: str = "right", uid: str = "pod-7") -> None:
        self.token, self.uid = token, uid
        self.named = uid
        """The UID that its answers name."""
        self.tokens: list[str | None] = []
        self.paths: list[str] = []
        self.connections: list[Any] = []
        self.identity: Any = None
        """A function that answers in place of its identity."""
        self.closes = False
        self.hold = asyncio.Event()
        self.hold.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        assert request.transport is not None
        if request.path == "/v1/identity":
            return await self._prove(request)
        self.connections.append(request.transport.get_extra_info("peername"))
        self.tokens.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        await self.hold.wait()
        wrong = self.tokens[-1] != self.token
        return web.json_response(
            {"code": "Unauthorized"} if wrong else STATE, status=401 if wrong else 200, headers={"X-Pod-UID": self.named}
        )

    async def _prove(self, request: web.Request) -> web.StreamResponse:
        if callable(self.identity):
            return await self.identity(request)
        if self.identity is not None:
            return self.identity
        message = "\n".join(("diffusion-worker identity", request.query["nonce"], IP, self.uid))
        proof = hmac.new(self.token.encode(), message.encode(), hashlib.sha256).hexdigest()
        answer = web.json_response({"podUid": self.uid, "proof": proof})
        if self.closes:
            answer.force_close()
        return answer


@asynccontextmanager
async def listening(worker: ProvingWorker, ip: str = IP, port: int = 0) -> AsyncIterator[int]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", worker.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, ip, port).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
def worker() -> ProvingWorker:
    return ProvingWorker()


@pytest.fixture
async def client(worker: ProvingWorker) -> AsyncIterator[HttpWorkerClient]:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(listening(worker))
        made = HttpWorkerClient(poll_timeout_s=5, call_timeout_s=5, port=port)
        stack.push_async_callback(made.close)
        yield made


async def state(client: HttpWorkerClient, token: str = "right", uid: str = "pod-7", **more: Any) -> Any:
    return await client.state(IP, token=token, pod_uid=uid, **more)


async def test_a_connection_is_proved_once_and_then_used_again(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    for _ in range(3):
        assert (await state(client)).boot_id == "b"
    assert worker.paths == ["/v1/identity", *["/v1/state"] * 3]
    assert len(set(worker.connections)) == 1


async def test_each_connection_is_proved_while_several_calls_run_beside_each_other(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    worker.hold.clear()
    calls = [asyncio.create_task(state(client)) for _ in range(5)]
    async with asyncio.timeout(30):
        while len(worker.tokens) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    worker.hold.set()
    await asyncio.gather(*calls)
    assert len(set(worker.connections)) == 5
    assert worker.paths.count("/v1/identity") >= 5


async def test_who_has_another_token_is_sent_none(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    for _ in range(3):  # the connection of a proof that failed stays open
        with pytest.raises(ControlRefused, match="not proved that it has the control token") as refused:
            await state(client, token="another")
        assert (refused.value.status, refused.value.code) == (401, "Unauthorized")
    assert worker.tokens == []


async def test_a_stranger_that_takes_the_address_of_a_proved_worker_is_sent_no_token_at_any_call(worker: ProvingWorker) -> None:
    client, stranger = HttpWorkerClient(poll_timeout_s=5, call_timeout_s=5, port=0), ProvingWorker(token="guessed")
    async with listening(worker) as port:
        client._port = port
        await state(client)
    async with listening(stranger, port=port):
        for _ in range(3):
            with pytest.raises(ControlRefused, match="not proved"):
                await state(client)
    await client.close()
    assert stranger.tokens == []


async def test_another_pod_of_the_deployment_is_sent_none(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    with pytest.raises(ControlUnreachable, match="another pod answered, with the UID pod-7"):
        await state(client, uid="pod-8")
    assert worker.tokens == []


async def test_an_answer_that_names_another_pod_is_none(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    await state(client)
    worker.named = "pod-8"
    with pytest.raises(ControlUnreachable, match="another pod answered, with the UID pod-8"):
        await state(client)


async def test_a_proof_that_was_passed_on_from_the_real_worker_proves_nothing(worker: ProvingWorker) -> None:
    """Let a thief at the worker's old address pass on the proof of the worker, which lives on at another one. The thief gets no token."""
    thief = ProvingWorker()
    async with listening(worker, "127.0.0.3") as port, ClientSession() as session:

        async def pass_on(request: web.Request) -> web.Response:
            async with session.get(f"http://127.0.0.3:{port}{request.path_qs}") as answer:
                return web.json_response(await answer.json())

        thief.identity = pass_on
        async with listening(thief, "127.0.0.2", port):
            client = HttpWorkerClient(poll_timeout_s=5, call_timeout_s=5, port=port)
            with pytest.raises(ControlRefused, match="not proved"):
                await client.state("127.0.0.2", token="right", pod_uid="pod-7")
            await client.close()
    assert (thief.tokens, worker.paths) == ([], ["/v1/identity"])


@pytest.mark.parametrize(
    "nonsense",
    [{"podUid": "pod-7", "proof": "0" * 64}, {"podUid": "pod-7", "proof": ""}, {"podUid": "pod-7", "proof": "ü"}, {"proof": 1}, [], "x"],
)
async def test_nonsense_proves_nothing(client: HttpWorkerClient, worker: ProvingWorker, nonsense: Any) -> None:
    worker.identity = web.json_response(nonsense)
    with pytest.raises((ControlRefused, ControlUnreachable)):
        await state(client)
    assert worker.tokens == []


@pytest.mark.parametrize("status", [401, 404])
async def test_a_worker_of_a_version_without_proofs_is_called_as_ever(client: HttpWorkerClient, worker: ProvingWorker, status: int) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"code": "x"}, status=status)

    worker.identity = refuse
    for _ in range(2):
        assert (await state(client)).boot_id == "b"
    assert worker.paths.count("/v1/identity") == 1, "its connection is used again"


async def test_who_proved_itself_once_is_never_taken_for_an_older_version(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    await state(client)

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"code": "NotFound"}, status=404)

    worker.identity = refuse
    worker.hold.clear()
    first = asyncio.create_task(state(client))  # holds the only proved connection
    async with asyncio.timeout(30):
        while len(worker.tokens) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(ControlRefused):
        await state(client)
    worker.hold.set()
    await first
    assert len(worker.tokens) == 2


@pytest.mark.parametrize("status", [401, 404])
async def test_a_stranger_at_the_address_of_a_worker_that_an_earlier_process_proved_is_sent_no_token(
    client: HttpWorkerClient, worker: ProvingWorker, status: int
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"code": "x"}, status=status)

    worker.identity = refuse
    client.expect_proof(IP, "pod-7")
    with pytest.raises(ControlRefused):
        await state(client)
    assert worker.tokens == []


async def test_of_a_pod_that_is_gone_nothing_is_kept_and_of_the_next_one_at_its_address_all(
    client: HttpWorkerClient, worker: ProvingWorker
) -> None:
    await state(client)
    assert (client._proved, list(client._cleared)) == ({IP: "pod-7"}, [IP])
    client.forget_pod(IP, "pod-6")
    assert (client._proved, list(client._cleared)) == ({IP: "pod-7"}, [IP])
    client.forget_pod(IP, "pod-7")
    assert (client._proved, client._cleared) == ({}, {})
    await state(client)
    assert client._proved == {IP: "pod-7"}, "it may prove itself again"


async def test_a_worker_that_closes_its_connections_is_told_and_sent_no_token(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    worker.closes = True
    with pytest.raises(ControlUnreachable, match="closed each connection"):
        await state(client)
    assert worker.tokens == []


async def test_calls_are_proved_as_well(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    address = WorkerAddress(pod_uid="pod-8", ip=IP, boot_id="b")
    key = AttemptKey(adapter_uid="u", generation=1, boot_id="b")
    load = AdapterLoad(source=AdapterSource(path="/l"))
    put = PutAdapter(worker=address, key=key, operation_id="o", name="x", load=load, deadline_s=9)
    with pytest.raises(ControlUnreachable, match="another pod answered"):
        await client.put_adapter(put, token="right")
    assert worker.tokens == []


async def test_after_a_rotation_the_proof_says_which_token_the_worker_has(client: HttpWorkerClient, worker: ProvingWorker) -> None:
    settings = Settings(engine_image="i", operator_key=b"n" * 32, previous_keys=(b"k" * 32,))
    tokens = ControlTokens(settings, ObjectMeta(name="d", namespace="n", uid="u", creation_timestamp=EPOCH, generation=1))
    tried: list[str] = []

    async def ask(token: str) -> Any:
        tried.append(token)
        worker.token = worker.token if worker.token != "right" else ""
        return await state(client, token=token)

    new, old = tokens._tokens
    worker.token = old
    assert (await tokens.call(IP, ask)).boot_id == "b"
    assert (tried, worker.tokens) == ([new, old], [old]), "the new one was not sent to a worker that has it not"
    worker.token = new
    assert (await tokens.call(IP, ask)).boot_id == "b"
    assert worker.tokens[-1] == new


async def test_a_worker_that_gets_the_new_token_between_two_tries_is_tried_with_it_again(
    client: HttpWorkerClient, worker: ProvingWorker
) -> None:
    settings = Settings(engine_image="i", operator_key=b"n" * 32, previous_keys=(b"k" * 32,))
    tokens = ControlTokens(settings, ObjectMeta(name="d", namespace="n", uid="u", creation_timestamp=EPOCH, generation=1))
    new, worker.token = tokens._tokens

    async def ask(token: str) -> Any:
        if token != new:
            worker.token = new
        return await state(client, token=token)

    assert (await tokens.call(IP, ask)).boot_id == "b"
    assert worker.tokens == [new]


async def test_an_adopted_worker_is_tried_with_the_new_objects_token_before_that_of_the_object_that_its_pod_was_made_for(
    client: HttpWorkerClient, worker: ProvingWorker
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
    assert (tried, worker.tokens) == ([new, new, old], [old])


async def test_a_proof_that_does_not_come_is_named_with_its_own_limit(worker: ProvingWorker) -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    worker.identity = never
    async with listening(worker) as port, AsyncExitStack() as stack:
        client = HttpWorkerClient(poll_timeout_s=0.3, call_timeout_s=5, port=port)
        stack.push_async_callback(client.close)
        with pytest.raises(ControlUnreachable, match=r"^GET /v1/identity of 127\.0\.0\.1: no complete answer within 0\.3 s$"):
            await state(client, after="b.1", wait_s=30)
