# SPDX-License-Identifier: Apache-2.0
"""One model on one rank group: admits requests, loads adapters, sleeps and wakes, and tells its state.

Runs on the server's event loop and holds no torch. Requests that were admitted are with `StepLoop`, adapters with `AdapterLoader`.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.compatibility import why_awake
from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine import admission
from diffusion_worker.engine.adapter_declared import DeclaredAdapters
from diffusion_worker.engine.adapter_loading import AdapterLoader
from diffusion_worker.engine.adapter_outcomes import DEFERRING
from diffusion_worker.engine.adapter_ranks import AdapterLoads
from diffusion_worker.engine.adapter_table import AdapterTable
from diffusion_worker.engine.adapter_use import AdapterUse
from diffusion_worker.engine.admission import GenerationParams
from diffusion_worker.engine.documents import (
    AdapterCall,
    AdapterDocument,
    EngineState,
    LoadDocument,
    LoadStage,
    ModelDocument,
    OperationCall,
    ProfileCall,
    ProfileDocument,
    SleepCall,
    SleepPolicy,
    StateDocument,
    WakeCall,
)
from diffusion_worker.engine.holding import Holding
from diffusion_worker.engine.life import EngineLife
from diffusion_worker.engine.model_digest import ModelDigest
from diffusion_worker.engine.model_fetching import ModelFetch
from diffusion_worker.engine.operations import Operations, OperationsDone
from diffusion_worker.engine.rank_answers import all_true
from diffusion_worker.engine.rank_group import RankGroup
from diffusion_worker.engine.recovery import RestartBudget
from diffusion_worker.engine.requests import Requests
from diffusion_worker.engine.results import Generation, RequestEvent
from diffusion_worker.engine.sleep_policy import SleepRules
from diffusion_worker.engine.sleeping import Sleeper
from diffusion_worker.engine.step_loop import StepLoop, StepStats
from diffusion_worker.engine.supervision import Supervisor
from diffusion_worker.engine.warming import warm_up
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import ModelInfo
from diffusion_worker.sources.fetching import Fetcher
from diffusion_worker.sources.source import Source

log = logging.getLogger(__name__)


class Engine:
    """The engine of one server process; every method runs on its event loop."""

    def __init__(self, config: WorkerConfig, ranks: RankGroup, *, boot_id: str, fetcher: Fetcher | None = None) -> None:
        self.config = config
        self.boot_id = boot_id
        self.life = EngineLife()
        self.rules = SleepRules(config.desired_path)
        self._ranks = ranks
        self._model: ModelInfo | None = None
        self._lost = asyncio.Event()
        self._steps = StepLoop(
            ranks,
            max_batch_size=config.max_batch_size,
            max_loras=config.max_loras,
            tick_timeout_s=config.tick_timeout_s,
            window_s=config.batch_window_s,
            broken=lambda reason: self._supervisor.on_stepping_broken(reason),
        )
        self._digest = ModelDigest(Path(config.model))
        self._fetcher = fetcher or Fetcher(config)
        self._model_fetch = ModelFetch(config, self._fetcher)
        self._adapters = AdapterTable(capacity=config.max_cached_loras, residents=config.max_loras)
        self._loader = AdapterLoader(
            self._adapters,
            ranks,
            self._fetcher,
            self.life,
            ranks_total=config.ranks,
            abort=self._abort,
            settled=self._settled,
            require_serving=self._require_serving,
            follow=lambda deadline_s: self._declared.follow(deadline_s),
        )
        self._declared = DeclaredAdapters(self._loader, config, lambda: self.rules.desired)
        self._adapter_use = AdapterUse(self._adapters, self._loader, config, self.life)
        self._requests = Requests(
            config,
            self.life,
            self._steps,
            self._adapter_use,
            Holding(self.life, self.rules, wake=self.wake_on_demand),
            identity=lambda: (self._model_fetch.revision, self._digest.value),
        )
        self._operations = Operations()
        self._supervisor = Supervisor(
            self.life,
            ranks,
            self._steps,
            self._loader,
            budget=RestartBudget(config.max_restarts),
            call_timeout_s=config.rank_timeout_s,
            prepare=self._prepare,
            failed=self._fail,
        )
        self._sleeper = Sleeper(self.life, self._steps, self._loader, self._supervisor, call_timeout_s=config.rank_timeout_s)

    @property
    def state(self) -> EngineState:
        """What it does."""
        return self.life.state

    @property
    def version(self) -> str:
        """Of the worker."""
        return self._requests.version

    @property
    def model(self) -> ModelInfo | None:
        """The model, once it was loaded."""
        return self._model

    @property
    def features(self) -> dict[str, str]:
        """What became of the options that speed up or shrink the model."""
        return self._steps.features

    @property
    def loaded(self) -> bool:
        """Whether the first load is over, and the end has not begun."""
        return self.life.loaded

    async def start(self) -> None:
        """Load the model and its adapters; returns when requests are served, or when the group is asleep by policy.

        Raises:
            ConfigError: the model or an option is wrong. GroupFailed: the ranks did not come up.
        """
        await self._fetch_model()
        await self._prepare(await self._ranks.start())
        self.life.stage = LoadStage.LOADING_ADAPTERS
        await self._declared.load_at_start()
        self.life.stage = LoadStage.DONE
        self.life.enter(EngineState.READY)
        self._supervisor.begin()
        if self.rules.policy is SleepPolicy.ASLEEP:
            await self._sleeper.sleep(SleepCall(operation_id=f"policy-{self.boot_id}"))
        self.life.loaded = True
        self._digest.begin()

    async def run_until_failure(self) -> str:
        """Returns the reason when the engine cannot go on; every waiting request then has its error."""
        await self._lost.wait()
        return str(self.life.failure)

    async def terminate(self) -> None:
        """Stop admission, let running requests finish within the configured time, end the ranks."""
        self.life.loaded = False
        self._digest.end()
        self._loader.stop(RequestError(ErrorCode.TERMINATING, "the server is shutting down", retry_after_s=1.0))
        if self.state is not EngineState.FAILED:
            self.life.enter(EngineState.TERMINATING)
            await self._steps.drain(self.config.drain_timeout_s, ErrorCode.TERMINATING, "the server is shutting down")
        await self._supervisor.end()
        await self._ranks.stop()
        self._model_fetch.end()
        await self._fetcher.close()

    async def generate(self, params: GenerationParams, *, on_event: Callable[[RequestEvent], None] | None = None) -> Generation:
        """Make the pictures of a request; see `Requests.generate`."""
        return await self._requests.generate(params, on_event=on_event)

    def accelerates(self, params: GenerationParams) -> bool:
        """Whether the step cache may skip work for a request: where there is one, unless every step or every bit is asked for."""
        return self._requests.accelerates(params)

    @property
    def dropped_frames(self) -> tuple[int, int]:
        """Frames on the wire to the ranks that were no message, at the server's end and at the ranks'."""
        return self._ranks.dropped_frames

    @property
    def stats(self) -> StepStats:
        """What the ranks did since the start, for metrics."""
        return self._steps.stats

    @property
    def adapter_loads(self) -> AdapterLoads:
        """What became of the loads of adapters, for metrics."""
        return self._loader.loads

    @property
    def registered_adapters(self) -> int:
        """Adapters in the ranks' host memory, for metrics; the same bytes under two names are one."""
        return self._adapters.registered

    @property
    def active_adapters(self) -> int:
        """Different adapters that pictures are being made with, for metrics."""
        return self._steps.active_adapters

    @property
    def held(self) -> Holding:
        """The requests that wait until the model serves, and what became of those that did."""
        return self._requests.holding

    @property
    def operations_done(self) -> OperationsDone:
        """What became of sleeps and wakes, for metrics."""
        return self._operations.done

    def served_models(self) -> list[tuple[str, AdapterDocument | None]]:
        """Names a request may ask for: the base, then the adapters that are loaded, or would be for it."""
        adapters = self._adapter_use.served()
        return [(self.config.served_name, None)] + [(adapter.name, adapter.document(self.config.ranks)) for adapter in adapters]

    def model_document(self, name: str) -> AdapterDocument | None:
        """The adapter that a request with a model's name would use; None for the base. Nothing is loaded by it.

        Raises:
            RequestError: NotFound, AdapterNotLoaded, as for a request.
        """
        return None if name == self.config.served_name else self._adapter_use.resolve(name).document(self.config.ranks)

    def adapter_source(self, name: str) -> Source | None:
        """Where the adapter of a name came from, in whatever state it is; None where there is none."""
        adapter = self._adapters.get(name)
        return adapter.call.source if adapter else None

    def state_document(self) -> StateDocument:
        """Everything the control API shows; cheap, and answers in every state."""
        done, total = self._model_fetch.progress if self.life.stage is LoadStage.FETCHING else self._ranks.load_progress()
        model = self._model
        return StateDocument(
            boot_id=self.boot_id,
            generation=self._ranks.generation,
            state=self.state,
            operation=self._operations.running(),
            last_operation=self._operations.last,
            in_flight=self._steps.running,
            queued=self._steps.waiting + self._adapter_use.waiting,
            last_request_age_seconds=self._requests.last_age_s,
            load=LoadDocument(self.life.load_stage(total), done, total),
            model=ModelDocument(
                self.config.served_name,
                self.config.model_source or self.config.model,
                model.pipeline if model else None,
                model.dtype if model else None,
                model.weights_bytes if model else None,
                self._digest.value,
                self._model_fetch.revision,
            ),
            ranks=self._ranks.documents(),
            adapters=[adapter.document(self.config.ranks) for adapter in self._adapters],
            failure=self.life.problem() or self._model_fetch.problem,
            restarts=self.life.losses.restarts,
            last_loss=self.life.losses.document(time.monotonic()),
            features=self._steps.features,
            state_age_seconds=self.life.state_age_seconds,
            policy=self.rules.policy,
            held=self.held.document(),
        )

    def sleep(self, call: SleepCall) -> bool:
        """Start going to sleep; False when that is done already. The outcome is in the state document.

        Raises:
            RequestError: WrongBoot, InvalidRequest, Conflict with another operation, Starting.
        """
        if option := why_awake(self.config):
            raise RequestError(ErrorCode.INVALID_REQUEST, f"sleep: not supported with {option}")
        return self._begin(call, "sleep", EngineState.ASLEEP, lambda: self._sleeper.sleep(call))

    def wake(self, call: WakeCall) -> bool:
        """Start waking up; False when the model is awake already.

        Raises:
            RequestError: WrongBoot, Conflict with another operation, Starting.
        """
        return self._begin(call, "wake", EngineState.READY, lambda: self._sleeper.wake(call))

    def wake_on_demand(self) -> None:
        """A request waits: with policy OnIdle the model wakes, as soon as what goes on allows it. Returns at once; may be repeated."""
        if self.rules.policy is SleepPolicy.ON_IDLE and self.state is EngineState.ASLEEP and self._operations.running() is None:
            call = WakeCall(operation_id=f"demand-{uuid.uuid4().hex}")
            self._operations.start(call.operation_id, "wake", self._sleeper.wake(call))

    async def put_adapter(self, name: str, call: AdapterCall) -> AdapterDocument:
        """Load an adapter on all ranks or none, at the wake of those that sleep; see `AdapterLoader.put` for its errors."""
        self._check_boot(call.boot_id)
        if self.life.beneath not in (EngineState.DRAINING, *DEFERRING):
            self.life.require_ready(f"adapter {name!r}", restarting_too=False)
        if name == self.config.served_name:
            raise RequestError(ErrorCode.CONFLICT, f"adapter {name!r}: the name is that of the base model")
        self._declared.called(name)
        return await self._loader.put(name, call)

    async def delete_adapter(self, name: str, *, operation_id: str, boot_id: str | None, drain_s: float) -> None:
        """Unload an adapter, in every state; requests for it get 404 at once, running ones may finish within `drain_s`.

        Raises:
            RequestError: NotFound, WrongBoot, Timeout.
        """
        self._check_boot(boot_id)
        self._declared.called(name)
        await self._loader.delete(name, drain_s=drain_s)

    async def profile(self, call: ProfileCall) -> ProfileDocument:
        """Begin or end a trace on every rank; nothing happens where profiling is off.

        Raises:
            RequestError: WrongBoot, Busy and the like where the ranks do not serve, RankFailed, Timeout.
        """
        self._check_boot(call.boot_id)
        self.life.require_ready("profile", restarting_too=False)
        replies = await self._loader.call_all("profile", timeout_s=call.deadline_seconds, is_start=call.start, prefix=call.prefix)
        if call.start:
            return ProfileDocument(running=all_true(replies))
        paths = [msgspec.msgpack.decode(reply.result or b"", type=str | None) for reply in replies]
        return ProfileDocument(running=False, files=[path for path in paths if path])

    async def _fetch_model(self) -> None:
        """Have the model's folder here; raises ConfigError."""
        if self._model_fetch.needed:
            self.life.stage = LoadStage.FETCHING
            await self._model_fetch.run()
            self.life.stage = LoadStage.STARTING_RANKS

    async def _settled(self) -> None:
        """Returns when no generation of ranks is being started, after the first; raises GroupFailed if none comes any more."""
        if self.state is not EngineState.STARTING:
            await self._supervisor.settled()

    def _require_serving(self, what: str) -> None:
        """Raises RequestError where the ranks take no adapter now."""
        if self.state not in (EngineState.STARTING, EngineState.DRAINING):
            self.life.require_ready(what, restarting_too=False)

    async def _prepare(self, model: ModelInfo) -> None:
        """Have ranks that have just loaded ready to serve; raises ConfigError or GroupFailed."""
        self._model = self._requests.model = model
        admission.check_defaults(self.config.defaults, self.config.limits, model)
        self._steps.describe(model)
        self.life.stage = LoadStage.WARMUP
        self._steps.features = await warm_up(self._ranks, self.config, model)

    def _abort(self, request_ids: list[str], code: ErrorCode, message: str) -> None:
        """End requests with an error; an id stands for all pictures of its request."""
        self._steps.end(RequestError(code, message), only=lambda picture: picture.rpartition("-")[0] in request_ids)

    def _fail(self, reason: str) -> None:
        if self.life.fail(reason):
            log.error("engine failed: %s", reason)
            self._lost.set()
            self._loader.stop(RequestError(ErrorCode.ENGINE_FAILED, reason, retry_after_s=10.0))
            self._steps.end(GroupFailed(reason))

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
            self.life.require_ready(kind, restarting_too=False)
        self._operations.start(call.operation_id, kind, work())
        return True

    # --- checks ---------------------------------------------------------------------------------------------------------

    def _check_boot(self, boot_id: str | None) -> None:
        if boot_id is not None and boot_id != self.boot_id:
            raise RequestError(ErrorCode.WRONG_BOOT, f"bootId: expected {self.boot_id}, found {boot_id}: the server restarted meanwhile")
