# SPDX-License-Identifier: Apache-2.0
"""Seconds of steps by class and batch size, learned from the ranks' reports; other classes are scaled by their pixels. Pure."""

from diffusion_worker.engine.scheduling.cost_curve import CostCurve
from diffusion_worker.engine.scheduling.request_class import RequestClass
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import TickDone, WarmTick
from diffusion_worker.recent import Recent

# Seconds assumed for a pixel of a step until the first report; only comparisons between classes use it.
GUESSED_PIXEL_S = 1e-7
# Classes whose costs are remembered while they have no requests.
REMEMBERED_CLASSES = 256


class StepCosts:
    """The cost curves of all classes."""

    def __init__(self) -> None:
        self._curves: Recent[RequestClass, CostCurve] = Recent(REMEMBERED_CLASSES)
        self._pixel_s: float | None = None
        # Times of the warm-up; these include the first run of everything, so only deadlines use them.
        self._warm: dict[RequestClass, WarmTick] = {}

    def warmed_up(self, kind: RequestClass, tick: WarmTick) -> None:
        """Take what the ticks of a class took in the warm-up; of several variants the longest counts."""
        if kind not in self._warm or self._warm[kind].longest_s < tick.longest_s:
            self._warm[kind] = tick

    def has_measured(self, kind: RequestClass) -> bool:
        """Return whether a step of this class was measured."""
        curve = self._curves.get(kind)
        return curve is not None and curve.measured

    def step_s(self, kind: RequestClass, batch: int) -> float:
        """Estimate the seconds of a step of `batch` requests of a class; without measurements of the class a guess by its pixels."""
        curve = self._curves.get(kind)
        measured = curve.seconds(batch) if curve else None
        return kind.load * (self._pixel_s or GUESSED_PIXEL_S) * batch if measured is None else measured

    def careful_step_s(self, kind: RequestClass, batch: int) -> float | None:
        """Return the seconds that a step may be expected to take at most; None before anything was measured.

        A class without measurements is scaled from the nearest smaller one, or else the smallest. Attention makes a step grow with the
        square of its pixels.
        """
        curve = self._curves.get(kind)
        if curve is not None and (measured := curve.seconds(batch)) is not None:
            return measured
        known = {other: tick.step_s / tick.images for other, tick in self._warm.items()}
        known |= {other: seconds for other, curve in self._curves.items() if (seconds := curve.seconds(1)) is not None}
        if not known:
            return None
        smaller = [other for other in known if other.load <= kind.load]
        nearest = max(smaller, key=_load) if smaller else min(known, key=_load)
        return known[nearest] * batch * _growth(nearest, kind)

    def once_s(self, kind: RequestClass) -> float:
        """Return the seconds that all that comes once took in the warm-up, scaled to a class; 0 without a warm-up."""
        return max((tick.longest_s * _growth(other, kind) for other, tick in self._warm.items()), default=0.0)

    def batch(self, kind: RequestClass, demand: int) -> int:
        """Return the batch size for `demand` requests of a class that makes an image cheapest; all of them before the first report."""
        curve = self._curves.get(kind)
        return curve.batch(demand) if curve else demand

    def observe(self, kind: RequestClass, batch: int, denoising: int, done: TickDone) -> None:
        """Learn from the report of a step in which `batch` requests were denoised, and `denoising` were expected to be."""
        curve = self._curves.get(kind) or CostCurve()
        self._curves[kind] = curve
        seconds = done.denoise_seconds or done.seconds
        if done.split:
            # A call that one bad request broke says nothing about the others.
            if all(failure.error.code == ErrorCode.INSUFFICIENT_MEMORY for failure in done.failed):
                curve.split(denoising)
        elif seconds > 0:
            curve.observe(batch, seconds)
            self._pixel_s = seconds / (batch * kind.load)


def _load(kind: RequestClass) -> float:
    return kind.load


def _growth(known: RequestClass, kind: RequestClass) -> float:
    """Return the factor by which a step of a class may take longer than one of a known class; never less than 1."""
    return max(1.0, kind.load / known.load) ** 2
