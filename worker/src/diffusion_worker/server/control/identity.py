# SPDX-License-Identifier: Apache-2.0
"""The proof that a worker is the one that a client means, before the client sends it the control token.

An address may belong to another pod by the time it is called. So a client asks first, with a nonce of its own. The proof is an HMAC
with the control token over the nonce, the address that was called and the pod's UID. It reveals the token to nobody. A pod that passes
the question on to the real worker gets a proof for another address.
"""

import ipaddress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.http.bearer_token import TokenFile
from diffusion_worker.server.schemas.control import ERRORS

PATH = "/v1/identity"
POD_UID = b"X-Pod-UID"
CONTEXT = "diffusion-worker identity"

router = APIRouter()


class IdentityQuery(BaseModel):
    """Query of `GET /v1/identity`."""

    model_config = ConfigDict(extra="forbid")

    nonce: Annotated[
        str,
        Field(
            pattern=r"^[0-9a-f]+$",
            min_length=32,
            max_length=128,
            description="Random hexadecimal digits of the caller, over which the worker makes its proof.",
        ),
    ]


class IdentityAnswer(BaseModel):
    """The worker's identity. `podUid` is empty if the pod's template does not set it; `proof` is in hexadecimal digits."""

    podUid: str
    proof: str


@router.get(PATH, responses=ERRORS)
async def identity(query: Annotated[IdentityQuery, Query()], request: Request) -> IdentityAnswer:
    """Prove that this worker has the control token, without revealing it; the call needs no token."""
    token_file: TokenFile = request.app.state.token_file
    pod_uid: str = request.app.state.engine.pod_uid
    proof = token_file.sign("\n".join((CONTEXT, query.nonce, _address(request), pod_uid)).encode())
    if proof is None:
        raise RequestError(
            ErrorCode.STARTING, "the worker cannot read its control token now, because the file is unreadable or empty", retry_after_s=1.0
        )
    return IdentityAnswer(podUid=pod_uid, proof=proof)


def _address(request: Request) -> str:
    """Return the local IP address that the client has called, an IPv4 one always in IPv4's form; empty if it is unknown."""
    host = (request.scope.get("server") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


class NamePod:
    """ASGI middleware that adds the pod's UID as `X-Pod-UID` to every answer of the application that it wraps."""

    def __init__(self, app: ASGIApp, pod_uid: str) -> None:
        self._app = app
        self._pod_uid = pod_uid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[POD_UID.decode()] = self._pod_uid
            await send(message)

        await self._app(scope, receive, named)
