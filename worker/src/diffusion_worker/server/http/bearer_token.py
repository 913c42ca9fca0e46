# SPDX-License-Identifier: Apache-2.0
"""The bearer tokens of the control port and of the API: read from a file, and read again whenever it changes, as in a rotation."""

import hashlib
import hmac
import logging
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.server.schemas.problems import error_answer

log = logging.getLogger(__name__)


class TokenFile:
    """A file with one token, read again whenever it changes; `option` is the command line's option that names it.

    With `pod_uid`, the HMAC of that UID with the token is accepted, too. While the file is unreadable or empty, every token is wrong.
    """

    def __init__(self, path: Path, option: str, *, pod_uid: str = "") -> None:
        self._path = path
        self._option = option
        self._pod_uid = pod_uid.encode()
        self._stamp: tuple[int, int, int] | None = None
        self._token = b""

    def require(self) -> None:
        """Check at start that the file can be read and holds more than whitespace; otherwise raise ConfigError, which names the option."""
        try:
            token = self._path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{self._option} {str(self._path)!r}: cannot be read: {error.strerror}") from None
        if not token:
            raise ConfigError(f"{self._option} {str(self._path)!r}: expected a token in it, found nothing")

    def accepts(self, authorization: str | None) -> bool:
        """Compare the header with the token now in the file, in constant time; False for another scheme, or while there is no token."""
        scheme, _, word = (authorization or "").partition(" ")
        given, token = word.strip().encode("utf-8", "surrogateescape"), self._current()
        # Both comparisons run in any case, so that the time reveals nothing about the token.
        is_token = hmac.compare_digest(given, token)
        is_for_pod = hmac.compare_digest(given, hmac.new(token, self._pod_uid, hashlib.sha256).hexdigest().encode())
        return (is_token or (is_for_pod and bool(self._pod_uid))) and bool(token) and scheme.lower() == "bearer"

    def _current(self) -> bytes:
        try:
            # `stat` follows the symbolic link that Kubernetes swaps when a mounted Secret changes: the inode is then another one.
            stat = self._path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                self._token = self._path.read_bytes().strip()
                self._stamp = stamp
        except OSError as error:
            if self._stamp is not None:
                log.warning("the file of %s cannot be read any more, so requests that need its token are refused: %s", self._option, error)
            self._token, self._stamp = b"", None
        return self._token


class RequireToken:
    """ASGI middleware that answers 401, without reading the body, to a request to a guarded path that lacks the right token.

    A path is guarded if `guards` returns True for it; the answer has the name of the `credential`.
    """

    def __init__(self, app: ASGIApp, token_file: TokenFile, *, credential: str, guards: Callable[[str], bool]) -> None:
        self._app = app
        self._token_file = token_file
        self._credential = credential
        self._guards = guards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._guards(scope["path"]):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        authorization = request.headers.get("authorization")
        if self._token_file.accepts(authorization):
            await self._app(scope, receive, send)
            return
        found = "something else" if authorization else "no such header"
        error = RequestError(ErrorCode.UNAUTHORIZED, f"expected {self._credential} in the header 'Authorization: Bearer …', found {found}")
        await error_answer(error, request, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
