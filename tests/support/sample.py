# SPDX-License-Identifier: Apache-2.0
"""Seeded samples of cases: `make test` takes a sample, and `make soak`, which sets WHOLE=1, takes every case."""

import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

WHOLE = os.environ.get("WHOLE") == "1"
SEED = 23

Case = TypeVar("Case")


def sample(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` of the cases in their order, the same ones in each run; all of them with WHOLE=1."""
    if WHOLE or count >= len(cases):
        return list(cases)
    chosen = random.Random(SEED).sample(range(len(cases)), count)
    return [cases[index] for index in sorted(chosen)]


def one_of_each(cases: Iterable[Case], kind: Callable[[Case], Hashable]) -> list[Case]:
    """Return one case of each kind, the same ones in each run; all cases with WHOLE=1."""
    kinds: dict[Hashable, list[Case]] = {}
    for case in cases:
        kinds.setdefault(kind(case), []).append(case)
    return [case for group in kinds.values() for case in sample(group, 1)]
