# SPDX-License-Identifier: Apache-2.0
"""The control API of one worker, as the operator uses it: typed answers, typed errors, a limit on every wait.

A call that outlives its limit is not a failure of the operation: the worker goes on, and the next state document tells. So such calls
raise ControlUnreachable and nothing is concluded from them.

A worker runs a container image of a tenant, so its answer may be anything. No redirect is followed, no proxy and no cookie is used, and
only an IP address is called. An answer is read up to a bound, is never decompressed, and is parsed before anything of it reaches a status.
The token goes to nobody. The bearer is an HMAC of the pod's UID with it, which no other pod accepts.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.api.merged_state import together
from diffusion_operator.api.names import CONTROL_PORT
from diffusion_operator.api.worker_state import WireError, WorkerState
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.results.actions import DrainWorker, PutAdapter, RemoveAdapter, SleepWorker, WakeWorker

STATE_BYTES = 4 << 20
"""The largest state document of a worker that answers without pages."""
PAGE_BYTES = 1 << 20
"""The largest answer of one that has pages."""
PAGE_LIMIT = 1000
"""Names of adapters in an answer, which takes about 724 bytes of it for each."""
MOST_PAGES = 256
MOST_ADAPTERS = 50_000
"""Records in all pages together: twice as many as a deployment may have."""
EPOCH_HEADER = "X-Operator-Epoch"
"""Workers refuse a lower epoch than they have seen, so a leader that was replaced changes nothing."""
ANSWER_BYTES = 64 << 10
"""The largest of all other answers."""
WAIT_GRACE_S = 5.0
"""Beyond the time that a worker was asked to wait."""
LIMITS = f"more than {MOST_PAGES} pages or {MOST_ADAPTERS} adapters"
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 5, 5, 3
"""The kernel finds out within twenty seconds that a worker is cut off, however long its answer may take."""


class WorkerClient(Protocol):
    """Interface to the workers' control API. Tests of the reconcile code replace it with scripted answers."""

    async def state(self, ip: str, *, token: str, pod_uid: str = "", after: str = "", wait_s: float = 0.0) -> WorkerState:
        """Return a worker's state. With `after`, return the next one whose revision is another, or the same one after `wait_s`.

        An answer after a wait may have only the adapters that changed. If another pod than `pod_uid` answers, raise ControlUnreachable.
        """

    async def sleep(self, call: SleepWorker, *, token: str) -> None: ...

    async def wake(self, call: WakeWorker, *, token: str) -> None: ...

    async def drain(self, call: DrainWorker, *, token: str) -> None: ...

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None: ...

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None: ...


