# SPDX-License-Identifier: Apache-2.0
"""The control tokens of one deployment through a rotation of the operator's key: the current key's, and those of the keys before it.

A worker has the new token when the kubelet has brought it, a minute or two after the Secret changed, and an operator may restart
in between. So a call that a worker answers with 401 is made again with the next token. The token that a worker took is tried first
from then on.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.errors import ControlRefused
from diffusion_operator.render.control_secret import control_token
from diffusion_operator.settings import Settings

UNAUTHORIZED = 401
Answer = TypeVar("Answer")


class ControlTokens:
    def __init__(self, settings: Settings, deployment: ObjectMeta) -> None:
        self._tokens = tuple(control_token(key, deployment) for key in (settings.operator_key, *settings.previous_keys))
        self._taken: dict[str, str] = {}
        """By IP, which tells workers apart for as long as a rotation takes."""

    async def call(self, ip: str, send: Callable[[str], Awaitable[Answer]]) -> Answer:
        """What `send` answers, or how it fails, with the first token that the worker takes."""
        first = self._taken.get(ip, self._tokens[0])
        *before, last = (first, *(token for token in self._tokens if token != first))
        for token in before:
            try:
                return await self._call(ip, token, send)
            except ControlRefused as error:
                if error.status != UNAUTHORIZED:
                    raise
        return await self._call(ip, last, send)

    async def _call(self, ip: str, token: str, send: Callable[[str], Awaitable[Answer]]) -> Answer:
        answer = await send(token)
        self._taken[ip] = token
        return answer

    def forget_others(self, ips: set[str]) -> None:
        """Of workers that are gone."""
        self._taken = {ip: token for ip, token in self._taken.items() if ip in ips}
