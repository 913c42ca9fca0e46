# SPDX-License-Identifier: Apache-2.0
"""The control API of one worker, as the operator uses it: typed answers, typed errors, a limit on every wait.

A call that outlives its limit is not a failure of the operation: the worker goes on, and the next state document tells. So such calls
raise ControlUnreachable and nothing is concluded from them.

A worker runs a container image of a tenant, so its answer may be anything. No redirect is followed, no proxy and no cookie is used, and
only an IP address is called. An answer is read up to a bound, is never decompressed, and is parsed before anything of it reaches a status.
"""

import asyncio
import ipaddress
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.api.names import CONTROL_PORT
from diffusion_operator.api.worker_state import WireError, WorkerState
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter, SleepWorker, WakeWorker

STATE_BYTES = 4 << 20
"""The largest state document that is read."""
ANSWER_BYTES = 64 << 10
"""The largest of all other answers."""


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
        # The defaults of the library may change: none of these may.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), trust_env=False, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        self._poll_timeout_s = poll_timeout_s
        self._call_timeout_s = call_timeout_s
        self._port = port

    async def close(self) -> None:
        await self._session.close()

    async def state(self, ip: str, *, token: str) -> WorkerState:
        body = await self._send("GET", ip, "/v1/state", token=token, timeout_s=self._poll_timeout_s, most=STATE_BYTES)
        try:
            return msgspec.json.decode(body, type=WorkerState)
        except (ValueError, RecursionError) as error:
            raise ControlUnreachable(f"the state document of {ip} is not understood: {plain_text(str(error), 200)}") from error

    async def sleep(self, call: SleepWorker, *, token: str) -> None:
        body: dict[str, Any] = {"level": call.level.value, "mode": call.mode.value, "deadlineSeconds": call.deadline_s}
        body |= {"policy": call.policy.value} | ({} if call.if_idle_since_s is None else {"ifIdleSince": call.if_idle_since_s})
        await self._call("POST", "/v1/sleep", call, body, token=token)

    async def wake(self, call: WakeWorker, *, token: str) -> None:
        await self._call("POST", "/v1/wake", call, {"deadlineSeconds": call.deadline_s, "policy": call.policy.value}, token=token)

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None:
        await self._call("PUT", f"/v1/adapters/{quote(call.name, safe='')}", call, adapter_body(call), token=token)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        query = urlencode({"operationId": call.operation_id, "bootId": call.worker.boot_id, "drainSeconds": call.drain_s})
        path = f"/v1/adapters/{quote(call.name, safe='')}?{query}"  # a worker's own words, where nobody declared the adapter
        try:
            await self._send("DELETE", call.worker.ip, path, token=token, timeout_s=self._call_timeout_s)
        except ControlRefused as error:
            if error.status != 404:
                raise

    async def _call(self, method: str, path: str, call: SleepWorker | WakeWorker | PutAdapter, body: dict[str, Any], *, token: str) -> None:
        fenced = {"operationId": call.operation_id, "bootId": call.worker.boot_id, **body}
        await self._send(method, call.worker.ip, path, token=token, timeout_s=self._call_timeout_s, body=fenced)

    async def _send(
        self, method: str, ip: str, path: str, *, token: str, timeout_s: float, body: dict[str, Any] | None = None, most: int = ANSWER_BYTES
    ) -> bytes:
        """Return the body of a success, JSON or nothing, of at most `most` bytes; all of it within `timeout_s`."""
        what, headers = f"{method} {path} of {ip}", {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        url = f"http://{_host(ip)}:{self._port}{path}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, json=body, headers=headers, allow_redirects=False) as response,
            ):
                try:
                    return await _read(response, what, most)
                except BaseException:
                    response.close()  # whatever is still to come is not read, and not taken for the next answer
                    raise
        except TimeoutError as error:
            raise ControlUnreachable(f"{what}: no whole answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ControlUnreachable(f"{what}: {_fault(error)}") from error


def adapter_body(call: PutAdapter) -> dict[str, Any]:
    return {**msgspec.to_builtins(call.load), "deadlineSeconds": call.deadline_s}


def _host(ip: str) -> str:
    """Return the address as a URL has it. A name would be resolved, and could lead anywhere; so could an address of the node's own network.

    Raises ControlUnreachable.
    """
    try:
        address = ipaddress.ip_address(ip)
    except ValueError as error:
        raise ControlUnreachable(f"the pod's address is {plain_text(ip, 64)}, expected an IP address") from error
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        raise ControlUnreachable(f"the pod's address is {address}, expected one of a pod; the operator does not call it")
    return f"[{address}]" if address.version == 6 else str(address)


async def _read(response: aiohttp.ClientResponse, what: str, most: int) -> bytes:
    """Return the body of a success. Raises ControlRefused with the worker's error, ControlUnreachable for everything else."""
    status = response.status
    if status < 200 or 300 <= status < 400:
        raise ControlUnreachable(f"{what}: answered with status {status}, expected a result or an error; the operator follows no redirect")
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ControlUnreachable(f"{what}: the answer is encoded as {plain_text(encoding, 32)}, expected plain JSON")
    is_json = response.content_type == "application/json"
    if status >= 400:
        raise ControlRefused(_wire_error(await _bounded(response, what, ANSWER_BYTES) if is_json else b"", status), status=status)
    return await _bounded(response, what, most) if is_json else await _bounded(response, what, 0, response.content_type)


async def _bounded(response: aiohttp.ClientResponse, what: str, most: int, found: str = "") -> bytes:
    """Return the whole body, as a stream that is left at the bound: a worker's words about its length prove nothing."""
    content = bytearray()
    if (response.content_length or 0) <= most:
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > most:
                break
        else:
            return bytes(content)
    if found:
        raise ControlUnreachable(f"{what}: the answer is {plain_text(found, 64)}, expected application/json")
    raise ControlUnreachable(f"{what}: the answer is larger than {most} bytes")


def _fault(error: aiohttp.ClientError | ValueError) -> str:
    """Return the system's words where there was no connection; of an answer that is no HTTP, nothing that was in it."""
    return str(error) if isinstance(error, aiohttp.ClientOSError) else f"no valid HTTP answer ({type(error).__name__})"


def _wire_error(content: bytes, status: int) -> WireError:
    """Return the worker's error, or one that has the status alone: a body of another shape reaches nobody."""
    try:
        return msgspec.json.decode(content, type=WireError)
    except (ValueError, RecursionError):
        message = f"status {status} without an error that is understood"
        return WireError(code=f"Http{status}", message=message, retryable=status >= 500)