class HttpWorkerClient:
    """WorkerClient on an aiohttp session of its own. Removing an adapter that the worker does not have succeeds."""

    def __init__(
        self, *, poll_timeout_s: float, call_timeout_s: float, port: int = CONTROL_PORT, epoch: Callable[[], int | None] = lambda: None
    ) -> None:
        """Send the number that `epoch` returns, the leader's, with every call; None where there is no election."""
        # The defaults of the library may change: none of these may.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=keepalive_socket),
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # each request has its own
        )
        self._poll_timeout_s = poll_timeout_s
        self._call_timeout_s = call_timeout_s
        self._port = port
        self._epoch = epoch

    async def close(self) -> None:
        await self._session.close()

    async def state(self, ip: str, *, token: str, pod_uid: str = "", after: str = "", wait_s: float = 0.0) -> WorkerState:
        path = _state_path(after=after, wait=f"{wait_s:g}") if after else _state_path()
        timeout_s, most = wait_s + WAIT_GRACE_S if wait_s else self._poll_timeout_s, PAGE_BYTES if after else STATE_BYTES
        body = await self._send("GET", ip, path, token=token, pod_uid=pod_uid, timeout_s=timeout_s, most=most)
        pages = [_read_state(ip, body)]
        if pod_uid and pages[0].pod_uid not in ("", pod_uid):
            raise ControlUnreachable(
                f"the state document of {ip} is of another pod, with the UID {pages[0].pod_uid}, expected the pod with the UID {pod_uid}"
            )
        count = len(pages[0].adapters)
        if pages[0].adapters_since not in (None, after):
            raise ControlUnreachable(
                f"the state document of {ip} lists the changes after revision {pages[0].adapters_since}, expected those after {after}"
            )
        while (token_of_next := pages[-1].adapters_continue) is not None:
            path, timeout_s = _state_path(**{"continue": token_of_next}), self._poll_timeout_s
            body = await self._send("GET", ip, path, token=token, pod_uid=pod_uid, timeout_s=timeout_s, most=PAGE_BYTES)
            pages.append(_read_state(ip, body))
            count += len(pages[-1].adapters)
            if len(pages) > MOST_PAGES or count > MOST_ADAPTERS or pages[-1].boot_id != pages[0].boot_id:
                raise ControlUnreachable(f"the state document of {ip} has {LIMITS}, or pages of two server processes")
        return together(pages)

    async def sleep(self, call: SleepWorker, *, token: str) -> None:
        body: dict[str, Any] = {"level": call.level.value, "mode": call.mode.value, "deadlineSeconds": call.deadline_s}
        body |= {"policy": call.policy.value} | ({} if call.if_idle_since_s is None else {"ifIdleSince": call.if_idle_since_s})
        await self._call("POST", "/v1/sleep", call, body, token=token)

    async def wake(self, call: WakeWorker, *, token: str) -> None:
        await self._call("POST", "/v1/wake", call, {"deadlineSeconds": call.deadline_s, "policy": call.policy.value}, token=token)

    async def drain(self, call: DrainWorker, *, token: str) -> None:
        await self._call("POST", "/v1/drain", call, {"deadlineSeconds": call.deadline_s}, token=token)

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None:
        await self._call("PUT", f"/v1/adapters/{quote(call.name, safe='')}", call, adapter_body(call), token=token)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        query = urlencode({"operationId": call.operation_id, "bootId": call.worker.boot_id, "drainSeconds": call.drain_s})
        path = f"/v1/adapters/{quote(call.name, safe='')}?{query}"  # a worker's own words, where nobody declared the adapter
        try:
            await self._send("DELETE", call.worker.ip, path, token=token, pod_uid=call.worker.pod_uid, timeout_s=self._call_timeout_s)
        except ControlRefused as error:
            if error.status != 404:
                raise

    async def _call(
        self, method: str, path: str, call: SleepWorker | WakeWorker | DrainWorker | PutAdapter, body: dict[str, Any], *, token: str
    ) -> None:
        fenced = {"operationId": call.operation_id, "bootId": call.worker.boot_id, **body}
        pod_uid = call.worker.pod_uid
        await self._send(method, call.worker.ip, path, token=token, pod_uid=pod_uid, timeout_s=self._call_timeout_s, body=fenced)

    async def _send(
        self,
        method: str,
        ip: str,
        path: str,
        *,
        token: str,
        pod_uid: str,
        timeout_s: float,
        body: dict[str, Any] | None = None,
        most: int = ANSWER_BYTES,
    ) -> bytes:
        """Send a request to a pod's worker, and return the body of the success, JSON or nothing.

        Raises ControlRefused with the worker's error. Raises ControlUnreachable without a complete answer within `timeout_s`.
        An answer of more than `most` bytes raises ControlUnreachable, too.
        """
        request_line = f"{method} {path} of {ip}"
        headers, epoch = {"Authorization": f"Bearer {bearer(token, pod_uid)}", "Accept-Encoding": "identity"}, self._epoch()
        if epoch is not None:
            headers[EPOCH_HEADER] = str(epoch)
        url = f"http://{_host(ip)}:{self._port}{path}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, json=body, headers=headers, allow_redirects=False) as response,
            ):
                try:
                    return await _read(response, request_line, most)
                except BaseException:
                    response.close()  # whatever is still to come is not read, and not taken for the next answer
                    raise
        except TimeoutError as error:
            raise ControlUnreachable(f"{request_line}: no complete answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ControlUnreachable(f"{request_line}: {_fault(error)}") from error


def bearer(token: str, pod_uid: str) -> str:
    """Return the bearer for one pod, in hexadecimal digits: useless for any other pod, such as one that has its address by now."""
    return hmac.new(token.encode(), pod_uid.encode(), hashlib.sha256).hexdigest()


def keepalive_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket whose peer is asked by the kernel whether it is still there."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TRIES)
    # The kernel does not ask while it waits for an acknowledgement of a request, so that wait has the same bound.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_TRIES * KEEPALIVE_EVERY_S))
    return made


def _state_path(**query: str) -> str:
    return f"/v1/state?{urlencode({**query, 'limit': PAGE_LIMIT})}"


def _read_state(ip: str, body: bytes) -> WorkerState:
    try:
        return msgspec.json.decode(body, type=WorkerState)
    except (ValueError, RecursionError) as error:
        raise ControlUnreachable(f"the state document of {ip} is not understood: {plain_text(str(error), 200)}") from error


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
        kinds = "link-local, multicast or unspecified"
        raise ControlUnreachable(f"the pod's address is {address}, which is {kinds}; the operator does not call it")
    return f"[{address}]" if address.version == 6 else str(address)


async def _read(response: aiohttp.ClientResponse, request_line: str, most: int) -> bytes:
    """Return the body of a successful response, which is JSON or empty.

    Raises ControlRefused with the worker's error for a status of 400 or above. Raises ControlUnreachable for a redirect, for a body that is
    encoded or too large, and for a success with another type of content.
    """
    status = response.status
    if status < 200 or 300 <= status < 400:
        raise ControlUnreachable(
            f"{request_line}: answered with status {status}, expected a result or an error; the operator follows no redirect"
        )
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ControlUnreachable(f"{request_line}: the answer is encoded as {plain_text(encoding, 32)}, expected plain JSON")
    is_json = response.content_type == "application/json"
    if status >= 400:
        raise ControlRefused(_wire_error(await _bounded(response, request_line, ANSWER_BYTES) if is_json else b"", status), status=status)
    return await _bounded(response, request_line, most) if is_json else await _bounded(response, request_line, 0, response.content_type)


async def _bounded(response: aiohttp.ClientResponse, request_line: str, most: int, found_type: str = "") -> bytes:
    """Read the body of a response, at most `most` bytes; raise ControlUnreachable if it is larger.

    Reading stops at the bound, since a worker may announce a false length. If `found_type` is given, the error is about that content type
    instead of the size.
    """
    content = bytearray()
    if (response.content_length or 0) <= most:
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > most:
                break
        else:
            return bytes(content)
    if found_type:
        raise ControlUnreachable(f"{request_line}: the answer is of type {plain_text(found_type, 64)}, expected application/json")
    raise ControlUnreachable(f"{request_line}: the answer is larger than {most} bytes")


def _fault(error: aiohttp.ClientError | ValueError) -> str:
    """Return the system's words if the connection failed. Otherwise name the error alone, and nothing that the answer had in it."""
    return str(error) if isinstance(error, aiohttp.ClientOSError) else f"no complete and valid HTTP answer ({type(error).__name__})"


def _wire_error(content: bytes, status: int) -> WireError:
    """Return the worker's error, or one that has the status alone: a body of another shape reaches nobody."""
    try:
        return msgspec.json.decode(content, type=WireError)
    except (ValueError, RecursionError):
        message = f"the worker answered with status {status} and a body that is not one of its errors"
        return WireError(code=f"Http{status}", message=message, retryable=status >= 500)
