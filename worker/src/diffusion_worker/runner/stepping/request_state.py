# SPDX-License-Identifier: Apache-2.0
"""A request as a fiber: an unmodified pipeline that stops at every shared model call and after every step."""

import contextlib
import enum
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import greenlet
import msgspec
import torch

from diffusion_worker.messages import RequestSpec
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.contents import Contents
from diffusion_worker.runner.model_call.outputs import tensors_of
from diffusion_worker.runner.step_cache.interface import Branch
from diffusion_worker.runner.stepping.async_copies import async_copies
from diffusion_worker.runner.stepping.call_history import CallHistory, Step
from diffusion_worker.runner.stepping.module_changes import ModuleChanges
from diffusion_worker.runner.stepping.rng_state import OwnRandomness
from diffusion_worker.runner.stepping.shared_part import NeedsModelAlone
from diffusion_worker.runner.stepping.stage_clock import StageClock

AUTOCAST_DEVICES = ("cpu", "cuda")

log = logging.getLogger(__name__)

# The most attempts to end a fiber. A pipeline that catches everything catches its end too, each time at its next model call.
MOST_EXITS = 20


class StepBoundary(enum.Enum):
    """A fiber's stop right after a scheduler's step, at which a tick leaves its request."""

    STEP = "step"


class FiberDone(msgspec.Struct, frozen=True):
    """The event of a fiber that ended; `frame` is the result of its body, a `RawImage` from a pipeline."""

    frame: Any


class Broken(msgspec.Struct, frozen=True):
    """The end of a fiber by an exception of its body. `asked` is False if it came before any model call, as for invalid arguments."""

    error: BaseException
    asked: bool


FiberEvent = ModelCall | StepBoundary | FiberDone | Broken | NeedsModelAlone
# The function that a fiber runs: a pipeline on a view of it.
Body = Callable[[], Any]


class Fiber(greenlet.greenlet):  # type: ignore[misc]
    """The greenlet of a body. `called` is set if it called a model since its last step; `steps` is the number of steps it will take.

    Steps are remembered in its `history`, if it has one. With a `replay` no step is taken, and the scheduler returns the result of
    `replay`. An `alone` one has the model for itself. `changes` records its changes to the model; None where none is kept.
    """

    called = False
    steps: int | None = None
    history: CallHistory | None = None
    replay: Callable[[Any], Any] | None = None
    alone = False
    changes: ModuleChanges | None = None


def take_step(
    step: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: Callable[[], int | None]
) -> Any:
    """Take a wrapped scheduler's step, suspend the running fiber if it called a model since its last step, and return the step's result.

    `count` returns the number of steps. A fiber with a `replay` takes no step and does not stop: the result is the replay's.
    """
    fiber = greenlet.getcurrent()
    assert isinstance(fiber, Fiber), "a wrapped scheduler steps inside a request's fiber only"
    if fiber.replay is not None:
        return fiber.replay(scheduler)
    result = step(scheduler, *args, **kwargs)
    if fiber.history is not None:
        fiber.history.stepped(Step(scheduler, args, kwargs, result))
    mark_step(count())
    return result


def mark_step(steps: int | None = None) -> None:
    """Suspend the running fiber, which has taken a step of a loop of `steps` in all.

    Only the first step after model calls counts. Some pipelines step twice with one prediction (Cosmos), or with a scheduler for each frame
    (SkyReels V2) or for the sound (LTX 2).
    """
    fiber = greenlet.getcurrent()
    assert isinstance(fiber, Fiber) and fiber.parent is not None, "a wrapped scheduler steps inside a request's fiber only"
    if fiber.called:
        fiber.called, fiber.steps = False, steps
        fiber.parent.switch(StepBoundary.STEP)


