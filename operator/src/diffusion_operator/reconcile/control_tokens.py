# SPDX-License-Identifier: Apache-2.0
"""The control tokens of one deployment through a rotation of the operator's key: the current key's, and those of the keys before it.

The kubelet brings a new token to a worker a minute or two after the Secret changed. An operator may restart in between. A pod that was
adopted may have the token of the object for which it was made. So a call that a worker answers with 401 is made again with the next token.
The token that a worker took is tried first from then on.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.errors import ControlRefused
from diffusion_operator.render.control_secret import control_token
from diffusion_operator.settings import Settings

UNAUTHORIZED = 401
Answer = TypeVar("Answer")


class ControlTokens:
    def __init__(self, settings: Settings, deployment: ObjectMeta) -> None:
        self._keys = (settings.operator_key, *settings.previous_keys)
        self._deployment = deployment
        self._tokens = self._of_object(deployment.uid)
        self._inherited: dict[str, str] = {}
        """The UID of the earlier object for which a worker's pod was made, by IP."""
        self._taken: dict[str, str] = {}
        """The token last accepted, by IP: an address identifies a worker for as long as a rotation takes."""

    async def call(self, ip: str, send: Callable[[str], Awaitable[Answer]]) -> Answer:
        """Return the answer of `send` with the first token that the worker accepts, which is tried first from then on.

        A token that is answered with 401 is followed by the next; the last 401, and any other failure, is raised.
        """
        tokens = (*self._tokens, *(self._of_object(self._inherited[ip]) if ip in self._inherited else ()))
        first = self._taken.get(ip, tokens[0])
        others = [token for token in tokens if token != first]
        left = [first, *others, first] if others else [first]  # the worker may have got the first one between two tries
        while True:
            token = left.pop(0)
            try:
                answer = await send(token)
            except ControlRefused as error:
                if error.status != UNAUTHORIZED or not left:
                    raise
            else:
                self._taken[ip] = token
                return answer

    def inherit(self, uids: Mapping[str, str]) -> None:
        """Note the workers, by IP, whose pods were made for an earlier object of this name, in place of those noted before.

        The tokens of that object are tried last.
        """
        self._inherited = dict(uids)

    def _of_object(self, uid: str) -> tuple[str, ...]:
        return tuple(control_token(key, msgspec.structs.replace(self._deployment, uid=uid)) for key in self._keys)

    def forget_others(self, ips: set[str]) -> None:
        """Drop the token of each worker whose address is not in `ips`: another pod may get that address."""
        self._taken = {ip: token for ip, token in self._taken.items() if ip in ips}
