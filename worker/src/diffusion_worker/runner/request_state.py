# SPDX-License-Identifier: Apache-2.0
"""One request as a fiber: an unmodified pipeline that stops at every shared model call and after every step."""

import enum
from collections.abc import Callable
from typing import Any

import greenlet
import msgspec

from diffusion_worker.messages import RequestSpec
from diffusion_worker.runner.calls import ModelCall
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


class Fiber(greenlet.greenlet):
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
    """A request between ticks. `body` runs the pipeline and returns its picture."""

    def __init__(self, spec: RequestSpec, body: Body) -> None:
        self.spec = spec
        self.steps_done = 0
        self._asked = False
        self._body = body
        self._randomness = OwnRandomness(spec.seed)
        self._fiber = Fiber(self._run)

    def resume(self, value: Any = None) -> FiberEvent:
        """Go on until the next event; `value` is what the suspended model call returns."""
        with self._randomness:
            return self._note(self._fiber.switch(value) if self._fiber else self._fiber.switch())

    def fail(self, error: BaseException) -> FiberEvent:
        """Let the suspended model call raise."""
        with self._randomness:
            return self._note(self._fiber.throw(error))

    def drop(self) -> None:
        """Unwind the fiber; nothing of it runs afterwards but its `finally` blocks."""
        if self._fiber:
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
