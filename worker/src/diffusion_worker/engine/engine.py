# SPDX-License-Identifier: Apache-2.0
"""A model on a rank group: it admits requests, loads adapters, sleeps and wakes, and reports its state.

It runs on the server's event loop, without torch. `StepLoop` has the admitted requests, `AdapterTable` the adapters.
"""

import asyncio
import math
import time
from collections.abc import Callable

import msgspec

from diffusion_worker.compatibility import sleep_blocker
from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.adapters.runner import DEFERRING
from diffusion_worker.engine.adapters.table import LoadCounts
from diffusion_worker.engine.construction import EngineParts
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.engine.requests.holding import Holding
from diffusion_worker.engine.requests.queueing import RequestQueue
from diffusion_worker.engine.scheduling.step_hold import Pauser
from diffusion_worker.engine.scheduling.step_loop import StepStats
from diffusion_worker.engine.start import start
from diffusion_worker.engine.state.operations import OperationsDone
from diffusion_worker.engine.state.operator_epoch import OperatorEpoch
from diffusion_worker.engine.state.rank_calls import all_true
from diffusion_worker.engine.state.rank_protocol import RankGroup
from diffusion_worker.engine.state.request_events import Generation, RequestEvent
from diffusion_worker.engine.state.revision import Look, Revision, look_at
from diffusion_worker.engine.state.state_document import (
    AdapterCall,
    AdapterDocument,
    DrainCall,
    EngineState,
    LoadDocument,
    LoadStage,
    ModelDocument,
    OperationCall,
    OperationResult,
    PauseCall,
    ProfileCall,
    ProfileDocument,
    SleepCall,
    StateDocument,
    WakeCall,
)
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import Fingerprint, ModelInfo, TaskAck
from diffusion_worker.sources.fetching import Fetcher
from diffusion_worker.sources.source import Source


