# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of both ports against pages of other origins in a user's browser.

A browser lets any page send a form to any address, and a name that an attacker owns may resolve to 127.0.0.1. Programs send no
`Origin`, so only pages are refused.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.schemas.problems import error_answer, shortened

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
ANY_ORIGIN = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}

# A host and a port.
Place = tuple[str, int]


class OwnOrigin:
    """ASGI middleware that answers 403 to a change by a page of an origin that is neither the host's own nor `allowed` (`*`: any).

    A request without `Origin`, as programs send it, passes. With `local`, every `Host` is refused but loopback and hosts of `allowed`.
    """

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str] = (), local: bool = False) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._local = local
        self._hosts = {urlsplit(origin).hostname for origin in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := self._why_refused(scope["method"], Headers(scope=scope))):
            await error_answer(RequestError(ErrorCode.FORBIDDEN, why), Request(scope))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _why_refused(self, method: str, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._local and not self._may_name(host):
            return (
                f"Host: expected localhost or a loopback address, as this port requires no key or token, found {shortened(host) or 'none'}"
            )
        if method in SAFE_METHODS or origin is None or origin in self._allowed or ANY_ORIGIN in self._allowed:
            return None
        if _is_place_of(origin, host):
            return None
        return f"Origin: expected this host's origin, or one of --cors-origin, found {shortened(origin)}"

    def _may_name(self, host: str) -> bool:
        place = _place(f"http://{host}")
        return place is not None and (is_loopback(place[0]) or place[0] in self._hosts)


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's own, judged by its form alone."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_place_of(origin: str, host: str) -> bool:
    """Return whether an origin is at the host of a request. The scheme does not count, as a proxy may have ended the TLS."""
    place = _place(origin)
    return place is not None and place == _place(f"{origin.partition('://')[0]}://{host}")


def _place(address: str) -> Place | None:
    """Return the host of a URL, and its port or its scheme's default one; None for a malformed URL or one without a host."""
    try:
        parts = urlsplit(address)
        port = parts.port or DEFAULT_PORTS[parts.scheme]
    except (ValueError, KeyError):
        return None
    return (parts.hostname, port) if parts.hostname else None
