# SPDX-License-Identifier: Apache-2.0
"""The proof that a worker gives on each new connection, before it is sent the control token.

An address may belong to another pod by the time it is called. So the client opens a connection by asking for a proof, with a nonce of its
own. It sends the token only on a connection that was opened so. The proof is an HMAC with the token over the nonce, the address that was
called and the pod's UID; see the worker's `server/control/identity.py`.
"""

import hashlib
import hmac
import secrets
import socket
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec

PATH = "/v1/identity"
POD_UID_HEADER = "X-Pod-UID"
CONTEXT = "diffusion-worker identity"
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 5, 5, 3
"""The kernel finds out within twenty seconds that a worker is cut off, however long its answer may take."""


class NeedsProof(Exception):
    """There is no open connection on which the worker has proved itself."""


class Identity(msgspec.Struct, frozen=True, rename="camel"):
    """The answer of `GET /v1/identity`."""

    pod_uid: str
    proof: str


def new_nonce() -> str:
    """Return a nonce that nobody can guess."""
    return secrets.token_hex(32)


def proves(identity: Identity, *, token: str, nonce: str, address: str) -> bool:
    """Return whether the worker that answered has the token, and was called at this address."""
    message = "\n".join((CONTEXT, nonce, address, identity.pod_uid)).encode()
    expected = hmac.new(token.encode(), message, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected.encode(), identity.proof.encode())


def only_proven() -> aiohttp.TraceConfig:
    """Return a trace that lets a request open a connection only if its context says that it may.

    Any other request that needs a new one raises NeedsProof.
    """
    trace = aiohttp.TraceConfig()

    async def refuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
        if not context.trace_request_ctx:
            raise NeedsProof

    trace.on_connection_create_start.append(refuse)
    return trace


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
