# SPDX-License-Identifier: Apache-2.0
"""A tick: fibers of the advancing requests run from model call to model call, and calls that fit together are merged.

A tick works in waves. A wave makes the calls that may run now, resumes their requests, and lets the ranks agree on failures. So no rank
waits in a collective for a request that another has given up. The next wave has the calls that are pending then; the tick ends when every
request is done or has finished its step.
"""

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import torch

from diffusion_worker.errors import ErrorCode, Fault, RequestError
from diffusion_worker.lora.call_rows import RowsNotSeparable
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.messages import ErrorReport, LoRAUse, Progress, PromptCacheStats
from diffusion_worker.runner.model_call.call import ModelCall, answer, execute, split
from diffusion_worker.runner.model_call.faults import classify, require_usable_rank
from diffusion_worker.runner.model_call.prompt_cache import PromptCache
from diffusion_worker.runner.parallel.agreement import failures_of_all
from diffusion_worker.runner.parallel.rows import CallFailed, Parallel
from diffusion_worker.runner.step_cache.cache import MixedVerdicts, PipelineStepCache, Plan
from diffusion_worker.runner.stepping.batch import InputBatch, Pending, make_batches
from diffusion_worker.runner.stepping.preview import PreviewState, preview_due
from diffusion_worker.runner.stepping.request_state import Broken, DiffusionRequestState, FiberDone, FiberEvent, StepBoundary
from diffusion_worker.runner.stepping.shared_part import NeedsModelAlone
from diffusion_worker.runner.stepping.stage_clock import StageClock, stage_of
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from diffusion_worker.withheld import traceback_of

log = logging.getLogger(__name__)

# The most calls of one module that a request makes in a tick. A step makes a few. A pipeline that makes more has no step of its own, or
# decodes its frames in parts. It continues in the next tick, so that it can be cancelled and others advance.
CALLS_A_TICK = 8

# The code by which ranks tell each other that a request has to be made alone. It never leaves the ranks.
NEEDS_MODEL_ALONE = "NeedsModelAlone"

# Calls a module; if `plain`, bit by bit as diffusers itself does, also with a model that changes meanwhile.
Compute = Callable[[torch.nn.Module, ModelCall, bool], Any]
States = dict[str, DiffusionRequestState]
Event = tuple[DiffusionRequestState, FiberEvent]
Failure = TypeVar("Failure", bound=BaseException)


class PreviewOutput(msgspec.Struct, frozen=True):
    """A finished preview of a request, not yet converted to pixels. `number` counts the request's previews from 0."""

    request_id: str
    number: int
    image: Any


class StepOutput(msgspec.Struct):
    """The results of a tick on this rank: bodies' outputs (images), errors, and the number of model calls made for them.

    `clocks` has the costs of each image. The figures and the progress are those of `TickDone`.
    """

    images: dict[str, Any] = {}
    clocks: dict[str, StageClock] = {}
    progress: list[Progress] = []
    previews: list[PreviewOutput] = []
    errors: dict[str, ErrorReport] = {}
    # Requests that ended as they need the model alone, with what they were about to do with it.
    replays: dict[str, str] = {}
    rows: int = 0
    calls: int = 0
    denoise_seconds: float = 0.0
    peak_bytes: int = 0
    split: bool = False
    features: dict[str, str] | None = None
    skipped: int = 0
    prompt_cache: PromptCacheStats | None = None


