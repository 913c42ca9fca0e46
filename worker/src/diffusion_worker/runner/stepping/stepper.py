# SPDX-License-Identifier: Apache-2.0
"""A tick: fibers of the advancing requests run from model call to model call, and calls that fit together are merged.

A tick works in waves. A wave makes the calls that may run now, resumes their requests, and lets the ranks agree on failures. So no rank
waits in a collective for a request that another has given up. The next wave has the calls that are pending then; the tick ends when every
request is done or has finished its step.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from diffusion_worker.errors import ErrorCode, Fault, RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.messages import ErrorReport, Progress
from diffusion_worker.runner.model_call.call import ModelCall, execute
from diffusion_worker.runner.model_call.faults import classify, require_usable_rank
from diffusion_worker.runner.model_call.prompt_cache import PromptCache
from diffusion_worker.runner.parallel.agreement import failures_of_all
from diffusion_worker.runner.parallel.rows import CallFailed, Parallel
from diffusion_worker.runner.step_cache.cache import PipelineStepCache
from diffusion_worker.runner.stepping.batch import MayMerge, Pending, make_batches
from diffusion_worker.runner.stepping.batch_runner import BatchRunner, Compute, Event, without_frames
from diffusion_worker.runner.stepping.preview import PreviewState, preview_due
from diffusion_worker.runner.stepping.request_state import Broken, DiffusionRequestState, FiberDone, FiberEvent, StepBoundary
from diffusion_worker.runner.stepping.shared_part import NeedsModelAlone
from diffusion_worker.runner.stepping.step_output import PreviewOutput, StepOutput
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from diffusion_worker.withheld import traceback_of

log = logging.getLogger(__name__)

# The most calls of one module that a request makes in a tick. A step makes a few. A pipeline that makes more has no step of its own, or
# decodes its frames in parts. It continues in the next tick, so that it can be cancelled and others advance.
CALLS_A_TICK = 8

# The code by which ranks tell each other that a request has to be made alone. It never leaves the ranks.
NEEDS_MODEL_ALONE = "NeedsModelAlone"

States = dict[str, DiffusionRequestState]


class Stepper:
    """The advance of requests, step by step. `states` is the runner's; requests that are done or broken are removed from it here."""

    def __init__(self, states: States, parallel: Parallel, prompts: PromptCache | None) -> None:
        self._states = states
        self._parallel = parallel
        self._prompts = prompts
        self.batches = BatchRunner(parallel, prompts)
        self._loras: DiffusionLoRAManager | None = None
        self._cache: PipelineStepCache | None = None
        self._may_merge: MayMerge = lambda call: True
        # Set once a request's calls show it: a pipeline without steps ends its ticks after each denoiser call.
        self._without_steps = False
        self._warned_of_previews = False
        self._output = StepOutput()

    def serve(
        self,
        modules: dict[str, torch.nn.Module],
        loras: DiffusionLoRAManager | None,
        *,
        cache: PipelineStepCache | None = None,
        compute: Compute = lambda module, call, plain: execute(module, call),
        may_merge: MayMerge = lambda call: True,
    ) -> None:
        """Switch to the modules of another model, and forget how calls of the former one behaved.

        `compute` makes every call. `cache` is the step cache with hooks on the denoisers, None without one. Rows of a call that `may_merge`
        denies are neither joined with other requests' nor spread over ranks.
        """
        self._loras, self._cache, self._without_steps = loras, cache, False
        self._may_merge = may_merge
        self.batches.serve(modules, loras, cache, compute, may_merge)

    def advance(self, chosen: Iterable[DiffusionRequestState], output: StepOutput, meter: TickMeter) -> None:
        """Advance each chosen request by a step; the results are added to `output`, and `meter` measures the calls.

        If a request has or needs the model for itself, it advances alone, and the others wait. Requests that finish, fail, or have to run
        again by themselves leave `states`.
        """
        self._output = output
        with self.batches.counting(output, meter):
            pending = self._take([(state, state.advance()) for state in self._admitted(list(chosen))], [])
            while pending:
                pending = self._wave(pending)
        # The output is large, and belongs to the caller.
        self._output = StepOutput()

    def running_alone(self) -> DiffusionRequestState | None:
        """Return the request that has the model for itself, from its first step to its end; None while there is none."""
        return next((state for state in self._states.values() if state.whole and state.begun), None)

    def _admitted(self, chosen: list[DiffusionRequestState]) -> list[DiffusionRequestState]:
        """Return all requests, or a single one that needs the model for itself: the others wait from its begin to its end.

        While such a request runs and is not chosen, the result is empty.
        """
        if (running := self.running_alone()) is not None:
            return [state for state in chosen if state is running]
        first = next((state for state in chosen if state.whole), None)
        return chosen if first is None else [first]

    def _wave(self, pending: list[Pending]) -> list[Pending]:
        """Answer calls from the prompt cache, or if none is there make the batches that are next; return all calls still pending.

        These are sorted by the order of joining, which every rank shares.
        """
        known = [(item, found) for item in pending if (found := self._remembered(item)) is not None]
        if known:
            going = [item for item, _ in known]
            events = [(item.state, item.state.resume(found)) for item, found in known]
        else:
            batches = make_batches(pending, self._may_merge)
            going = [item for batch in batches for item in batch.items]
            events = [event for batch in batches for event in self.batches.run(batch)]
        gone = set(map(id, going))
        rest = self._take(events, [item for item in pending if id(item) not in gone])
        # The calls are sorted by the order in which requests joined, which is the same on every rank.
        order = {id(state): position for position, state in enumerate(self._states.values())} if len(rest) > 1 else {}
        return sorted(rest, key=lambda item: order.get(id(item.state), 0))

    def _remembered(self, item: Pending) -> Any | None:
        if item.prompt is None or self._prompts is None:
            return None
        return self._prompts.get(item.prompt, alone=item.state.exact or len(self._states) == 1)

    def _adapter_in(self, state: DiffusionRequestState, call: ModelCall) -> str | None:
        return None if self._loras is None else self._loras.identity_in(call.component, state.spec.loras)

    def _take(self, events: list[Event], pending: list[Pending]) -> list[Pending]:
        """Act on the events at which the requests stopped, and return the pending calls with theirs added.

        Results, errors and progress go into the output, requests that ended leave `states`, and previews that are due begin.
        """
        broken = {state.spec.request_id: _report(state, event) for state, event in events if isinstance(event, Broken | NeedsModelAlone)}
        failures = failures_of_all(self._parallel, broken)
        begun: list[Event] = []
        for state, event in events:
            request_id = state.spec.request_id
            if isinstance(state, PreviewState) and (request_id in failures or isinstance(event, FiberDone)):
                self._end_preview(state, event, failures.get(request_id))
            elif request_id in failures:
                self._states.pop(request_id).drop()
                if failures[request_id].code == NEEDS_MODEL_ALONE:
                    self._output.replays[request_id] = failures[request_id].message
                else:
                    self._output.errors[request_id] = failures[request_id]
            elif isinstance(event, ModelCall):
                self._ask(state, event, pending)
            elif isinstance(event, FiberDone):
                self._output.images[request_id] = event.frame
                self._output.clocks[request_id] = state.clock
                del self._states[request_id]
            elif event is StepBoundary.STEP:
                self._without_steps = False
                self._output.progress.append(Progress(request_id, state.steps_done, state.steps_planned, state.held_bytes))
                if (preview := preview_due(state)) is not None:
                    begun.append((preview, preview.advance()))
        return self._take(begun, pending) if begun else pending

    def _end_preview(self, preview: PreviewState, event: FiberEvent, failure: ErrorReport | None) -> None:
        """Finish a preview's run: put its image into the output, or unwind a failed fiber and log the first such failure.

        The request itself goes on in both cases.
        """
        if failure is None and isinstance(event, FiberDone):
            self._output.previews.append(PreviewOutput(preview.of, preview.number, event.frame))
            return
        preview.drop()
        if failure is not None and not self._warned_of_previews:
            self._warned_of_previews = True
            log.warning("a preview failed, and its request goes on without; later such failures are not logged: %s", failure.message)

    def _ask(self, state: DiffusionRequestState, call: ModelCall, pending: list[Pending]) -> None:
        """Add a call to `pending`, or put it off to the next tick after `CALLS_A_TICK` calls of its method in this tick.

        A pipeline without steps gets a single denoiser call a tick. A run within one tick, such as a preview's, is never put off.
        """
        kind = call.component, call.method
        made = state.calls[kind]
        if made == CALLS_A_TICK and call.denoises and state.steps_done == 0:
            self._without_steps = True
        if made >= (1 if self._without_steps and call.denoises else CALLS_A_TICK) and not state.in_one_tick:
            state.put_off = call
            return
        state.calls[kind] += 1
        prompt = None if self._prompts is None else self._prompts.key(call, adapter=self._adapter_in(state, call))
        pending.append(Pending(state, call, prompt, None if self._cache is None else self._cache.branch_of(state, call)))


