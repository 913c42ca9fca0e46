# SPDX-License-Identifier: Apache-2.0
"""The one HTTP client of all sources: it goes to allowed schemes and addresses only, at every hop of every request.

A name is resolved here, its addresses are checked, and the connection goes to the very address that was checked.
"""

from collections.abc import Iterable

import httpcore2
import httpx2

from diffusion_worker.errors import ErrorCode
from diffusion_worker.sources.transport_rules import Reach, allowed_addresses, require_scheme

MAX_REDIRECTS = 5
CONNECT_TIMEOUT_S = 10.0


class CheckedBackend(httpcore2.SyncBackend):
    """A network backend that connects only to addresses it has checked."""

    def __init__(self, reach: Reach) -> None:
        super().__init__()
        self._reach = reach

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Resolve a host, check all its addresses, and try them in turn until a connection succeeds.

        Raises:
            RequestError: NetworkError for an unknown host, or one with any address out of bounds. ConnectError, ConnectTimeout: the
                last address failed too.
        """
        failure: Exception = httpcore2.ConnectError("the host has no address")
        for address in allowed_addresses(host, port, self._reach):
            try:
                return super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class CheckedTransport(httpx2.HTTPTransport):
    """A transport that checks scheme and addresses of every request, redirects among them."""

    def __init__(self, *, allow_http: bool, reach: Reach) -> None:
        # The base class's constructor is not called: it takes no backend, and would read the certificates a second time.
        self._allow_http = allow_http
        self._pool = httpcore2.ConnectionPool(
            ssl_context=httpx2.create_ssl_context(), max_connections=8, keepalive_expiry=30.0, network_backend=CheckedBackend(reach)
        )

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, unless it is plain http and that is not allowed; the client calls this again for each redirect.

        Raises:
            RequestError: NetworkError for the scheme, before a connection is made, or for an address.
        """
        require_scheme(request.url.scheme, allow_http=self._allow_http, code=ErrorCode.NETWORK_ERROR)
        return super().handle_request(request)


def checked_client(*, allow_http: bool, reach: Reach, read_timeout_s: float) -> httpx2.Client:
    """Return a client over `CheckedTransport` that follows `MAX_REDIRECTS`, and takes no proxy or credentials from the environment."""
    return httpx2.Client(
        transport=CheckedTransport(allow_http=allow_http, reach=reach),
        follow_redirects=True,
        max_redirects=MAX_REDIRECTS,
        trust_env=False,
        timeout=httpx2.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S),
    )
