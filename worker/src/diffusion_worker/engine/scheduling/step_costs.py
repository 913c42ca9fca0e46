# SPDX-License-Identifier: Apache-2.0
"""Seconds of steps by class and batch size, learned from the ranks' reports; other classes are scaled by their pixels. Pure."""

from diffusion_worker.engine.scheduling.cost_curve import CostCurve
from diffusion_worker.engine.scheduling.request_class import RequestClass
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import TickDone

# Seconds assumed for a pixel of a step until the first report; only comparisons between classes use it.
GUESSED_PIXEL_S = 1e-7
# Classes whose costs are remembered while they have no requests.
REMEMBERED_CLASSES = 256


class StepCosts:
    """The cost curves of all classes."""

    def __init__(self) -> None:
        self._curves: dict[RequestClass, CostCurve] = {}
        self._pixel_s: float | None = None

    @property
    def measured(self) -> bool:
        """Return whether any step was measured."""
        return self._pixel_s is not None

    def has_measured(self, kind: RequestClass) -> bool:
        """Return whether a step of this class was measured."""
        curve = self._curves.get(kind)
        return curve is not None and curve.measured

    def step_s(self, kind: RequestClass, batch: int) -> float:
        """Estimate the seconds of a step of so many requests of a class."""
        curve = self._curves.get(kind)
        measured = curve.seconds(batch) if curve else None
        return kind.load * (self._pixel_s or GUESSED_PIXEL_S) * batch if measured is None else measured

    def batch(self, kind: RequestClass, demand: int) -> int:
        """Return the batch size for `demand` requests of a class that makes an image cheapest."""
        curve = self._curves.get(kind)
        return curve.batch(demand) if curve else demand

    def observe(self, kind: RequestClass, batch: int, denoising: int, done: TickDone) -> None:
        """Learn from the report of a step in which `batch` requests were denoised, and `denoising` were expected to be."""
        curve = self._curves.pop(kind, None) or CostCurve()
        self._curves[kind] = curve  # the newest last
        while len(self._curves) > REMEMBERED_CLASSES:
            del self._curves[next(iter(self._curves))]
        seconds = done.denoise_seconds or done.seconds
        if done.split:
            # A call that one bad request broke says nothing about the others.
            if all(failure.error.code == ErrorCode.INSUFFICIENT_MEMORY for failure in done.failed):
                curve.split(denoising)
        elif seconds > 0:
            curve.observe(batch, seconds)
            self._pixel_s = seconds / (batch * kind.load)