def _report(state: DiffusionRequestState, event: Broken | NeedsModelAlone) -> ErrorReport:
    if isinstance(event, NeedsModelAlone):
        return ErrorReport(NEEDS_MODEL_ALONE, event.what)
    return state.report(event.error) if isinstance(state, PreviewState) else report_of(event.error, asked=event.asked)


def report_of(error: BaseException, *, asked: bool) -> ErrorReport:
    """Return the error that the caller gets; raise RankFault where the rank cannot go on.

    Only a lack of memory may pass: every other error comes of this request alone and would come again. `asked` is whether the pipeline had
    called a model. Before that it only checks its inputs, so a ValueError is the caller's fault.
    """
    require_usable_rank(error)
    refusal = error.refusal if isinstance(error, CallFailed) else error
    if isinstance(refusal, RequestError):
        return ErrorReport(refusal.code, refusal.message)
    if isinstance(error, ValueError) and not asked:
        return ErrorReport(ErrorCode.INVALID_REQUEST, str(error))
    words = str(error) if isinstance(error, CallFailed) else f"{type(error).__name__}: {error}"
    code = ErrorCode.INSUFFICIENT_MEMORY if classify(error) is Fault.OUT_OF_MEMORY else ErrorCode.REQUEST_FAILED
    # Only text is logged: a record that held the exception would hold the tensors of its frames.
    stack = traceback_of(error)
    log.error("a request failed:\n%s", stack)
    without_frames(error)
    return ErrorReport(code, words)
