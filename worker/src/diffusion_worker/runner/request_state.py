# SPDX-License-Identifier: Apache-2.0
"""One request as a fiber: an unmodified pipeline that stops at every shared model call and after every step."""

import enum
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import greenlet
import msgspec

from diffusion_worker.messages import RequestSpec
from diffusion_worker.runner.calls import ModelCall
from diffusion_worker.runner.contents import Contents
from diffusion_worker.runner.own_precision import OwnPrecision
from diffusion_worker.runner.own_randomness import OwnRandomness


class StepBoundary(enum.Enum):
    """A fiber that stopped because `scheduler.step` returned."""

    STEP = "step"


class Done(msgspec.Struct, frozen=True):
    """The fiber ended; `frame` is what its body returned: for a request from the wire a picture, uint8 [height, width, 3]."""

    frame: Any


class Broken(msgspec.Struct, frozen=True):
    """The fiber ended with an exception; `asked` tells whether it had called a model before."""

    error: BaseException
    asked: bool


FiberEvent = ModelCall | StepBoundary | Done | Broken
# What a fiber runs: a pipeline on a view of it.
Body = Callable[[], Any]


class Fiber(greenlet.greenlet):  # type: ignore[misc]
    """What a body runs in; `called` tells whether it called a model since its last step."""

    called = False


def mark_step() -> None:
    """Called by a wrapped scheduler after its step: suspends the running fiber.

    Only once for what it called models for: some pipelines step twice with one prediction (Cosmos), or with a scheduler
    for each frame (SkyReels V2) or for the sound (LTX 2).
    """
    fiber = greenlet.getcurrent()
    assert isinstance(fiber, Fiber) and fiber.parent is not None, "a wrapped scheduler steps inside a request's fiber only"
    if fiber.called:
        fiber.called = False
        fiber.parent.switch(StepBoundary.STEP)


class DiffusionRequestState:
    """A request between ticks. `body` runs the pipeline and returns its picture.

    `exact` requests have every call to themselves. `whole` ones run while no other request advances: they change the shared
    model, or say so themselves. Calls of another `batch_key` are never merged with theirs.
    """

    def __init__(self, spec: RequestSpec, body: Body, *, exact: bool = False) -> None:
        self.spec = spec
        self.exact = exact or spec.exact
        self.whole = bool(getattr(body, "whole", False))
        self.batch_key: Hashable = getattr(body, "batch_key", None)
        self.contents = Contents()
        self.steps_done = 0
        # Calls since the tick began, by component and method, and the one that was put off to the next tick.
        self.calls: Counter[tuple[str, str]] = Counter()
        self.put_off: ModelCall | None = None
        self._asked = False
        self._body = body
        self._randomness = OwnRandomness(spec.seed)
        self._precision = OwnPrecision()
        self._fiber = Fiber(self._run)

    @property
    def begun(self) -> bool:
        """Whether the fiber has run at all."""
        return bool(self._fiber)

    def advance(self) -> FiberEvent:
        """Begin a tick: go on to the next event, or to the call that was put off."""
        self.calls.clear()
        if self.put_off is not None:
            call, self.put_off = self.put_off, None
            return call
        return self.resume()

    def resume(self, value: Any = None) -> FiberEvent:
        """Go on until the next event; `value` is what the suspended model call returns."""
        with self._randomness, self._precision:
            return self._note(self._fiber.switch(value) if self._fiber else self._fiber.switch())

    def fail(self, error: BaseException) -> FiberEvent:
        """Let the suspended model call raise."""
        with self._randomness, self._precision:
            return self._note(self._fiber.throw(error))

    def drop(self) -> None:
        """Unwind the fiber; nothing of it runs afterwards but its `finally` blocks."""
        if self._fiber:
            with self._randomness, self._precision:
                self._fiber.throw(greenlet.GreenletExit)

    def _run(self) -> FiberEvent:
        try:
            return Done(self._body())
        except greenlet.GreenletExit:
            raise
        except Exception as error:
            return Broken(error, self._asked)

    def _note(self, event: FiberEvent) -> FiberEvent:
        if isinstance(event, ModelCall):
            self._asked = self._fiber.called = True
        elif event is StepBoundary.STEP:
            self.steps_done += 1
        return event