class Engine:
    """The engine of one server process; every method runs on its event loop."""

    def __init__(self, config: WorkerConfig, ranks: RankGroup, *, boot_id: str, fetcher: Fetcher | None = None, pod_uid: str = "") -> None:
        self.config = config
        self.boot_id = boot_id
        self.operator_epoch = OperatorEpoch()
        self.pod_uid = pod_uid
        self._parts = EngineParts(config, ranks, fetcher or Fetcher(config))
        self.life = self._parts.life
        self.rules = self._parts.rules
        self._steps = self._parts.steps
        self._draining: asyncio.Task[None] | None = None
        self._terminates = False
        adapters = self._parts.adapters
        self._revision = Revision(
            boot_id, self._parts.signal, look=self._look, touched=lambda: adapters.unpublished(config.ranks), settled=adapters.settle
        )

    @property
    def state(self) -> EngineState:
        """Return the engine's state."""
        return self.life.state

    @property
    def version(self) -> str:
        """Return the worker's version."""
        return self._parts.requests.version

    @property
    def model(self) -> ModelInfo | None:
        """The model; None until it is loaded."""
        return self._parts.requests.model

    @property
    def features(self) -> dict[str, str]:
        """Return by option, as `compile`, the effect it has on this model; empty before the ranks reported their warm-up."""
        return self._steps.features

    @property
    def loaded(self) -> bool:
        """Return whether the first load is over and termination has not begun."""
        return self.life.loaded

    async def start(self) -> None:
        """Load the model with its adapters, and return as soon as it serves or its policy has put it to sleep.

        Only then the digest of its files is computed, in the background. Any error also ends the requests that wait already.

        Raises:
            ConfigError: an option or the model is wrong. GroupFailed: the ranks did not come up, or `terminate` ended them.
        """
        try:
            await start(self._parts)
        except Exception as error:
            if not self._terminates:
                self._parts.fail(str(error))  # held requests end with it
            raise
        self.life.loaded = True
        self._parts.digest.begin()

    async def run_until_failure(self) -> str:
        """Block until a failure ends the engine for good, and return its reason; requests that wait or run end with errors then."""
        await self._parts.lost.wait()
        return str(self.life.failure)

    async def terminate(self) -> None:
        """Refuse new and held requests, let admitted ones finish within `--drain-timeout-seconds`, then end the ranks and wait for them.

        Loads of adapters and a sleep or wake in progress are cancelled. Requests left at the end of the time get an error.
        """
        self._terminates, self.life.loaded = True, False
        self._parts.digest.end()
        self._parts.declared.end()
        self._parts.runner.stop(RequestError(ErrorCode.TERMINATING, "the worker is shutting down", retry_after_s=1.0))
        self._accept_nothing()
        await self._finish(self.config.drain_timeout_s)
        if self._draining is not None:
            self._draining.cancel()
        await self._parts.supervisor.end()
        await self._parts.ranks.stop()
        self._parts.model_fetch.end()
        await self._parts.fetcher.close()

    def drain(self, call: DrainCall) -> None:
        """Accept no request from now on, and return at once; running ones may finish, held ones are refused. Harmless when repeated.

        Requests that run past the first call's deadline end with an error. Only the end of the process ends a drain.

        Raises:
            RequestError: WrongBoot.
        """
        self._check_boot(call.boot_id)
        self._accept_nothing()
        self._draining = self._draining or asyncio.create_task(self._finish(call.deadline_seconds))

    def _accept_nothing(self) -> None:
        self.life.enter(EngineState.TERMINATING)
        self._parts.pausing.release(Pauser.CALL)  # running work may be finished

    async def _finish(self, within_s: float) -> None:
        """Cancel a sleep or wake, and wait until no request is left; after `within_s` seconds end the rest with an error.

        An engine that failed does not wait, as its requests have ended.
        """
        await self._parts.sleep_calls.end()
        if self.state is EngineState.TERMINATING:
            await self._steps.drain(within_s, ErrorCode.TERMINATING, "the worker is shutting down")

    async def generate(self, params: GenerationParams, *, on_event: Callable[[RequestEvent], None] | None = None) -> Generation:
        """Make the images of a request; see `RequestService.generate`."""
        return await self._parts.requests.generate(params, on_event=on_event)

    def check(self, params: GenerationParams) -> None:
        """Check a request as far as possible before its turn; raise RequestError if it can never be served."""
        self._parts.requests.checked(params)

    def accelerates(self, params: GenerationParams) -> bool:
        """Return whether the step cache may skip work: there is one, and the request demands neither every step nor every bit."""
        return self._parts.requests.accelerates(params)

    @property
    def dropped_frames(self) -> tuple[int, int]:
        """Numbers of frames between server and ranks that were no valid message, at the server's end and at the ranks'."""
        return self._parts.ranks.dropped_frames

    @property
    def stats(self) -> StepStats:
        """Return the ranks' counters since the start, for metrics."""
        return self._steps.stats

    @property
    def adapter_loads(self) -> LoadCounts:
        """Return counters of adapter loads, for metrics."""
        return self._parts.adapters.loads

    @property
    def registered_adapters(self) -> int:
        """Number of copies of adapters on the ranks, a gauge in the metrics; names whose content has the same effect share a copy."""
        return len(self._parts.adapters.copies())

    @property
    def active_adapters(self) -> int:
        """Number of distinct adapters that the requests on the ranks use at this moment; a gauge in the metrics."""
        return self._steps.active_adapters

    @property
    def held(self) -> Holding:
        """The requests that wait until the model serves, with counts of the outcomes."""
        return self._parts.requests.holding

    @property
    def queue(self) -> RequestQueue:
        """The bounded queue of all requests, with counts of refusals."""
        return self._parts.requests.queue

    @property
    def operations_done(self) -> OperationsDone:
        """Durations, failures and freed bytes of all sleeps and wakes since the server began, as the metrics show them."""
        return self._parts.operations.done

    @property
    def last_acks(self) -> list[TaskAck]:
        """The ranks' acknowledgements of the sleep or wake that ended last; empty if it failed, and before the first."""
        return self._parts.operations.last_acks

    def served_adapters(self) -> list[AdapterDocument]:
        """List by name the adapters that a request may use, even if it must load them first."""
        return [adapter.document(self.config.ranks) for adapter in self._parts.adapter_use.served()]

    def model_document(self, name: str) -> AdapterDocument | None:
        """Return the adapter that a request with a model's name would use; None for the base model. No load is begun.

        Raises:
            RequestError: model_not_found, AdapterNotLoaded, as for a request.
        """
        return None if name in self.config.served_names else self._parts.adapter_use.resolve(name).document(self.config.ranks)

    def adapter_source(self, name: str) -> Source | None:
        """Return the source of a name's adapter, in any state; None if there is none."""
        adapter = self._parts.adapters.get(name)
        return adapter.call.source if adapter else None

    def state_document(self) -> StateDocument:
        """Return the whole state for the control API; cheap, and available in every state."""
        adapters = [adapter.document(self.config.ranks) for adapter in self._parts.adapters]
        return msgspec.structs.replace(self._bare_document(), adapters=adapters, revision=self._revision.current())

    async def state_after(self, revision: str, wait_s: float) -> StateDocument:
        """Wait until the state changes after a revision, or the time is over; return it whole.

        Raises:
            RequestError: Overloaded, too many clients wait already.
        """
        await self._revision.wait_for_other(revision, wait_s)
        return self.state_document()

    def end_watches(self) -> None:
        """End all waits for a change of the state, now and from now on: the server is about to close its connections."""
        self._revision.end()

    def _look(self) -> Look:
        work = self._steps.running + self._steps.waiting + self._parts.adapter_use.waiting + self.held.current
        batches = math.ceil(work / self.config.max_batch_size)
        return look_at(self._bare_document(), last_request_at_s=self._parts.requests.last_at_s, batches=batches)

    def _bare_document(self) -> StateDocument:
        """Return the state document without adapters and revision."""
        done, total = self._parts.model_fetch.progress if self.life.stage is LoadStage.FETCHING else self._parts.ranks.load_progress()
        model = self.model
        return StateDocument(
            boot_id=self.boot_id,
            generation=self._parts.ranks.generation,
            state=self.state,
            operation=self._parts.operations.running(),
            last_operation=self._parts.operations.last,
            in_flight=self._steps.running,
            queued=self._steps.waiting + self._parts.adapter_use.waiting,
            last_request_age_seconds=self._parts.requests.last_age_s,
            load=LoadDocument(self.life.load_stage(total), done, total),
            model=ModelDocument(
                self.config.served_name,
                self.config.model_source or self.config.model,
                model.pipeline if model else None,
                model.dtype if model else None,
                model.weights_bytes if model else None,
                self._parts.digest.value,
                self._parts.model_fetch.revision,
                self._steps.whole,
                model.merging if model else [],
            ),
            ranks=self._parts.ranks.documents(),
            adapters=[],
            failure=self.life.problem() or self._parts.model_fetch.problem,
            restarts=self.life.losses.restarts,
            last_loss=self.life.losses.document(time.monotonic()),
            standby_ranks=self._parts.ranks.standbys,
            features=self._steps.features,
            state_age_seconds=self.life.state_age_seconds,
            policy=self.rules.policy,
            wake_check=self._parts.verification.check,
            paused=self._parts.pausing.paused,
            held=self.held.document(),
            operator_epoch=self.operator_epoch.highest,
            draining=self._draining is not None,
            pod_uid=self.pod_uid,
        )

    @property
    def is_sleeping(self) -> bool:
        """Return whether memory is freed, about to be, or being restored; False while a sleep still drains."""
        return self.life.state_after_restart in (EngineState.SLEEPING, EngineState.ASLEEP, EngineState.WAKING)

    def sleep(self, call: SleepCall) -> bool:
        """Begin a sleep in the background; return False if the model sleeps deep enough, or if this operation is a repeated one and over.

        The state document reports the result. `SleepCalls.sleep` has the rules for calls that meet another operation.

        Raises:
            RequestError: WrongBoot. InvalidRequest, with the option that makes sleep impossible. Conflict with a wake, Starting or Busy.
        """
        self._check_boot(call.boot_id)
        if option := sleep_blocker(self.config):
            raise RequestError(ErrorCode.INVALID_REQUEST, f"sleep: not supported with {option}")
        return self._parts.sleep_calls.sleep(call)

    def wake(self, call: WakeCall) -> bool:
        """Begin a wake in the background, or cancel a sleep that drains; return False if the model is awake or the operation over.

        Raises:
            RequestError: WrongBoot. Conflict with a later part of a sleep or with a wake of fewer tags. Starting, Busy.
        """
        self._check_boot(call.boot_id)
        return self._parts.sleep_calls.wake(call)

    def wake_on_demand(self) -> None:
        """Wake the model for a waiting request, see `SleepCalls.wake_on_demand`."""
        self._parts.sleep_calls.wake_on_demand()

    async def operation_over(self, operation_id: str) -> OperationResult | None:
        """Wait for an operation, or the one it joined or cancelled, and return its result; None if it did nothing or ended long ago."""
        return await self._parts.operations.over(operation_id)

    async def pause(self, call: PauseCall) -> None:
        """Make no step until `resume`; return when running steps are over on the ranks. Harmless when repeated.

        Requests are accepted and queued meanwhile. A failed pause leaves the steps running.

        Raises:
            RequestError: WrongBoot, Starting, Asleep and the like if no steps are made, Timeout, RankFailed.
        """
        self._check_boot(call.boot_id)
        self.life.require_ready("pause", restarting_too=True)
        try:
            await self._parts.pausing.hold(Pauser.CALL, timeout_s=call.deadline_seconds)
        except GroupFailed:
            await self._parts.supervisor.settled()  # the next ranks have made no step

    def resume(self, call: OperationCall) -> None:
        """Make steps again, unless a sleep holds them; harmless if they are not paused. Raises RequestError (WrongBoot)."""
        self._check_boot(call.boot_id)
        self._parts.pausing.release(Pauser.CALL)

    async def probe(self, call: OperationCall) -> list[Fingerprint]:
        """Return each rank's fingerprint, in rank order, taken between two steps.

        Raises:
            RequestError: WrongBoot, Starting, Asleep and the like if the ranks do not serve, Busy, RankFailed, Timeout.
        """
        self._check_boot(call.boot_id)
        self.life.require_ready("probe", restarting_too=False)
        return await self._parts.verification.take(timeout_s=call.deadline_seconds)

    async def put_adapter(self, name: str, call: AdapterCall) -> AdapterDocument:
        """Put an adapter under a name; unless it is OnDemand, all ranks load it, or none. Sleeping ranks load it when they wake.

        Raises:
            RequestError: WrongBoot; Starting, Busy, EngineFailed or Terminating if the ranks do not serve; Conflict with the model's name;
                else as `AdapterRunner.put`.
        """
        self._check_boot(call.boot_id)
        if self.life.state_after_restart not in (EngineState.DRAINING, *DEFERRING):
            self.life.require_ready(f"adapter {name!r}", restarting_too=False)
        if name in self.config.served_names:
            raise RequestError(ErrorCode.CONFLICT, f"adapter {name!r}: its name is that of the base model")
        self._note_call(name)
        adapter = await self._parts.runner.put(name, call)
        return adapter.document(self.config.ranks)

    async def delete_adapter(self, name: str, *, operation_id: str, boot_id: str | None, drain_s: float) -> None:
        """Remove an adapter's name at once, so that requests for it get 404; then wait until the adapter is unloaded.

        Requests that already use it have `drain_s` seconds to finish, then end with AdapterRemoved. The call works in every state. It does
        not wait for a sleeping model, which unloads the adapter when it wakes.

        Raises:
            RequestError: NotFound, WrongBoot, RankFailed, Timeout.
        """
        self._check_boot(boot_id)
        self._note_call(name)
        await self._parts.runner.delete(name, drain_s=drain_s)

    async def profile(self, call: ProfileCall) -> ProfileDocument:
        """Begin or end a trace on every rank; without effect if profiling is off.

        Raises:
            RequestError: WrongBoot, Busy and the like if the ranks do not serve, RankFailed, Timeout.
        """
        self._check_boot(call.boot_id)
        self.life.require_ready("profile", restarting_too=False)
        replies = await self._parts.rank_calls.call_all("profile", timeout_s=call.deadline_seconds, is_start=call.start, prefix=call.prefix)
        if call.start:
            return ProfileDocument(running=all_true(replies))
        paths = [msgspec.msgpack.decode(reply.result or b"", type=str | None) for reply in replies]
        return ProfileDocument(running=False, files=[path for path in paths if path])

    def _note_call(self, name: str) -> None:
        """Record the time of a call about a name, as the newer of calls and mounted files counts; no effect without mounted files."""
        if self.config.desired_path is not None:
            self._parts.declared.called_at_s[name] = time.time()

    # --- checks ---------------------------------------------------------------------------------------------------------

    def _check_boot(self, former_boot_id: str | None) -> None:
        if former_boot_id is not None and former_boot_id != self.boot_id:
            message = f"bootId: expected {self.boot_id}, found {former_boot_id}: the worker restarted meanwhile"
            raise RequestError(ErrorCode.WRONG_BOOT, message)
