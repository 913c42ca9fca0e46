# SPDX-License-Identifier: Apache-2.0
"""The names whose adapters changed, in the order of the revisions that published the changes: for pages of differences.

A name is the unit: a client is sent all adapters of a name that changed, or that the name is gone.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

# Removed names that are remembered for clients that ask for differences; a client that missed more of them is sent everything.
MOST_GONE = 1024


class Place(NamedTuple):
    """The last change of a name: the number of its revision, and its position among all changes."""

    number: int
    position: int


class AdapterChanges:
    """The last change of each name's adapters. At most `MOST_GONE` names whose adapters are all removed are remembered."""

    def __init__(self) -> None:
        self._known: dict[str, Place] = {}
        self._gone: dict[str, Place] = {}
        self._positions = itertools.count(1)
        # Changes up to this revision may be missing.
        self._forgotten = 0

    def add(self, name: str, number: int, *, gone: bool) -> None:
        """Record that revision `number` published a change of a name's adapters; with `gone` none of them is left.

        It replaces the name's earlier change and becomes the newest of all. Beyond `MOST_GONE` removed names the oldest is forgotten.
        """
        self._known.pop(name, None)
        self._gone.pop(name, None)
        (self._gone if gone else self._known)[name] = Place(number, next(self._positions))
        if len(self._gone) > MOST_GONE:
            oldest = next(iter(self._gone))
            self._forgotten = self._gone.pop(oldest).number

    def knows_since(self, number: int) -> bool:
        """Return whether all changes after a revision are known; False if a removal after it is forgotten."""
        return number >= self._forgotten

    def position_at(self, number: int) -> int:
        """Return the position of the last change that revisions up to `number` published, removed names left out; 0 without any.

        `after` that position yields the names that changed after the revision.
        """
        return next((place.position for place in reversed(self._known.values()) if place.number <= number), 0)

    def after(self, position: int) -> Iterator[tuple[str, int]]:
        """Yield each name whose last change is after a position, with that change's position, oldest first; removed names are left out."""
        later: list[tuple[str, int]] = []
        for name, place in reversed(self._known.items()):
            if place.position <= position:
                break
            later.append((name, place.position))
        return reversed(later)

    def gone_since(self, number: int) -> list[str]:
        """Return the names removed after a revision and not added again, oldest first; forgotten ones are missing (see `knows_since`)."""
        return [name for name, place in self._gone.items() if place.number > number]
