# SPDX-License-Identifier: Apache-2.0
"""Previews of a request's image, for any pipeline and without code for a single one.

The request's own body runs once more, in a fiber of its own. Every model call already made gets its recorded answer, and every scheduler
step returns the latents that the model predicts for the end. So nothing is encoded or denoised again, and only the pipeline's own way from
latents to an image is left. The extra run changes nothing of the request's. It ends within the tick, and its calls are never shared.
"""

import copy
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.faults import require_usable_rank
from diffusion_worker.runner.model_call.outputs import is_plain, tensors_of, with_tensors
from diffusion_worker.runner.stepping.call_history import CallHistory, NoPreview
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, FiberEvent


def preview_steps(steps: int, previews: int) -> list[int]:
    """Spread previews evenly over a request's steps; return the numbers of steps done at each, sorted, never 0 and never all.

    They are fewer than `previews` if the steps are few.
    """
    wanted = (number * steps // (previews + 1) for number in range(1, previews + 1))
    return sorted({step for step in wanted if 0 < step < steps})


def preview_due(state: DiffusionRequestState) -> "PreviewState | None":
    """Create the run of the next preview if the step just taken is one of `preview_steps`; return None otherwise.

    There is none without a history or a known number of steps, nor for a `whole` request, whose changed model a second run would disturb.
    """
    planned = state.steps_planned or state.spec.steps
    if state.history is None or state.whole or planned is None or state.previews_begun == state.spec.previews:
        return None
    if state.steps_done not in preview_steps(planned, state.spec.previews):
        return None
    state.previews_begun += 1
    return PreviewState(state, state.history, state.previews_begun - 1)


class PreviewState(DiffusionRequestState):
    """An extra run of a request's body, fed with recorded answers, that makes preview `number`, counted from 0.

    It writes to the request's clock, so that its calls appear in the request's own figures.
    """

    in_one_tick = True

    def __init__(self, of: DiffusionRequestState, history: CallHistory, number: int) -> None:
        spec = msgspec.structs.replace(of.spec, request_id=f"{of.spec.request_id}/preview-{number}", previews=0)
        super().__init__(spec, of.body, exact=True, check_sharing=of.check_sharing)
        self.of = of.spec.request_id
        self.number = number
        self.clock = of.clock
        self.steps_done = of.steps_done
        self._history = history
        self._answers = deque(history.answers)
        self._steps = list(history.steps.values())
        self._replays: dict[int, Callable[[], Any]] = {}
        self._fiber.replay = self._replayed

    def report(self, error: BaseException) -> ErrorReport:
        """Report the failure of a preview; raise RankFault if the rank cannot continue."""
        require_usable_rank(error)
        return ErrorReport(ErrorCode.ENGINE_FAILED, f"{type(error).__name__}: {error}")

    def _note(self, event: FiberEvent) -> FiberEvent:
        event = super()._note(event)
        while isinstance(event, ModelCall):
            try:
                known = _copy_of(self._known(event))
            except Exception as error:  # the error is this run's, not the tick's
                event = super()._note(self._fiber.throw(error))
                continue
            if known is None:
                return event
            event = super()._note(self._fiber.switch(known))
        return event

    def _forget(self) -> None:
        super()._forget()
        self._answers.clear()
        self._steps.clear()
        self._replays.clear()

    def _known(self, call: ModelCall) -> Any | None:
        """Return the request's recorded answer; None for a call that it has not reached yet."""
        if call.denoises:
            return self._history.denoised_like(call)
        if self._answers and self._answers[0][:2] == (call.component, call.method):
            return self._answers.popleft()[2]
        return None

    def _replayed(self, scheduler: Any) -> Any:
        """Return a scheduler's replayed step; schedulers are identified by the order of their first steps."""
        if id(scheduler) not in self._replays:
            place = len(self._replays)
            if place == len(self._steps):
                raise NoPreview(f"{type(scheduler).__name__} has not taken a step yet")
            step = self._steps[place]
            self._replays[id(scheduler)] = functools.partial(step.returning, step.estimate())
        return self._replays[id(scheduler)]()


def _copy_of(answer: Any) -> Any:
    """Copy an answer, because a pipeline may change or clear it (keys and values of images)."""
    return with_tensors(answer, [tensor.clone() for tensor in tensors_of(answer)]) if is_plain(answer) else copy.deepcopy(answer)
