# SPDX-License-Identifier: Apache-2.0
"""Adapters of a deployment counted by their marks, and named as far as anybody reads."""

from collections import Counter
from collections.abc import Mapping
from itertools import islice

import msgspec

from diffusion_operator.api.deployment_status import AdaptersStatus
from diffusion_operator.plan.adapters.view import BROKEN, READY, REFUSED, WANTED, AdapterView

NAMED = 20
"""Names in a message; of more it says how many."""


class Tally(msgspec.Struct, frozen=True):
    views: Mapping[str, AdapterView] = {}
    """Views by UID, in the order of precedence."""
    marks: Mapping[str, int] = {}
    counts: Mapping[int, int] = {}
    """Views by their marks."""

    @property
    def summary(self) -> AdaptersStatus:
        return AdaptersStatus(desired=self.count(WANTED), ready=self.count(READY), failed=self.count(REFUSED | BROKEN))

    def count(self, any_of: int, *, none_of: int = 0) -> int:
        return sum(number for marks, number in self.counts.items() if marks & any_of and not marks & none_of)

    def first(self, any_of: int) -> AdapterView | None:
        return next((self.views[uid] for uid, marks in self.marks.items() if marks & any_of), None) if self.count(any_of) else None

    def names(self, any_of: int, *, none_of: int = 0) -> str:
        """Format the names of adapters with a mark of `any_of` and none of `none_of`, as `a, b, c and 17 more`.

        At most 20 are named; empty without any.
        """
        having = (uid for uid, marks in self.marks.items() if marks & any_of and not marks & none_of)
        names = [self.views[uid].decision.adapter.metadata.name for uid in islice(having, NAMED)]
        more = self.count(any_of, none_of=none_of) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")


def tally_of(views: Mapping[str, AdapterView], marks: Mapping[str, int]) -> Tally:
    return Tally(views=views, marks=marks, counts=Counter(marks.values()))