class DiffusionRequestState:
    """A request on this rank, from its join to its end: the fiber that runs `body`, and all state of this request alone.

    An `exact` request shares no call. A `whole` one may change the shared model, so the others wait while it runs. Calls merge only if
    their requests have the same `batch_key`. `history` is None unless previews are wanted. With `check_sharing` the model is compared
    before and after every run of the fiber. A request that changed it beside others has to run again by itself.
    """

    # Set if a single tick runs it to its end, with any number of calls, because no later tick advances it.
    in_one_tick = False

    def __init__(self, spec: RequestSpec, body: Body, *, exact: bool = False, check_sharing: bool = False) -> None:
        self.spec = spec
        self.exact = exact or spec.exact
        self.whole = bool(getattr(body, "whole", False))
        self.batch_key: Hashable = getattr(body, "batch_key", None)
        self.contents = Contents()
        self.clock = StageClock()
        self.history = CallHistory() if spec.previews else None
        self.previews_begun = 0
        self.steps_done = 0
        # Calls since the tick began, by component and method, and the one that was put off to the next tick.
        self.calls: Counter[tuple[str, str]] = Counter()
        self.put_off: ModelCall | None = None
        # The step cache's values, by the kind of call; and calls since the last step, by component and context.
        self.branches: dict[Hashable, Branch] = {}
        self._since_step: Counter[tuple[str, str]] = Counter()
        # Bytes of the tensors that denoisers got since the last step, by the tensors' ids.
        self._given: dict[int, int] = {}
        self.held_bytes = 0
        self.body = body
        self._asked = False
        self._call: ModelCall | None = None
        self.randomness = OwnRandomness(spec.seed)
        self._precision = OwnPrecision()
        self._fiber = Fiber(self._run)
        self._fiber.history = self.history
        self.check_sharing = check_sharing and not self.whole and bool(getattr(body, "shares", True))
        self._fiber.alone = self.whole
        if self.whole or self.check_sharing:
            self._fiber.changes = ModuleChanges(getattr(body, "modules", dict))
        # The path of the change that a check of the last run found.
        self._changed: str | None = None

    @property
    def begun(self) -> bool:
        """True from the fiber's first run to its end; a request that has only joined, or that is over, has False."""
        return bool(self._fiber)

    @property
    def steps_planned(self) -> int | None:
        """The total number of steps if the loop declares it; None if it is unknown, as with several loops or before the first step."""
        planned = self._fiber.steps
        return planned if planned is not None and planned >= self.steps_done else None

    def advance(self) -> FiberEvent:
        """Begin a tick: run to the next event, or return the call that was put off."""
        self.calls.clear()
        if self.put_off is not None:
            call, self.put_off = self.put_off, None
            return call
        return self.resume()

    def resume(self, value: Any = None) -> FiberEvent:
        """Run to the next event; `value` is the result of the suspended model call."""
        if self.history is not None and self._call is not None:
            self.history.answered(self._call, value)
            self._call = None
        with self._running():
            event = self._note(self._fiber.switch(value) if self._fiber else self._fiber.switch())
        return self._checked(event)

    def fail(self, error: BaseException) -> FiberEvent:
        """Raise an error from the suspended model call, and run to the next event."""
        with self._running():
            event = self._note(self._fiber.throw(error))
        return self._checked(event)

    def drop(self) -> None:
        """End the fiber without a result: its body stops at once, and only its `finally` blocks still run.

        The step cache's values and the history are cleared, also after the fiber's end. A body that catches this `MOST_EXITS` times is left
        suspended, with a warning; its changes to the model are undone.
        """
        self._forget()
        for _ in range(MOST_EXITS):
            if not self._fiber:
                return
            with self._running():
                self._fiber.throw(greenlet.GreenletExit)
        log.warning(
            "request %s could not be ended: its pipeline caught the exception that ends it %d times, and is left suspended",
            self.spec.request_id,
            MOST_EXITS,
        )
        if self._fiber.changes is not None:
            self._fiber.changes.put_back()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Switch to the request's own global random numbers and precision settings while its fiber runs, and let GPU copies overlap.

        Changes by a request with the model alone are noted at the end of the context, and undone once its fiber is dead. Those that a
        check finds beside others are undone at once.
        """
        changes = self._fiber.changes
        with self.randomness, self._precision, async_copies():
            if changes is None:
                yield
                return
            if self.check_sharing:
                changes.begin()
            else:
                changes.start_run()
            try:
                yield
            finally:
                changes.end_run()
                if self.check_sharing:
                    self._changed = changes.first
                if self.check_sharing or self._fiber.dead:
                    changes.put_back()

    def _checked(self, event: FiberEvent) -> FiberEvent:
        """Return the event of a run, or the need to run alone in its place if the run has changed the model beside others."""
        return event if self._changed is None or isinstance(event, NeedsModelAlone) else NeedsModelAlone(f"changes {self._changed}")

    def _run(self) -> FiberEvent:
        try:
            return FiberDone(self.body())
        except greenlet.GreenletExit:
            raise
        except Exception as error:
            return Broken(error, self._asked)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Clear the step cache's branches and the history now. Request and fiber form a cycle, in which tensors would live on."""
        self.branches.clear()
        if self.history is not None:
            self.history.forget()

    def kind_of(self, call: ModelCall) -> Hashable:
        """Return a key that separates a call from the others of a step, and is the same at the next step.

        It counts calls, so ask it once for each.
        """
        place = call.component, call.context
        self._since_step[place] += 1
        return place, self._since_step[place], call.shape

    def _note(self, event: FiberEvent) -> FiberEvent:
        if isinstance(event, ModelCall):
            self._asked = self._fiber.called = True
            self._call = event if self.history is not None else None
            if event.denoises:
                self._given.update((id(tensor), tensor.numel() * tensor.element_size()) for tensor in tensors_of(event.arguments))
        elif event is StepBoundary.STEP:
            self.steps_done += 1
            self._since_step.clear()
            # A pipeline keeps about what it gives to its denoisers: the latents and the embeddings.
            self.held_bytes = sum(self._given.values()) + sum(branch.held_bytes() for branch in self.branches.values())
            self._given.clear()
        return event


class _Precision(NamedTuple):
    gradients: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]


def _current_precision() -> _Precision:
    autocast = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in AUTOCAST_DEVICES)
    return _Precision(torch.is_grad_enabled(), autocast)


def _set_precision(wanted: _Precision) -> None:
    torch._C._set_grad_enabled(wanted.gradients)
    for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, wanted.autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


class OwnPrecision:
    """A context with torch's autocast and gradient settings as the request left them last, at first those outside.

    At its end the settings outside return. Fibers share their thread, and one may stop inside a context of its own.
    """

    def __init__(self) -> None:
        self._own: _Precision | None = None
        self._outside: _Precision | None = None

    def __enter__(self) -> None:
        self._outside = _current_precision()
        if self._own is not None:
            _set_precision(self._own)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        now = _current_precision()
        assert self._outside is not None
        self._own = None if now == self._outside else now
        if self._own is not None:
            _set_precision(self._outside)
