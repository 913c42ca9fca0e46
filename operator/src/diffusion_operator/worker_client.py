# SPDX-License-Identifier: Apache-2.0
"""The control API of one worker, as the operator uses it: typed answers, typed errors, a limit on every wait.

A call that outlives its limit is not a failure of the operation: the worker goes on, and the next state document tells. So such calls
raise ControlUnreachable and nothing is concluded from them.
"""

import asyncio
from typing import Any, Protocol

import aiohttp
import msgspec

from diffusion_operator.api.names import CONTROL_PORT
from diffusion_operator.api.worker_state import WireError, WorkerState
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.actions import PutAdapter, RemoveAdapter, SleepWorker, WakeWorker


class WorkerClient(Protocol):
    """The port; tests of reconcile script it."""

    async def state(self, ip: str, *, token: str) -> WorkerState: ...

    async def sleep(self, call: SleepWorker, *, token: str) -> None: ...

    async def wake(self, call: WakeWorker, *, token: str) -> None: ...

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None: ...

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None: ...


class HttpWorkerClient:
    """WorkerClient over aiohttp; owns its session."""

    def __init__(self, *, poll_timeout_s: float, call_timeout_s: float, port: int = CONTROL_PORT) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._poll_timeout_s = poll_timeout_s
        self._call_timeout_s = call_timeout_s
        self._port = port

    async def close(self) -> None:
        await self._session.close()

    async def state(self, ip: str, *, token: str) -> WorkerState:
        body = await self._send("GET", ip, "/v1/state", token=token, timeout_s=self._poll_timeout_s)
        try:
            return msgspec.json.decode(body, type=WorkerState)
        except msgspec.DecodeError as error:
            raise ControlUnreachable(f"the state document of {ip} is not understood: {error}") from error

    async def sleep(self, call: SleepWorker, *, token: str) -> None:
        body: dict[str, Any] = {"level": call.level.value, "mode": call.mode.value, "deadlineSeconds": call.deadline_s}
        body |= {"policy": call.policy.value} | ({} if call.if_idle_since_s is None else {"ifIdleSince": call.if_idle_since_s})
        await self._call("POST", "/v1/sleep", call, body, token=token)

    async def wake(self, call: WakeWorker, *, token: str) -> None:
        await self._call("POST", "/v1/wake", call, {"deadlineSeconds": call.deadline_s, "policy": call.policy.value}, token=token)

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None:
        await self._call("PUT", f"/v1/adapters/{call.name}", call, adapter_body(call), token=token)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        query = f"operationId={call.operation_id}&bootId={call.worker.boot_id}&drainSeconds={call.drain_s}"
        path = f"/v1/adapters/{call.name}?{query}"
        try:
            await self._send("DELETE", call.worker.ip, path, token=token, timeout_s=self._call_timeout_s)
        except ControlRefused as error:
            if error.status != 404:
                raise

    async def _call(self, method: str, path: str, call: SleepWorker | WakeWorker | PutAdapter, body: dict[str, Any], *, token: str) -> None:
        fenced = {"operationId": call.operation_id, "bootId": call.worker.boot_id, **body}
        await self._send(method, call.worker.ip, path, token=token, timeout_s=self._call_timeout_s, body=fenced)

    async def _send(self, method: str, ip: str, path: str, *, token: str, timeout_s: float, body: dict[str, Any] | None = None) -> bytes:
        host = f"[{ip}]" if ":" in ip else ip
        url = f"http://{host}:{self._port}{path}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, json=body, headers={"Authorization": f"Bearer {token}"}) as response,
            ):
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ControlUnreachable(f"{method} {path} of {ip}: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ControlUnreachable(f"{method} {path} of {ip}: {error}") from error
        if status >= 400:
            raise ControlRefused(_wire_error(content, status), status=status)
        return content


def adapter_body(call: PutAdapter) -> dict[str, Any]:
    return {**msgspec.to_builtins(call.load), "deadlineSeconds": call.deadline_s}


def _wire_error(content: bytes, status: int) -> WireError:
    try:
        return msgspec.json.decode(content, type=WireError)
    except msgspec.DecodeError:
        return WireError(code=f"Http{status}", message=content[:200].decode(errors="replace"), retryable=status >= 500)
