# SPDX-License-Identifier: Apache-2.0
"""The calls of batches: each is made for all its requests at once, or in smaller parts where that fails."""

import contextlib
import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from diffusion_worker.errors import Fault, RequestError
from diffusion_worker.lora.call_rows import RowsNotSeparable
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.model_call.call import ModelCall, answer, execute, split
from diffusion_worker.runner.model_call.faults import classify, require_usable_rank
from diffusion_worker.runner.model_call.prompt_cache import PromptCache
from diffusion_worker.runner.parallel.rows import CallFailed, Parallel, kinds_of
from diffusion_worker.runner.step_cache.cache import MixedVerdicts, PipelineStepCache, Plan
from diffusion_worker.runner.stepping.batch import InputBatch, MayMerge
from diffusion_worker.runner.stepping.call_facts import CallFacts
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState, FiberEvent
from diffusion_worker.runner.stepping.rng_state import DrawsNumbers, OwnRandomness
from diffusion_worker.runner.stepping.stage_clock import stage_of
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from diffusion_worker.withheld import traceback_of

log = logging.getLogger(__name__)

# Calls a module; if `plain`, bit by bit as diffusers itself does, also with a model that changes meanwhile.
Compute = Callable[[torch.nn.Module, ModelCall, bool], Any]
Event = tuple[DiffusionRequestState, FiberEvent]
Failure = TypeVar("Failure", bound=BaseException)


