# SPDX-License-Identifier: Apache-2.0
"""Runs requests of one loaded pipeline, all of them one step a tick, sharing model calls wherever they can."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.model_manager import DiffusionLoRAManager
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import ErrorReport, ModelInfo, RequestSpec, Tick
from diffusion_worker.runner.calls import ModelCall, split
from diffusion_worker.runner.input_batch import InputBatch, Pending, make_batches
from diffusion_worker.runner.parallel import CallFailed, Parallel
from diffusion_worker.runner.pipeline import checkpoint_folder, denoiser_of, describe, dtype_of, load_pipeline, make_body, modules_of
from diffusion_worker.runner.request_state import Body, Broken, DiffusionRequestState, Done, FiberEvent

log = logging.getLogger(__name__)

ReportProgress = Callable[[int, int], None]


class StepOutput(msgspec.Struct):
    """What one tick brought on this rank: what the bodies returned (pictures), errors, and how much of the model was called for them."""

    pictures: dict[str, Any] = {}
    errors: dict[str, ErrorReport] = {}
    rows: int = 0
    calls: int = 0


class DiffusionModelRunner:
    """The model side of one rank. Nothing is loaded by the constructor."""

    def __init__(self, config: WorkerConfig, device: torch.device, parallel: Parallel) -> None:
        self._config = config
        self._device = device
        self._parallel = parallel
        self._states: dict[str, DiffusionRequestState] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self.pipeline: Any = None
        self.weights = ModelWeights(device)
        self.loras: DiffusionLoRAManager | None = None

    def load_model(self, report: ReportProgress) -> ModelInfo:
        """Load the pipeline and move its weights into slabs; `report` hears of bytes done and in all.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        dtype = dtype_of(self._config.dtype, self._device)
        return self.adopt(load_pipeline(self._config, dtype), dtype, report)

    def adopt(self, pipeline: Any, dtype: torch.dtype, report: ReportProgress) -> ModelInfo:
        """Serve a pipeline that is in host memory already."""
        self.pipeline = pipeline
        self._modules = modules = modules_of(pipeline)
        total = sum(tensor.numel() * tensor.element_size() for module in modules.values() for tensor in module.state_dict().values())
        done = 0
        for name, module in modules.items():
            module.eval().requires_grad_(False)
            done += self.weights.place(module, checkpoint_folder(self._config, name))
            report(min(done, total), total)
        # One slot more than adapters: a new version is loaded beside the one it replaces.
        self.loras = DiffusionLoRAManager(denoiser_of(self.pipeline), slots=self._config.max_loras + 1, max_rank=self._config.max_lora_rank)
        return describe(self.pipeline, dtype, total)

    @torch.inference_mode()
    def execute_stepwise(self, tick: Tick) -> StepOutput:
        """Advance every active request by one step.

        Requests to leave are dropped, requests to join are brought up to their first step and take it. An error of one
        request ends that request only.
        """
        output = StepOutput()
        for request_id in tick.leave:
            self._drop(request_id)
        for spec in tick.join:
            try:
                self.join(spec, make_body(self.pipeline, spec))
            except RequestError as error:
                output.errors[spec.request_id] = ErrorReport(error.code, error.message)
        pending: list[Pending] = []
        for state in [state for state in self._states.values() if tick.advance is None or state.spec.request_id in tick.advance]:
            self._take(state, state.resume(), pending, output)
        while pending:
            pending = self._wave(pending, output)
        return output

    def join(self, spec: RequestSpec, body: Body) -> None:
        """Add a request whose fiber runs `body`; it takes its first step when a tick advances it."""
        self._states[spec.request_id] = DiffusionRequestState(spec, body)

    def drop_all(self) -> None:
        """Forget every request."""
        for request_id in list(self._states):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            state.drop()

    def _wave(self, pending: list[Pending], output: StepOutput) -> list[Pending]:
        """Run the calls that may run now and resume their requests; returns the calls that are pending then."""
        batches = make_batches(pending)
        running = {id(state) for batch in batches for state in batch.states}
        rest = [item for item in pending if id(item[0]) not in running]
        for batch in batches:
            for state, event in self._run(batch, output):
                self._take(state, event, rest, output)
        # In the order in which requests joined, whatever the order of their calls: the same on every rank.
        order = {id(state): position for position, state in enumerate(self._states.values())}
        return sorted(rest, key=lambda item: order[id(item[0])])

    def _run(self, batch: InputBatch, output: StepOutput) -> list[tuple[DiffusionRequestState, FiberEvent]]:
        """Call the module once for all; if that fails, once for each, so that only the guilty request sees its error."""
        try:
            call = batch.merged()
            output.rows += call.rows
            output.calls += 1
            parts = split(self._parallel.run(call, lambda part, rows: self._execute(part, batch, rows)), batch.rows)
        except (CallFailed, TypeError) as error:
            if len(batch.states) == 1:
                return [(batch.states[0], batch.states[0].fail(error))]
            return [result for single in batch.alone() for result in self._run(single, output)]
        return [(state, state.resume(part)) for state, part in zip(batch.states, parts, strict=True)]

    def _execute(self, call: ModelCall, batch: InputBatch, rows: slice) -> Any:
        """Some rows of a batch's call on the real module, with the adapters of those rows."""
        assert self.loras is not None
        module = self._modules[call.component]
        method = module if call.method == "forward" else getattr(module, call.method)
        with self.loras.rows(batch.loras[rows]):
            return method(**call.arguments)

    def _take(self, state: DiffusionRequestState, event: FiberEvent, pending: list[Pending], output: StepOutput) -> None:
        request_id = state.spec.request_id
        if isinstance(event, ModelCall):
            pending.append((state, event))
        elif isinstance(event, Done):
            output.pictures[request_id] = event.frame
            del self._states[request_id]
        elif isinstance(event, Broken):
            output.errors[request_id] = _report(event)
            del self._states[request_id]


def _report(broken: Broken) -> ErrorReport:
    """Before its first model call a pipeline only checks its inputs, so a ValueError there is the caller's."""
    error = broken.error
    if isinstance(error, RequestError):
        return ErrorReport(error.code, error.message)
    if isinstance(error, ValueError) and not broken.asked:
        return ErrorReport(ErrorCode.INVALID_REQUEST, str(error))
    log.error("a request failed", exc_info=error)
    return ErrorReport(ErrorCode.ENGINE_FAILED, f"{type(error).__name__}: {error}")
