# SPDX-License-Identifier: Apache-2.0
"""Calls that the ranks have not all answered yet: the callers that wait, and the ranks that owe an answer."""

import asyncio
import itertools
import time
from collections.abc import Callable

from diffusion_worker.messages import RpcReply


class CallInFlight:
    """The replies to a call of `method`, by rank. `answered` is set when every rank that runs it has replied."""

    def __init__(self, method: str, ranks: set[int]) -> None:
        self.method = method
        self.replies: dict[int, RpcReply] = {}
        self.answered = asyncio.Event()
        self.overdue: asyncio.TimerHandle | None = None
        self._ranks = ranks

    @property
    def silent(self) -> list[int]:
        """Ranks that owe an answer."""
        return sorted(self._ranks - set(self.replies))

    def take(self, reply: RpcReply) -> None:
        """Record a rank's answer; the last one ends the wait."""
        self.replies[reply.rank] = reply
        if not self.silent:
            self.answered.set()


class CallsInFlight:
    """The calls that some rank has not answered, by id. They include those whose caller timed out, because they still occupy the ranks."""

    def __init__(self) -> None:
        # The time at which the ranks last completed a call; steps sent before it may have waited for that call.
        self.last_answer_at = time.monotonic()
        self._ids = itertools.count(1)
        self._calls: dict[int, CallInFlight] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, method: str, ranks: set[int]) -> tuple[int, CallInFlight]:
        """Create an entry for a call that these ranks will run; return its new id and the entry. Add it before the message is sent."""
        call_id = next(self._ids)
        call = self._calls[call_id] = CallInFlight(method, ranks)
        return call_id, call

    def take(self, reply: RpcReply) -> None:
        """Hand an answer to its call; ignore an answer to an unknown call."""
        call = self._calls.get(reply.call_id)
        if call is None:
            return
        call.take(reply)
        if call.answered.is_set():
            self._end(reply.call_id, call)

    def give_up(self, call_id: int, grace_s: float, overdue: Callable[[CallInFlight], None]) -> None:
        """Note that nobody waits for a call any more; do nothing if it is answered. The entry stays until the last answer.

        If ranks still owe an answer after `grace_s` seconds, `overdue` is called with the call.
        """
        call = self._calls.get(call_id)
        if call is not None:
            call.overdue = asyncio.get_running_loop().call_later(grace_s, overdue, call)

    def clear(self) -> None:
        """Drop every entry and cancel its timer: a generation that has ended sends no more replies."""
        for call in self._calls.values():
            if call.overdue is not None:
                call.overdue.cancel()
        self._calls.clear()

    def _end(self, call_id: int, call: CallInFlight) -> None:
        self.last_answer_at = time.monotonic()
        if call.overdue is not None:
            call.overdue.cancel()
        del self._calls[call_id]