class BatchRunner:
    """The maker of batches' calls, which resumes their requests with the answers."""

    def __init__(self, parallel: Parallel, prompts: PromptCache | None) -> None:
        self._parallel = parallel
        self._prompts = prompts
        self._facts = CallFacts()
        # Numbers drawn in a call of several requests are never used.
        self._nobodys = OwnRandomness(0)
        self._modules: dict[str, torch.nn.Module] = {}
        self._loras: DiffusionLoRAManager | None = None
        self._cache: PipelineStepCache | None = None
        self.compute: Compute = lambda module, call, plain: execute(module, call)
        self._may_merge: MayMerge = lambda call: True
        self._output = StepOutput()
        self._meter = TickMeter(torch.device("cpu"))

    def serve(
        self,
        modules: dict[str, torch.nn.Module],
        loras: DiffusionLoRAManager | None,
        cache: PipelineStepCache | None,
        compute: Compute,
        may_merge: MayMerge,
    ) -> None:
        """Switch to the modules of another model, and forget the facts about calls of the former one.

        Rows of a call that `may_merge` denies are not spread over ranks.
        """
        self._may_merge = may_merge
        self._modules, self._loras, self._cache, self.compute = modules, loras, cache, compute
        self._facts.clear()

    @contextlib.contextmanager
    def counting(self, output: StepOutput, meter: TickMeter) -> Any:
        """Count the calls of a tick in `output`, and have `meter` measure them."""
        self._output, self._meter = output, meter
        try:
            yield
        finally:
            # The output is large, and belongs to the caller.
            self._output = StepOutput()

    def run(self, batch: InputBatch) -> list[Event]:
        """Make a batch's call and resume each request with its part; return the events at which the fibers stop next.

        A failed call is repeated in smaller batches: by verdict, by adapters, or each request by itself. An error reaches a request only
        from a call of its own.
        """
        if len(batch.items) == 1:
            return [self._single(batch)[0]]
        first = batch.items[0].call
        if self._facts.runs_alone(first):
            return [self._single(single)[0] for single in batch.alone()]
        if self._facts.needs_same_adapters(first) and len(apart := batch.by_adapters()) > 1:
            return [event for part in apart for event in self.run(part)]
        parts, failure = self._attempt(batch)
        if failure is None:
            self._facts.note_merged(first)
            return [(item.state, item.state.resume(part)) for item, part in zip(batch.items, parts, strict=True)]
        if isinstance(failure, MixedVerdicts):
            return [event for part in batch.by_verdict() for event in self.run(part)]
        if _means(failure, RowsNotSeparable) and len(apart := batch.by_adapters()) > 1:
            self._facts.note_same_adapters(first)
            return [event for part in apart for event in self.run(part)]
        if _means(failure, DrawsNumbers):
            self._facts.note_draws(first)
            return [self._single(single)[0] for single in batch.alone()]
        return self._one_by_one(batch, failure)

    def _one_by_one(self, batch: InputBatch, failure: Exception) -> list[Event]:
        """Make each request's call by itself after the merged one failed.

        Only if all of them are made was the merging at fault, which is noted. A lack of memory and a refusal say nothing about other
        batches.
        """
        self._output.split = True
        outcomes = [self._single(single) for single in batch.alone()]
        if all(made for _, made in outcomes) and classify(failure) is Fault.REQUEST and not _is_refusal(failure):
            self._facts.note_unmerged(batch.items[0].call)
        return [event for event, _ in outcomes]

    def _single(self, batch: InputBatch) -> tuple[Event, bool]:
        """Make the call of one request; return the request's next event, and whether the call was made."""
        state = batch.items[0].state
        parts, failure = self._attempt(batch)
        if isinstance(failure, MixedVerdicts):  # with several ranks a verdict is found between two attempts
            parts, failure = self._attempt(batch)
        if failure is not None and _means(failure, DrawsNumbers):
            self._facts.note_draws(batch.items[0].call)
            parts, failure = self._attempt(batch)
        return ((state, state.resume(parts[0])), True) if failure is None else ((state, state.fail(failure)), False)

    def _attempt(self, batch: InputBatch) -> tuple[list[Any], Exception | None]:
        """Make a batch's call; return each request's part of the output, or the failure, which is the same on every rank.

        Raises:
            RankFault: this rank cannot go on. torch.OutOfMemoryError: this rank of several has no room for what it got from the others,
                which have gone on.
        """
        try:
            return self._call(batch), None
        except MixedVerdicts as error:
            return [], error
        except Exception as error:
            require_usable_rank(error)
            if not isinstance(error, CallFailed) and classify(error) is Fault.OUT_OF_MEMORY and self._parallel.world > 1:
                raise
            component, requests, stack = batch.items[0].call.component, len(batch.items), traceback_of(error)
            level = logging.DEBUG if _means(error, RowsNotSeparable) or _means(error, DrawsNumbers) else logging.WARNING
            log.log(level, "a call of %s for %d requests failed:\n%s", component, requests, stack)
            failure = without_frames(error)
        # This is outside the except block: the failed call's tensors are free again before it is made once more.
        if classify(failure) is Fault.OUT_OF_MEMORY and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return [], failure

    def _call(self, batch: InputBatch) -> list[Any]:
        """Make a batch's call; return each request's answer."""
        calls = [item.call for item in batch.items]
        first, rows = calls[0], batch.rows
        # A request with the model for itself may look at all rows of a call at once (perturbed attention), so they stay together.
        # Numbers are drawn for all rows of a call at once, too.
        together = any(item.state.exact or item.state.whole for item in batch.items) or self._facts.draws(first)
        if together or (first.denoises and not first.divisible) or not self._may_merge(first):
            calls[0] = msgspec.structs.replace(first, whole=True)
        plan = self._plan(batch)
        with self._meter.measuring(denoises=first.denoises) as span, self._randomness(batch).undone_on_error():
            result = self._parallel.run(calls, lambda part, rows: self._execute(part, batch, rows, plan))
            parts = split(result, rows)
            if plan is not None:
                parts = plan.keep(parts)
        self._output.skipped += sum(rows) if plan is not None and plan.skips else 0
        self._output.calls += 1
        self._output.rows += sum(rows) if first.denoises else 0
        for item in batch.items:
            item.state.clock.add(stage_of(first, item.state.steps_done), span)
        self._remember(batch, parts)
        return [answer(item.call, part) for item, part in zip(batch.items, parts, strict=True)]

    def _plan(self, batch: InputBatch) -> Plan | None:
        """Return the step cache's plan for a batch; None if the batch is made without the step cache."""
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
        randomness = self._randomness(batch)
        with self._adapters(call, batch.loras[rows]), randomness:
            output = self.compute(module, call, plain)
        if randomness.drew and not self._facts.draws(call):
            if len(batch.items) > 1 or call.rows < sum(batch.rows):
                raise DrawsNumbers(f"{call.component} draws random numbers in {call.method}")
            # Every rank makes this call, so each one notes it.
            self._facts.note_draws(call)
        return output

    def _randomness(self, batch: InputBatch) -> OwnRandomness:
        return batch.items[0].state.randomness if len(batch.items) == 1 else self._nobodys

    def _adapters(self, call: ModelCall, uses: list[list[LoRAUse]]) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call, in which each of its rows has its adapters."""
        return contextlib.nullcontext() if self._loras is None or not any(uses) else self._loras.set_adapter_mapping(call.component, uses)

    def _remember(self, batch: InputBatch, parts: list[Any]) -> None:
        for item, part in zip(batch.items, parts, strict=True):
            if item.prompt is not None and self._prompts is not None and not self._facts.draws(item.call):
                self._prompts.put(item.prompt, part, alone=len(batch.items) == 1)


def _means(error: BaseException, kind: type[Exception]) -> bool:
    """Return whether an error, of this or of another rank, is or was caused by one of class `kind`."""
    return kind.__name__ in kinds_of(error)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error.refusal if isinstance(error, CallFailed) else error, RequestError)


def without_frames(error: Failure) -> Failure:
    """Clear the tracebacks of an error and of its causes, so that the tensors in their frames are freed; return the same error."""
    seen: BaseException | None = error
    while seen is not None:
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
            seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
