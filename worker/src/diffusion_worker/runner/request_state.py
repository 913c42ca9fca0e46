# SPDX-License-Identifier: Apache-2.0
"""One request as a fiber: an unmodified pipeline that stops at every shared model call and after every step."""

import enum
from collections.abc import Callable
from typing import Any

import greenlet
import msgspec

from diffusion_worker.messages import RequestSpec
from diffusion_worker.runner.calls import ModelCall


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


def mark_step() -> None:
    """Called by a wrapped scheduler after its step: suspends the running fiber."""
    parent = greenlet.getcurrent().parent
    assert parent is not None, "a wrapped scheduler steps inside a request's fiber only"
    parent.switch(StepBoundary.STEP)


class DiffusionRequestState:
    """A request between ticks. `body` runs the pipeline and returns its picture."""

    def __init__(self, spec: RequestSpec, body: Body) -> None:
        self.spec = spec
        self.steps_done = 0
        self._asked = False
        self._body = body
        self._fiber = greenlet.greenlet(self._run)

    def resume(self, value: Any = None) -> FiberEvent:
        """Go on until the next event; `value` is what the suspended model call returns."""
        return self._note(self._fiber.switch(value) if self._fiber else self._fiber.switch())

    def fail(self, error: BaseException) -> FiberEvent:
        """Let the suspended model call raise."""
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
            self._asked = True
        elif event is StepBoundary.STEP:
            self.steps_done += 1
        return event
