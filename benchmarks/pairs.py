# SPDX-License-Identifier: Apache-2.0
"""Adjacent pairs: a ratio that a noisy machine can be asked for.

A pair is one half of the baseline, the work that is measured, and the other half of the baseline, one right after the other. Noise that
lasts longer than a pair is in all three and cancels. Noise that comes or goes within a pair makes the halves differ. Such a pair is
dropped before its ratio is computed, and taken again up to a bound. The ratio never decides, so nothing is chosen by its result.
"""

import math
import statistics
import time
from collections.abc import Callable

import msgspec

# Figures of one run by name: `s` on the wall's clock, `cpu_s` computed by this process, and all else that a benchmark reads off it.
Times = dict[str, float]
Run = Callable[[], Times]


class Plan(msgspec.Struct, frozen=True):
    """The number of pairs that is wanted, and the bounds of trying.

    With fewer than `least` good ones the result is an error. At most `at_most` are taken, within about `within_s` seconds.
    `noise` is how far apart the halves of a baseline may be, as a share of the smaller one.
    """

    wanted: int = 9
    least: int = 5
    at_most: int = 30
    noise: float = 0.10
    within_s: float = 180.0


# A single pair always counts: figures of a tiny run are not judged.
TINY_PLAN = Plan(wanted=1, least=1, at_most=1, noise=math.inf)


class Pair(msgspec.Struct, frozen=True):
    """The halves of a baseline and the run between them; `number` counts the pairs as they were taken."""

    number: int
    before: Times
    ours: Times
    after: Times

    def baseline(self, name: str) -> float:
        """Return the mean of a figure of the baseline, which ran before ours and after it."""
        return (self.before[name] + self.after[name]) / 2

    def apart(self, name: str) -> float:
        """Return by how much the baseline's two halves differ in a figure: 0.1 is 10 % above the smaller.

        Infinite if the smaller is not positive.
        """
        low, high = sorted((self.before[name], self.after[name]))
        return high / low - 1 if low > 0 else math.inf

    def ratio(self, name: str, of: str | None = None) -> float:
        """Return our figure over the baseline's mean; `of` names the baseline's figure if it is another one than `name`."""
        return self.ours[name] / self.baseline(of or name)


class Pairs(msgspec.Struct, frozen=True):
    """The pairs of one comparison, judged by the figure `by` of their baselines."""

    what: str
    by: str
    used: list[Pair]
    dropped: list[Pair]

    def ratio(self, name: str | None = None, of: str | None = None) -> float:
        """Divide our figure by the baseline's in every pair that counts, and return the median of these ratios.

        Our figure is `name`, by default `self.by`. The baseline's is `of`, by default the same. For times, a ratio below 1 means that ours
        is faster.
        """
        return statistics.median(pair.ratio(name or self.by, of) for pair in self.used)

    def spread(self) -> float:
        """Return how widely the ratios of `by` scatter: maximum minus minimum, relative to their median."""
        ratios = [pair.ratio(self.by) for pair in self.used]
        return (max(ratios) - min(ratios)) / statistics.median(ratios)

    def ours(self, name: str) -> float:
        """Return a figure's median over the measured runs of the pairs that count; it has the figure's unit and decides nothing."""
        return statistics.median(pair.ours[name] for pair in self.used)

    def baseline(self, name: str) -> float:
        """Return a figure's median over the baselines of the pairs that count; each baseline is the mean of its two halves."""
        return statistics.median(pair.baseline(name) for pair in self.used)

    def samples(self) -> list[dict[str, float]]:
        """Return every pair as flat figures, those that count first; `used` is 1 for them and 0 for a dropped pair."""
        return [_flat(pair, used=1.0) for pair in self.used] + [_flat(pair, used=0.0) for pair in self.dropped]


class Taking:
    """Decides, pair by pair, if a pair counts and if another is to be taken. The caller runs the work and hands in the times.

    It reads nothing but the clock, which is in seconds and starts when it is made.
    """

    def __init__(self, what: str, *, by: str = "s", plan: Plan | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._by = by
        self._plan = plan or Plan()
        self._clock = clock
        self._ends_s = clock() + self._plan.within_s
        self._used: list[Pair] = []
        self._dropped: list[Pair] = []

    @property
    def number(self) -> int:
        """The number of the next pair, counted from 0 over used and dropped ones."""
        return len(self._used) + len(self._dropped)

    @property
    def wants_more(self) -> bool:
        """True if another pair is to be taken. False with enough pairs that count, after the most tries, or when the time is up.

        With fewer than the least that count, twice the time is given.
        """
        if len(self._used) >= self._plan.wanted or self.number >= self._plan.at_most:
            return False
        late_s = self._clock() - self._ends_s
        return late_s < 0 or (len(self._used) < self._plan.least and late_s < self._plan.within_s)

    def add(self, before: Times, ours: Times, after: Times) -> None:
        """Count a pair, or drop it if the halves of its baseline differ by more than the plan allows."""
        pair = Pair(self.number, before, ours, after)
        (self._used if pair.apart(self._by) <= self._plan.noise else self._dropped).append(pair)

    def done(self) -> Pairs:
        """Return the pairs that were taken.

        Raises:
            RuntimeError: too few pairs are left; it says how far the halves of the baseline were apart.
        """
        if len(self._used) < self._plan.least:
            apart = sorted(pair.apart(self._by) for pair in (*self._used, *self._dropped))
            shown = f"{apart[0]:.0%} to {apart[-1]:.0%}, {statistics.median(apart):.0%} at the median" if apart else "never taken"
            raise RuntimeError(
                f"{self._what}: of {self.number} pairs {len(self._used)} are left, expected {self._plan.least}: the halves of the baseline "
                f"differ by {shown}, {self._plan.noise:.0%} are allowed: the machine is too busy"
            )
        return Pairs(self._what, self._by, self._used, self._dropped)


def take_pairs(what: str, baseline: Run, ours: Run, *, by: str = "s", plan: Plan | None = None) -> Pairs:
    """Run baseline, ours and baseline again, until the plan has the pairs that it wants or has used up its tries or its time.

    Raises:
        RuntimeError: fewer pairs than the plan's least have a steady baseline: the machine is too busy.
    """
    taking = Taking(what, by=by, plan=plan)
    while taking.wants_more:
        taking.add(baseline(), ours(), baseline())
    return taking.done()


def timed(work: Callable[[], object]) -> Times:
    """Run `work` and measure how long it took, in seconds.

    `s` is wall-clock time. `cpu_s` and `thread_s` are CPU time, of the whole process and of the calling thread. The work's result is freed
    after the clocks are read.
    """
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    made = work()
    times = {"thread_s": time.thread_time() - thread, "cpu_s": time.process_time() - cpu, "s": time.perf_counter() - wall}
    del made
    return times


def _flat(pair: Pair, *, used: float) -> dict[str, float]:
    parts = (("before", pair.before), ("ours", pair.ours), ("after", pair.after))
    return {"pair": float(pair.number), "used": used} | {f"{part}_{name}": value for part, times in parts for name, value in times.items()}
