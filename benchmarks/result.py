# SPDX-License-Identifier: Apache-2.0
"""The result of a benchmark."""

from collections.abc import Sequence

import msgspec

from benchmarks.pairs import Pairs


class Measured(msgspec.Struct, frozen=True):
    """The result of a goal: its figures by name, the targets for some of them, and all samples from which they were computed.

    `pairs` are the comparisons behind the ratios, empty for a benchmark that compares nothing. Raises RuntimeError for a target without a
    figure.
    """

    figures: dict[str, float]
    targets: dict[str, str]
    samples: Sequence[dict[str, float]]
    pairs: Sequence[Pairs] = ()

    def __post_init__(self) -> None:
        if missing := self.targets.keys() - self.figures.keys():
            raise RuntimeError(f"expected a figure for each target, found none for {', '.join(sorted(missing))}")

    @property
    def results(self) -> dict[str, float]:
        """The figures that have a target."""
        return {name: self.figures[name] for name in self.targets}

    @property
    def beside(self) -> dict[str, float]:
        """All other figures, for the record."""
        return {name: value for name, value in self.figures.items() if name not in self.targets}

    @property
    def rounds(self) -> dict[str, float]:
        """Counts of used and dropped pairs over all comparisons, and the largest `spread` among these; empty without comparisons."""
        if not self.pairs:
            return {}
        used, dropped = sum(len(pairs.used) for pairs in self.pairs), sum(len(pairs.dropped) for pairs in self.pairs)
        return {"used": used, "dropped": dropped, "spread": round(max(pairs.spread() for pairs in self.pairs), 3)}
