# SPDX-License-Identifier: Apache-2.0
"""A dict of a bounded size. Pure."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict of the `most` entries that were set last: `d[key] = value` puts a key at the end, and drops the first beyond `most`.

    Reading changes no order. Only this form is bounded, not `update`, `setdefault` or the like.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
