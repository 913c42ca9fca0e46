# SPDX-License-Identifier: Apache-2.0
"""One model on one rank group: admits requests, loads adapters, sleeps and wakes, and tells its state.

Runs on the server's event loop and holds no torch. Requests that were admitted are with `StepLoop`, adapters with `AdapterLoader`.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine import admission
from diffusion_worker.engine.adapter_loading import AdapterLoader
from diffusion_worker.engine.adapters import AdapterTable
from diffusion_worker.engine.admission import GenerationParams
from diffusion_worker.engine.documents import (
    AdapterCall,
    AdapterDocument,
    EngineState,
    LoadDocument,
    LoadStage,
    ModelDocument,
    OperationCall,
    Problem,
    SleepCall,
    SleepMode,
    SleepPolicy,
    StateDocument,
)
from diffusion_worker.engine.operations import Operations, read_desired
from diffusion_worker.engine.rank_group import RankGroup
from diffusion_worker.engine.step_loop import StepLoop, StepStats
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import LoRAUse, ModelInfo, RequestSpec

log = logging.getLogger(__name__)

# One tick runs while the next one is already with the ranks, so that none of them waits for the server.
TICKS_AHEAD = 2

# Pixels, height, width.
Frame = tuple[bytes | memoryview, int, int]

REFUSALS: dict[EngineState, tuple[ErrorCode, str, float | None]] = {
    EngineState.STARTING: (ErrorCode.STARTING, "the model is still loading", 5.0),
    EngineState.DRAINING: (ErrorCode.ASLEEP, "the model is going to sleep", None),
    EngineState.SLEEPING: (ErrorCode.ASLEEP, "the model is going to sleep", None),
    EngineState.ASLEEP: (ErrorCode.ASLEEP, "the model is asleep, because its sleep policy says so", None),
    EngineState.WAKING: (ErrorCode.BUSY, "the model is waking up", 1.0),
    EngineState.FAILED: (ErrorCode.ENGINE_FAILED, "the rank group is lost; the server is about to restart", 10.0),
    EngineState.TERMINATING: (ErrorCode.TERMINATING, "the server is shutting down", 1.0),
}


class Picture(msgspec.Struct, frozen=True):
    """A finished picture: rows of RGB bytes, and the seed that makes it again."""

    pixels: bytes | memoryview
    height: int
    width: int
    seed: int


class Engine:
    """The engine of one server process; every method runs on its event loop."""

    def __init__(self, config: WorkerConfig, ranks: RankGroup, *, boot_id: str) -> None:
        self.config = config
        self.boot_id = boot_id
        self.state = EngineState.STARTING
        self.loaded = False
        self._ranks = ranks
        self._model: ModelInfo | None = None
        self._stage = LoadStage.STARTING_RANKS
        self._failure: str | None = None
        self._lost = asyncio.Event()
        self._steps = StepLoop(ranks, max_batch_size=config.max_batch_size, tick_timeout_s=config.tick_timeout_s, broken=self._fail)
        self._last_request_at: float | None = None
        self._stepping: asyncio.Task[None] | None = None
        self._adapters = AdapterTable(slots=config.max_loras)
        self._loader = AdapterLoader(self._adapters, ranks, ranks_total=config.ranks, abort=self._abort)
        self._operations = Operations()

    async def start(self) -> None:
        """Load the model and its adapters; returns when requests are served, or when the group is asleep by policy.

        Raises:
            ConfigError: the model or an option is wrong. GroupFailed: the ranks did not come up.
        """
        self._model = await self._ranks.start()
        self._stage = LoadStage.LOADING_ADAPTERS
        desired = read_desired(self.config.desired_path)
        await self._loader.load_at_start(self.config, desired)
        self._stage = LoadStage.DONE
        self._stepping = asyncio.create_task(self._steps.run())
        self.state = EngineState.READY
        if desired.sleep.policy is SleepPolicy.ASLEEP:
            await self._sleep_now(SleepCall(operation_id=f"policy-{self.boot_id}"))
        self.loaded = True

    async def run_until_failure(self) -> str:
        """Returns the reason when the engine cannot go on; every waiting request then has its error."""
        watch = asyncio.create_task(self._watch_ranks())
        try:
            await self._lost.wait()
        finally:
            watch.cancel()
        return str(self._failure)

    async def terminate(self) -> None:
        """Stop admission, let running requests finish within the configured time, end the ranks."""
        self.loaded = False
        if self.state is not EngineState.FAILED:
            self.state = EngineState.TERMINATING
            await self._steps.drain(self.config.drain_timeout_s, ErrorCode.TERMINATING, "the server is shutting down")
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
        await self._ranks.stop()

    async def generate(self, params: GenerationParams) -> list[Picture]:
        """Make `n` pictures with the seeds `seed`, `seed + 1`, …; cancelling it frees its rows.

        Raises:
            RequestError: the request is refused, or ended early. GroupFailed: the ranks were lost meanwhile.
        """
        self._check_serving("this request")
        assert self._model is not None
        admission.check(params, self.config.limits, self._model)
        base = params.model is None or params.model == self.config.served_name
        adapter = None if base else self._adapters.resolve(str(params.model))
        self._last_request_at = time.monotonic()
        first_seed = secrets.randbelow(2**32) if params.seed is None else params.seed
        request_id = uuid.uuid4().hex
        with ExitStack() as stack:
            use = stack.enter_context(self._adapters.used(adapter, request_id, params.lora_scale))
            specs = [_spec(params, f"{request_id}-{index}", first_seed + index, use) for index in range(params.n)]
            outcomes = [self._steps.submit(spec) for spec in specs]
            for spec in specs:
                stack.callback(self._steps.forget, spec.request_id)
            frames = await asyncio.gather(*outcomes)
        return [Picture(pixels, height, width, spec.seed) for spec, (pixels, height, width) in zip(specs, frames, strict=True)]

    @property
    def stats(self) -> StepStats:
        """What the ranks did since the start, for metrics."""
        return self._steps.stats

    def served_models(self) -> list[tuple[str, AdapterDocument | None]]:
        """Names a request may ask for: the base, then the loaded adapters."""
        adapters = [self._adapters.resolve(name) for name in self._adapters.names()]
        return [(self.config.served_name, None)] + [(adapter.name, adapter.document(self.config.ranks)) for adapter in adapters]

    def state_document(self) -> StateDocument:
        """Everything the control API shows; cheap, and answers in every state."""
        age = None if self._last_request_at is None else round(time.monotonic() - self._last_request_at, 3)
        done, total = self._ranks.load_progress()
        model = self._model
        return StateDocument(
            boot_id=self.boot_id,
            generation=1,
            state=self.state,
            operation=self._operations.running(),
            last_operation=self._operations.last,
            in_flight=self._steps.running,
            queued=self._steps.waiting,
            last_request_age_seconds=age,
            load=LoadDocument(self._load_stage(total), done, total),
            model=ModelDocument(
                self.config.served_name,
                self.config.model,
                model.pipeline if model else None,
                model.dtype if model else None,
                model.weights_bytes if model else None,
            ),
            ranks=self._ranks.documents(),
            adapters=[adapter.document(self.config.ranks) for adapter in self._adapters],
            failure=Problem(ErrorCode.ENGINE_FAILED, self._failure, True) if self._failure else None,
        )

    def sleep(self, call: SleepCall) -> bool:
        """Start going to sleep; False when that is done already. The outcome is in the state document.

        Raises:
            RequestError: WrongBoot, InvalidRequest, Conflict with another operation, Starting.
        """
        if call.level != "HostMemory":
            raise RequestError(ErrorCode.INVALID_REQUEST, f"level: expected HostMemory, found {call.level!r}", details={"field": "level"})
        return self._begin(call, "sleep", EngineState.ASLEEP, lambda: self._sleep_now(call))

    def wake(self, call: OperationCall) -> bool:
        """Start waking up; False when the model is awake already.

        Raises:
            RequestError: WrongBoot, Conflict with another operation, Starting.
        """
        return self._begin(call, "wake", EngineState.READY, lambda: self._wake_now(call))

    async def put_adapter(self, name: str, call: AdapterCall) -> AdapterDocument:
        """Load an adapter on all ranks or none; see `AdapterLoader.put` for its errors."""
        self._check_boot(call.boot_id)
        self._check_serving(f"adapter {name!r}")
        if name == self.config.served_name:
            raise RequestError(ErrorCode.CONFLICT, f"adapter {name!r}: the name is that of the base model")
        return await self._loader.put(name, call)

    async def delete_adapter(self, name: str, *, operation_id: str, boot_id: str | None, drain_s: float) -> None:
        """Unload an adapter; requests for it get 404 at once, running ones may finish within `drain_s`.

        Raises:
            RequestError: NotFound, WrongBoot, Timeout.
        """
        self._check_boot(boot_id)
        await self._loader.delete(name, drain_s=drain_s)

    def _abort(self, request_ids: list[str], code: ErrorCode, message: str) -> None:
        """End requests with an error; an id stands for all pictures of its request."""
        self._steps.end(RequestError(code, message), only=lambda picture: picture.rpartition("-")[0] in request_ids)

    async def _watch_ranks(self) -> None:
        self._fail(await self._ranks.failed())

    def _fail(self, reason: str) -> None:
        if self.state is EngineState.FAILED:
            return
        log.error("engine failed: %s", reason)
        self.state = EngineState.FAILED
        self._failure = reason
        self._lost.set()
        self._steps.end(GroupFailed(reason))

    def _load_stage(self, bytes_total: int) -> LoadStage:
        """The ranks are starting until one of them knows how much there is to load."""
        starting = self._stage is LoadStage.STARTING_RANKS
        return LoadStage.LOADING_WEIGHTS if starting and bytes_total else self._stage

    # --- sleep and wake -------------------------------------------------------------------------------------------------

    async def _sleep_now(self, call: SleepCall) -> None:
        self.state = EngineState.DRAINING
        try:
            drain_s = call.deadline_seconds if call.mode is SleepMode.WAIT else 0.0
            await self._steps.drain(drain_s, ErrorCode.ASLEEP, "the model went to sleep before the picture was finished")
            self.state = EngineState.SLEEPING
            await self._loader.call_all("sleep", timeout_s=self.config.tick_timeout_s)
        except RequestError:
            self._back_to(EngineState.READY)
            raise
        self._back_to(EngineState.ASLEEP)

    async def _wake_now(self, call: OperationCall) -> None:
        self.state = EngineState.WAKING
        try:
            await self._loader.call_all("wake_up", timeout_s=call.deadline_seconds)
        except RequestError:
            self._back_to(EngineState.ASLEEP)
            raise
        self._back_to(EngineState.READY)

    def _back_to(self, state: EngineState) -> None:
        """The state after an operation, unless the group failed or the server is ending meanwhile."""
        if self.state not in (EngineState.FAILED, EngineState.TERMINATING):
            self.state = state

    def _begin(self, call: OperationCall, kind: str, goal: EngineState, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Start an operation unless it runs (True) or there is nothing left to do (False)."""
        self._check_boot(call.boot_id)
        if self._operations.is_running(call.operation_id):
            return True
        if self._operations.is_done(call.operation_id):
            return False
        self._operations.require_idle(kind)
        if self.state is goal:
            return False
        if self.state not in (EngineState.READY, EngineState.ASLEEP):
            self._check_serving(kind)
        self._operations.start(call.operation_id, kind, work())
        return True

    # --- checks ---------------------------------------------------------------------------------------------------------

    def _check_boot(self, boot_id: str | None) -> None:
        if boot_id is not None and boot_id != self.boot_id:
            raise RequestError(ErrorCode.WRONG_BOOT, f"bootId: expected {self.boot_id}, found {boot_id}: the server restarted meanwhile")

    def _check_serving(self, what: str) -> None:
        if self.state is not EngineState.READY:
            code, why, retry_after_s = REFUSALS[self.state]
            raise RequestError(code, f"{what} is refused: {why}", retry_after_s=retry_after_s)


def _spec(params: GenerationParams, request_id: str, seed: int, use: LoRAUse | None) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        seed=seed,
        height=params.height,
        width=params.width,
        steps=params.steps,
        guidance_scale=params.guidance_scale,
        lora=use,
    )
