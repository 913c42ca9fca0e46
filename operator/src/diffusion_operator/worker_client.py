# SPDX-License-Identifier: Apache-2.0
"""The control API of one worker, as the operator uses it: typed answers, typed errors, a limit on every wait.

A call that outlives its limit is not a failure of the operation: the worker goes on, and the next state document tells. So such calls
raise ControlUnreachable and nothing is concluded from them.

A worker runs a container image of a tenant, so its answer may be anything. No redirect is followed, no proxy and no cookie is used, and
only an IP address is called. An answer is read up to a bound, is never decompressed, and is parsed before anything of it reaches a status.
The token goes to nobody that has not proved to have it, see worker_proof.py.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.api.merged_state import together
from diffusion_operator.api.names import CONTROL_PORT
from diffusion_operator.api.worker_state import WireError, WorkerState
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.results.actions import DrainWorker, PutAdapter, RemoveAdapter, SleepWorker, WakeWorker
from diffusion_operator.worker_proof import PATH as IDENTITY_PATH
from diffusion_operator.worker_proof import POD_UID_HEADER, Identity, NeedsProof, keepalive_socket, new_nonce, only_proven, proves

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
PROOF_TRIES = 3
UNAUTHORIZED = 401
CANNOT_PROVE = (UNAUTHORIZED, 404)
"""The first is what a worker answers that guards all paths alike, because it is of a version without the proof."""
PLAIN = {"Accept-Encoding": "identity"}


class WorkerClient(Protocol):
    """Interface to the workers' control API. Tests of the reconcile code replace it with scripted answers."""

    def expect_proof(self, ip: str, pod_uid: str) -> None:
        """Never take this pod's worker for one of a version that cannot prove itself."""

    def forget_pod(self, ip: str, pod_uid: str) -> None:
        """Drop what is remembered of a pod that is gone."""

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
            trace_configs=[only_proven()],
            timeout=aiohttp.ClientTimeout(total=None),  # each request has its own
        )
        self._proved: dict[str, str] = {}
        """UIDs of pods that have proved themselves, to this process or an earlier one, by address.

        They are never again taken for workers of a version that cannot.
        """
        self._cleared: dict[str, str] = {}
        """The token that may be sent on open connections, by address. A connection stays open after a proof that failed."""
        self._poll_timeout_s = poll_timeout_s
        self._call_timeout_s = call_timeout_s
        self._port = port
        self._epoch = epoch

    async def close(self) -> None:
        await self._session.close()

    def expect_proof(self, ip: str, pod_uid: str) -> None:
        self._proved[ip] = pod_uid

    def forget_pod(self, ip: str, pod_uid: str) -> None:
        if self._proved.get(ip, pod_uid) == pod_uid:  # else another pod has the address by now
            self._proved.pop(ip, None)
            self._cleared.pop(ip, None)

    async def state(self, ip: str, *, token: str, pod_uid: str = "", after: str = "", wait_s: float = 0.0) -> WorkerState:
        path = _state_path(after=after, wait=f"{wait_s:g}") if after else _state_path()
        timeout_s, most = wait_s + WAIT_GRACE_S if wait_s else self._poll_timeout_s, PAGE_BYTES if after else STATE_BYTES
        body = await self._send("GET", ip, path, token=token, pod_uid=pod_uid, timeout_s=timeout_s, most=most)
        pages = [_read_state(ip, body)]
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
        """Send a request on a connection that the worker has proved itself on, and return the body of the success, JSON or nothing.

        Raises ControlRefused with the worker's error. Raises ControlUnreachable without a complete answer within `timeout_s`.
        An answer of more than `most` bytes, or of another pod, raises ControlUnreachable, too.
        """
        request_line = f"{method} {path} of {ip}"
        headers, epoch = {"Authorization": f"Bearer {token}", **PLAIN}, self._epoch()
        if epoch is not None:
            headers[EPOCH_HEADER] = str(epoch)
        request = _Request(method, f"http://{_host(ip)}:{self._port}{path}", headers, body, pod_uid, request_line, most)
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(PROOF_TRIES):
                    if self._cleared.get(ip) == token:
                        with contextlib.suppress(NeedsProof):
                            return await self._once(request, opens=False)
                    self._cleared.pop(ip, None)
                    proven = await self._prove_in_time(ip, token=token, pod_uid=pod_uid)
                    self._cleared[ip] = token
                    if not proven:
                        return await self._once(request, opens=True)
            raise ControlUnreachable(f"{request_line}: the worker closed each connection after it had proved that it has the control token")
        except TimeoutError as error:
            raise ControlUnreachable(f"{request_line}: no complete answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ControlUnreachable(f"{request_line}: {_fault(error)}") from error

    async def _once(self, request: "_Request", *, opens: bool) -> bytes:
        """Send a request; it may open a connection if `opens`. Raises NeedsProof where it may not and there is none."""
        async with self._session.request(
            request.method,
            request.url,
            json=request.body,
            headers=request.headers,
            allow_redirects=False,
            trace_request_ctx=opens,
        ) as response:
            try:
                found = response.headers.get(POD_UID_HEADER, "")
                if found and request.pod_uid and found != request.pod_uid:
                    raise _another_pod(request, found)
                return await _read(response, request.line, request.most)
            except BaseException:
                response.close()  # whatever is still to come is not read, and not taken for the next answer
                raise

    async def _prove_in_time(self, ip: str, *, token: str, pod_uid: str) -> bool:
        """Have the worker prove itself, and raise ControlUnreachable if that takes longer than a look."""
        limit_s = self._poll_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._prove(ip, token=token, pod_uid=pod_uid)
        except TimeoutError as error:
            raise ControlUnreachable(f"GET {IDENTITY_PATH} of {ip}: no complete answer within {limit_s:g} s") from error

    async def _prove(self, ip: str, *, token: str, pod_uid: str) -> bool:
        """Have the worker prove itself on a new connection, which is then free for the request.

        False: it is of a version that cannot, and is called as ever.
        Raises ControlRefused with status 401 where it has another token, ControlUnreachable where another pod answered.
        """
        nonce, address = new_nonce(), str(ipaddress.ip_address(ip))
        request_line = f"GET {IDENTITY_PATH} of {ip}"
        url = f"http://{_host(ip)}:{self._port}{IDENTITY_PATH}?nonce={nonce}"
        request = _Request("GET", url, PLAIN, None, pod_uid, request_line, ANSWER_BYTES)
        try:
            body = await self._once(request, opens=True)
        except ControlRefused as error:
            if error.status in CANNOT_PROVE and (not pod_uid or self._proved.get(ip) != pod_uid):
                return False
            raise
        try:
            identity = msgspec.json.decode(body, type=Identity)
        except (ValueError, RecursionError) as error:
            raise ControlUnreachable(f"{request_line}: the worker's proof is not understood: {plain_text(str(error), 200)}") from error
        if identity.pod_uid and pod_uid and identity.pod_uid != pod_uid:
            raise _another_pod(request, identity.pod_uid)
        if not proves(identity, token=token, nonce=nonce, address=address):
            refusal = WireError(code="Unauthorized", message=f"{request_line}: the worker has not proved that it has the control token")
            raise ControlRefused(refusal, status=UNAUTHORIZED)
        self._proved[ip] = pod_uid
        return True


class _Request(NamedTuple):
    method: str
    url: str
    headers: dict[str, str]
    body: dict[str, Any] | None
    pod_uid: str
    line: str
    """The request in words, for errors."""
    most: int


def _another_pod(request: _Request, found: str) -> ControlUnreachable:
    """Return the error about an answer of another pod than the expected one."""
    return ControlUnreachable(
        f"{request.line}: another pod answered, with the UID {plain_text(found, 64)}, expected the pod with the UID {request.pod_uid}"
    )


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
