# SPDX-License-Identifier: Apache-2.0
"""Construction of an engine: each part gets the parts it needs, and callbacks for the others."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.adapters.declared import DeclaredAdapters
from diffusion_worker.engine.adapters.runner import AdapterRunner
from diffusion_worker.engine.adapters.table import AdapterTable
from diffusion_worker.engine.requests import admission
from diffusion_worker.engine.requests.adapter_selection import AdapterSelection
from diffusion_worker.engine.requests.holding import Holding
from diffusion_worker.engine.requests.service import RequestService
from diffusion_worker.engine.scheduling.step_hold import Pausing
from diffusion_worker.engine.scheduling.step_loop import StepLoop
from diffusion_worker.engine.sleep.calls import SleepCalls
from diffusion_worker.engine.sleep.policy import SleepRules
from diffusion_worker.engine.sleep.rank_tasks import SleepingRanks
from diffusion_worker.engine.sleep.record import SleepNotes, record_key
from diffusion_worker.engine.sleep.sleeper import Sleeper
from diffusion_worker.engine.startup.model_digest import ModelDigest
from diffusion_worker.engine.startup.model_fetching import ModelFetch
from diffusion_worker.engine.startup.preparation import Preparation
from diffusion_worker.engine.startup.supervisor import Supervisor
from diffusion_worker.engine.startup.wake_verification import Verification
from diffusion_worker.engine.state.lifecycle import ENDING, EngineLife
from diffusion_worker.engine.state.operations import Operations
from diffusion_worker.engine.state.rank_calls import RankCalls
from diffusion_worker.engine.state.rank_protocol import RankGroup
from diffusion_worker.engine.state.restart_budget import RestartBudget
from diffusion_worker.engine.state.revision import Signal
from diffusion_worker.engine.state.state_document import EngineState
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import ModelInfo
from diffusion_worker.sources.fetching import Fetcher

log = logging.getLogger(__name__)


class EngineParts:
    """The parts of one engine, made on its event loop. `lost` is set when the engine cannot go on."""

    def __init__(self, config: WorkerConfig, ranks: RankGroup, fetcher: Fetcher) -> None:
        self.config = config
        self.signal = Signal()
        self.life = EngineLife(on_change=self._state_changed)
        self.rules = SleepRules(config.desired_path)
        self.ranks = ranks
        self.rank_calls = RankCalls(ranks)
        self.lost = asyncio.Event()
        self.steps = StepLoop(
            ranks,
            max_batch_size=config.max_batch_size,
            max_loras=config.max_loras,
            tick_timeout_s=config.tick_timeout_s,
            window_s=config.batch_window_s,
            broken=lambda reason: self.supervisor.on_stepping_broken(reason),
        )
        self.digest = ModelDigest(Path(config.model))
        self.fetcher = fetcher
        self.model_fetch = ModelFetch(config, fetcher, lambda: self.rules.desired.model)
        self.adapters = AdapterTable(
            capacity=config.max_cached_loras,
            residents=config.max_loras,
            # With an operator all names are of custom resources.
            keep_failed=config.preload_loras if config.desired_path is None else None,
        )
        self.runner = AdapterRunner(self.adapters, ranks, fetcher, self.life, abort=self._abort)
        self.declared = DeclaredAdapters(self.adapters, self.runner, config)
        self.adapter_use = AdapterSelection(self.adapters, self.runner, config, self.life)
        self.requests = RequestService(
            config,
            self.life,
            self.steps,
            self.adapter_use,
            Holding(self.life, self.rules, wake=lambda: self.sleep_calls.wake_on_demand(), on_held=self.signal.notify),
            identity=lambda: (self.model_fetch.revision, self.digest.value),
        )
        self.verification = Verification(self.rank_calls.call_all, self.adapters.held, self.runner.load_again)
        self.pausing = Pausing(self.steps, self.rank_calls.call_all)
        self.preparation = Preparation(
            config,
            self.life,
            self.rank_calls.call_all,
            self.declared,
            self.runner,
            self.verification,
            describe=self._describe,
            warmed=self.steps.warmed_up,
            wants_mirrors=lambda: self.rules.wants_mirrors,
        )
        self.supervisor = Supervisor(
            self.life,
            ranks,
            self.steps,
            self.runner,
            self.preparation,
            budget=RestartBudget(config.max_restarts),
            failed=self.fail,
        )
        self.notes = SleepNotes(
            config.state_dir,
            key=lambda: record_key(config, version=self.requests.version, revision=self.model_fetch.revision),
            fingerprints=lambda: self.verification.recorded,
        )
        self.operations = Operations(self.fail, on_end=self.signal.notify)
        told = SleepingRanks(ranks, self.rank_calls.call_all, call_timeout_s=config.rank_timeout_s)
        sleeper = Sleeper(self.life, told, self.pausing, self.preparation, self.supervisor, self.notes)
        self.sleep_calls = SleepCalls(
            self.life, self.rules, self.operations, sleeper, idle_s=self._idle_s, held=lambda: self.requests.holding.current
        )

    def _state_changed(self) -> None:
        """Tell waiting clients, and have standby ranks while the model serves, until the worker ends."""
        self.signal.notify()
        if self.life.state is EngineState.READY:
            self.ranks.keep_standbys()
        elif self.life.state in ENDING:
            self.ranks.end_standbys()

    def _describe(self, model: ModelInfo) -> None:
        """Hand the ranks' description of the model, awake or not, to requests and steps.

        Raises:
            ConfigError: the model cannot make images of the default size, or they are over the limit.
        """
        self.requests.model = model
        admission.check_defaults(self.config.defaults, self.config.limits, model)
        self.steps.describe(model)

    def _idle_s(self) -> float:
        """Return the seconds since the last request came or ended, 0 while there is one; before the first, since the state began."""
        age_s = self.requests.last_age_s
        return self.life.state_age_seconds if age_s is None else age_s

    def _abort(self, request_ids: Sequence[str], code: ErrorCode, message: str) -> None:
        """End requests with an error; an id stands for all images of its request."""
        self.steps.end(RequestError(code, message), only=lambda image: image.rpartition("-")[0] in request_ids)

    def fail(self, reason: str) -> None:
        """Fail the engine for good: requests that wait or run, and loads of adapters, end with the reason. No effect when repeated."""
        if self.life.fail(reason):
            log.error("the worker failed, and ends: %s", reason)
            self.lost.set()
            self.runner.stop(RequestError(ErrorCode.ENGINE_FAILED, reason, retry_after_s=10.0))
            self.steps.end(GroupFailed(reason))
