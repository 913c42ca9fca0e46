# SPDX-License-Identifier: Apache-2.0
"""Places where the operator may die: before and after each of its actions on the cluster or on a worker.

The two ports are wrapped, so new actions of the operator become places too. Reads are no places: they change nothing. Real: the ports and
what they do. Not real: the death in virtual time, which is an exception.
"""

import functools
from collections.abc import Awaitable, Callable, Collection
from typing import Any

Action = Callable[..., Awaitable[Any]]
LOOKS = frozenset(
    {"get", "look_up", "list", "pages", "watch", "adapter_versions", "published_kinds", "warnings", "state", "try_create", "close"}
)


class OperatorDied(BaseException):
    """The end of the operator at a place. It derives from BaseException, so that the operator's handlers of Exception cannot catch it."""


class FaultPoints:
    """A counter of the places that are passed, which dies at one of them; no action happens after that."""

    def __init__(self, die: Callable[[str], None], *, at: int | None = None) -> None:
        """Count from 1 up to the place `at`, and call `die` with that place; None: never die."""
        self._die = die
        self._at = at
        self.passed: list[str] = []

    def wrap(self, port: Any) -> Any:
        """Return a stand-in for a port that passes a place before and after each of its actions. Reads, listed in `LOOKS`, stay as they
        are."""
        return Wrapped(port, self._act, unwrapped=LOOKS)

    def reach(self, place: str) -> None:
        """Record a place as passed, and call `die` if it is the one to die at. Every later call raises OperatorDied."""
        if self._at is not None and len(self.passed) >= self._at:
            raise OperatorDied(self.passed[-1])
        self.passed.append(place)
        if len(self.passed) == self._at:
            self._die(place)

    async def _act(self, name: str, action: Action, *given: Any, **more: Any) -> Any:
        what = f"{name} {_about(given)}"
        self.reach(f"before {what}")
        result = await action(*given, **more)
        self.reach(f"after {what}")
        return result


class Wrapped:
    """A port whose actions go through `act`, which gets the name, the action and its arguments.

    Names in `unwrapped`, private names and plain attributes are the port's own.
    """

    def __init__(self, port: Any, act: Action, *, unwrapped: Collection[str] = ()) -> None:
        self._port = port
        self._act = act
        self._unwrapped = unwrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._port, name)
        if name in self._unwrapped or name.startswith("_") or not callable(found):
            return found
        return functools.partial(self._act, name, found)


def _about(given: tuple[Any, ...]) -> str:
    """Return the subject of an action for people to read: kind and name of an object, or the type of its first argument."""
    first = given[0] if given else None
    if isinstance(first, dict):
        return f"{first['kind']} {first['metadata']['name']}"
    if len(given) > 2:
        return f"{first.kind} {given[2]}"
    return type(first).__name__