class Stepper:
    """The advance of requests, step by step. `states` is the runner's; requests that are done or broken are removed from it here."""

    def __init__(self, states: States, parallel: Parallel, prompts: PromptCache | None) -> None:
        self._states = states
        self._parallel = parallel
        self._prompts = prompts
        self._modules: dict[str, torch.nn.Module] = {}
        self._loras: DiffusionLoRAManager | None = None
        self._cache: PipelineStepCache | None = None
        self._compute: Compute = lambda module, call, plain: execute(module, call)
        # Calls whose output could not be split once are not merged again.
        self._indivisible: set[tuple[str, str]] = set()
        # Calls in which some layer does not see the rows. All rows of such a call need the same adapters.
        self._same_adapters: set[tuple[str, str]] = set()
        # Set once a request's calls show it: a pipeline without steps ends its ticks after each denoiser call.
        self._without_steps = False
        self._warned_of_previews = False
        self._output = StepOutput()
        self._meter = TickMeter(torch.device("cpu"))

    def serve(
        self,
        modules: dict[str, torch.nn.Module],
        loras: DiffusionLoRAManager | None,
        *,
        cache: PipelineStepCache | None = None,
        compute: Compute = lambda module, call, plain: execute(module, call),
    ) -> None:
        """Switch to the modules of another model, and forget how calls of the former one behaved.

        `compute` makes every call. `cache` is the step cache with hooks on the denoisers, None without one.
        """
        self._modules, self._loras, self._cache, self._compute = modules, loras, cache, compute
        self._indivisible.clear()
        self._same_adapters.clear()
        self._without_steps = False

    def advance(self, chosen: Iterable[DiffusionRequestState], output: StepOutput, meter: TickMeter) -> None:
        """Advance each chosen request by a step. The results are added to `output`."""
        self._output, self._meter = output, meter
        pending = self._take([(state, state.advance()) for state in self._admitted(list(chosen))], [])
        while pending:
            pending = self._wave(pending)
        # The output is large, and belongs to the caller.
        self._output = StepOutput()

    def _admitted(self, chosen: list[DiffusionRequestState]) -> list[DiffusionRequestState]:
        """Return all requests, or a single one that needs the model for itself: the others wait from its begin to its end."""
        running = next((state for state in self._states.values() if state.whole and state.begun), None)
        if running is not None:
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
            batches = [part for batch in make_batches(pending) for part in self._divided(batch)]
            going = [item for batch in batches for item in batch.items]
            events = [event for batch in batches for event in self._run(batch)]
        gone = set(map(id, going))
        rest = self._take(events, [item for item in pending if id(item) not in gone])
        # The calls are sorted by the order in which requests joined, which is the same on every rank.
        order = {id(state): position for position, state in enumerate(self._states.values())} if len(rest) > 1 else {}
        return sorted(rest, key=lambda item: order.get(id(item.state), 0))

    def _remembered(self, item: Pending) -> Any | None:
        if item.prompt is None or self._prompts is None:
            return None
        return self._prompts.get(item.prompt, alone=item.state.exact or len(self._states) == 1)

    def _divided(self, batch: InputBatch) -> list[InputBatch]:
        kind = batch.items[0].call.component, batch.items[0].call.method
        if len(batch.items) > 1 and kind in self._indivisible:
            return batch.alone()
        return batch.by_adapters() if kind in self._same_adapters else [batch]

    def _run(self, batch: InputBatch) -> list[Event]:
        """Make a batch's call and resume each request with its part; return the events at which the fibers stop next.

        A failed call is repeated in smaller batches: by verdict, by adapters, or each request by itself. An error reaches a request only
        from a call of its own.
        """
        try:
            parts = self._call(batch)
        except MixedVerdicts:
            return [event for part in batch.by_verdict() for event in self._run(part)]
        except (CallFailed, RequestError, TypeError, ValueError, torch.OutOfMemoryError) as error:
            if isinstance(error, torch.OutOfMemoryError) and self._parallel.world > 1:
                raise  # merging failed here, and the other ranks are in the call already
            log.log(
                logging.DEBUG if _adapters_mix(error) else logging.WARNING,
                "a call of %s with %d requests failed:\n%s",
                batch.items[0].call.component,
                len(batch.items),
                traceback_of(error),
            )
            failure = _without_frames(error)
        else:
            return [(item.state, item.state.resume(answer(item.call, part))) for item, part in zip(batch.items, parts, strict=True)]
        # This is outside the except block: the failed call's tensors are free again before it is made once more.
        if classify(failure) is Fault.OUT_OF_MEMORY and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(batch.items) == 1:
            return [(batch.items[0].state, batch.items[0].state.fail(failure))]
        if _adapters_mix(failure) and len(apart := batch.by_adapters()) > 1:
            self._same_adapters.add((batch.items[0].call.component, batch.items[0].call.method))
            return [event for part in apart for event in self._run(part)]
        self._output.split = True
        if isinstance(failure, TypeError):
            self._indivisible.add((batch.items[0].call.component, batch.items[0].call.method))
        return [event for single in batch.alone() for event in self._run(single)]

    def _call(self, batch: InputBatch) -> list[Any]:
        """Make a batch's call; return each request's part of the output."""
        call = batch.merged()
        # A request with the model for itself may look at all rows of a call at once (perturbed attention), so they stay together.
        if any(item.state.exact or item.state.whole for item in batch.items) or (call.denoises and not call.divisible):
            call = msgspec.structs.replace(call, whole=True)
        plan = self._plan(batch)
        with self._meter.measuring(denoises=call.denoises) as span:
            result = self._parallel.run(call, lambda part, rows: self._execute(part, batch, rows, plan))
        parts = split(result, batch.rows) if len(batch.items) > 1 else [result]
        if plan is not None:
            parts = plan.keep(parts)
            self._output.skipped += call.rows if plan.skips else 0
        self._output.calls += 1
        self._output.rows += call.rows if call.denoises else 0
        for item in batch.items:
            item.state.clock.add(stage_of(call, item.state.steps_done), span)
        self._remember(batch, parts)
        return parts

    def _adapter_in(self, state: DiffusionRequestState, call: ModelCall) -> str | None:
        return None if self._loras is None else self._loras.identity_in(call.component, state.spec.loras)

    def _plan(self, batch: InputBatch) -> Plan | None:
        """Return the step cache's plan for a batch; None for a batch without it."""
        branches = [item.branch for item in batch.items if item.branch is not None]
        return None if self._cache is None or not branches else self._cache.plan(batch.items[0].call.component, branches, batch.rows)

    def _execute(self, call: ModelCall, batch: InputBatch, rows: slice, plan: Plan | None) -> Any:
        """Call the module for `rows` of a batch, each row under its own adapters; with a plan, the step cache's hooks are on.

        The module is the call's own, such as a copy in another precision, or else the component's.
        """
        if plan is not None:
            return plan.execute(lambda: self._execute(call, batch, rows, None), rows)
        module = call.module if call.module is not None else self._modules[call.component]
        plain = any(item.state.exact or item.state.whole for item in batch.items)
        with self._adapters(call, batch.loras[rows]):
            return self._compute(module, call, plain)

    def _adapters(self, call: ModelCall, uses: list[list[LoRAUse]]) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call, in which each of its rows has its adapters."""
        return contextlib.nullcontext() if self._loras is None or not any(uses) else self._loras.set_adapter_mapping(call.component, uses)

    def _remember(self, batch: InputBatch, parts: list[Any]) -> None:
        for item, part in zip(batch.items, parts, strict=True):
            if item.prompt is not None and self._prompts is not None:
                self._prompts.put(item.prompt, part, alone=len(batch.items) == 1)

    def _take(self, events: list[Event], pending: list[Pending]) -> list[Pending]:
        """Act on the events at which the requests stopped; return the pending calls with theirs added."""
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
            log.warning("requests of this model have no previews: %s", failure.message)

    def _ask(self, state: DiffusionRequestState, call: ModelCall, pending: list[Pending]) -> None:
        """Have a call made in this tick, or put it off to the next one."""
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


def _adapters_mix(error: BaseException) -> bool:
    """Return whether an error means that rows with different adapters met in a layer that cannot tell them apart.

    An error of this rank has it as its cause. An error from another rank only has its name in the text.
    """
    return isinstance(error.__cause__, RowsNotSeparable) or RowsNotSeparable.__name__ in str(error)


def _without_frames(error: Failure) -> Failure:
    """Clear the tracebacks of an error and of its causes, so that the tensors in their frames are freed; return the same error."""
    seen: BaseException | None = error
    while seen is not None:
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
            seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error


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
    log.error("a request failed:\n%s", traceback_of(error))
    _without_frames(error)
    return ErrorReport(code, words)
