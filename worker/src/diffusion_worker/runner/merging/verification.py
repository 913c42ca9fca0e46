# SPDX-License-Identifier: Apache-2.0
"""The verification of merged calls on one rank: two small requests show real calls, which are then made alone and as one.

All ranks do it together and in the same order, step by step: a caller can do other work between any two steps. The requests run on a
stepper of their own, and nothing of them is kept. They are plain: no adapter, no compiled code.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator
from typing import Any

import msgspec
import torch

from diffusion_worker.errors import RequestError
from diffusion_worker.messages import ErrorReport, MergeVerdict, ModelInfo, RequestSpec, Task
from diffusion_worker.runner.fingerprint import probe_requests
from diffusion_worker.runner.merging.comparison import Comparison, compare
from diffusion_worker.runner.merging.other_call import cloned, other_call
from diffusion_worker.runner.merging.policy import Merging, Subject
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.kinds import kinds_of
from diffusion_worker.runner.parallel.agreement import failures_of_all
from diffusion_worker.runner.parallel.rows import CallFailed, Parallel
from diffusion_worker.runner.pipelines.body import inputs_of
from diffusion_worker.runner.pipelines.tasks import TaskPipelines
from diffusion_worker.runner.stepping.batch_runner import Compute
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.stepping.stepper import Stepper, report_of
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from diffusion_worker.runner.warm_up import WarmUpRequest

# The prompts differ in their length too, because a model may pad the shorter one.
ONE = RequestSpec(request_id="verification", prompt="red", seed=21)
OTHER = RequestSpec(request_id="verification", prompt="a blue house", seed=22)

# A component's method with the kinds of its arguments.
Key = tuple[str, str, str]
Calls = dict[Key, ModelCall]


class MergeTrial:
    """A verification of the methods that `merging` wants verified. `tasks` has the bodies of its requests, `compute` calls a module."""

    def __init__(
        self,
        model: ModelInfo,
        tasks: TaskPipelines,
        parallel: Parallel,
        modules: dict[str, torch.nn.Module],
        compute: Compute,
        merging: Merging,
    ) -> None:
        self._model = model
        self._tasks = tasks
        self._parallel = parallel
        self._modules = modules
        self._compute = compute
        self._merging = merging
        self._subjects: dict[tuple[str, str], Subject] = {(item.component, item.method): item for item in merging.to_verify()}
        self._found: dict[Key, Comparison] = {}
        self._calls: Calls = {}
        self._states: dict[str, DiffusionRequestState] = {}
        self._stepper = Stepper(self._states, parallel, None)
        self._stepper.serve(modules, None, compute=self._record)
        self._steps = self._verify()

    def step(self, *, more: bool) -> list[MergeVerdict] | None:
        """Take a step, which runs a small request or a call of a module; return None if `more` is True and more remains to do.

        Otherwise take the verification as ended, and return verdicts on the methods to verify. A method with a valid record gets none if
        nothing could be shown about it.
        """
        if more and next(self._steps, self) is None:
            return None
        found: dict[tuple[str, str], dict[str, Comparison]] = defaultdict(dict)
        for (component, method, kinds), outcome in self._found.items():
            found[component, method][kinds] = outcome
        made = (_verdict(subject, found[place], self._merging.has_record(subject)) for place, subject in self._subjects.items())
        return [verdict for verdict in made if verdict is not None]

    def _verify(self) -> Iterator[None]:
        for task in self._tasks.served if self._subjects else []:
            for changes in self._variants(task):
                one = yield from self._calls_of(msgspec.structs.replace(ONE, **changes), task)
                other = yield from self._calls_of(msgspec.structs.replace(OTHER, **changes), task)
                for key in one:
                    self._found[key] = outcome = Comparison()
                    yield from self._compared(one[key], other.get(key, one[key]), outcome)

    def drop(self) -> None:
        """End the request that runs, if one does."""
        for state in self._states.values():
            state.drop()
        self._states.clear()
        self._calls = {}

    def _variants(self, task: Task) -> list[dict[str, Any]]:
        """Return the changes to a request that give its calls other arguments: none, and no guidance where the class guides by default."""
        guidance = inputs_of(self._tasks.pipeline_of(task)).get("guidance_scale")
        return [{}, {"guidance_scale": 1.0}] if isinstance(guidance, int | float) and guidance > 1 else [{}]

    def _calls_of(self, spec: RequestSpec, task: Task) -> Generator[None, None, Calls]:
        """Run the smallest request that the model accepts; return copies of its first call of each kind that is still to be compared.

        The result is empty if every request fails, or if the request would have to run again by itself.
        """
        for request in probe_requests(self._model, self._tasks, spec, task):
            self._calls = {}
            output = yield from self._request(request)
            if output is not None:
                return self._calls if not output.replays else {}
        return {}

    def _request(self, request: WarmUpRequest) -> Generator[None, None, StepOutput | None]:
        """Run a request to its end; return None where it failed."""
        spec, output = request.spec, StepOutput()
        failed: dict[str, ErrorReport] = {}
        try:
            body = self._tasks.body(spec, request.frames)
        except Exception as error:
            failed[spec.request_id] = report_of(error, asked=False)
        if failures_of_all(self._parallel, failed):
            return None
        self._states[spec.request_id] = DiffusionRequestState(spec, body, exact=True)
        while self._states:
            self._stepper.advance(list(self._states.values()), output, TickMeter(torch.device("cpu")))
            yield
        return None if output.errors else output

    def _record(self, module: torch.nn.Module, call: ModelCall, plain: bool) -> Any:
        key = call.component, call.method, kinds_of(call)
        if key[:2] in self._subjects and key not in self._calls and key not in self._found:
            # The request runs alone, but its call is to be merged.
            self._calls[key] = msgspec.structs.replace(call, arguments=cloned(call.arguments), module=module, whole=False)
        return self._compute(module, call, plain)

    def _compared(self, one: ModelCall, other: ModelCall, outcome: Comparison) -> Iterator[None]:
        try:
            yield from compare(one, other_call(one, other), self._run, outcome)
        except (CallFailed, RequestError, TypeError, ValueError) as error:
            outcome.unknown = f"a call for its verification failed: {error}"

    def _run(self, call: ModelCall) -> Any:
        call = msgspec.structs.replace(call, whole=True)
        return self._parallel.run([call], lambda part, rows: self._compute(part.module, part, True))


def _verdict(subject: Subject, found: dict[str, Comparison], trusted: bool) -> MergeVerdict | None:
    """Return the verdict by the comparisons of a method's calls, which are keyed by kinds of arguments: a wrong one decides.

    If none is wrong, the verdict names the kinds that agree. If nothing was shown, a `trusted` method gets None, any other a verdict with
    the problem.
    """
    agreed = {kinds: outcome for kinds, outcome in found.items() if not outcome.wrong and not outcome.unknown}
    if wrong := next((outcome for outcome in found.values() if outcome.wrong), None):
        return subject.verdict(problem=wrong.wrong, apart=wrong.apart, allowed=wrong.allowed)
    if agreed:
        worst = max(agreed.values(), key=lambda outcome: outcome.apart)
        return subject.verdict(arguments=sorted(agreed), apart=worst.apart, allowed=worst.allowed)
    if trusted:
        return None
    problem = next((outcome.unknown for outcome in found.values()), "no request for its verification called it")
    return subject.verdict(problem=problem)
