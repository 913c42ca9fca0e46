# SPDX-License-Identifier: Apache-2.0
"""Ranks in the test's process, for tests of everything above them: they start, step, sleep, wake and die as a test says.

Real: the protocol `RankGroup` and its messages. Not real: the model, its memory and the processes.

A test can read the calls, and make loads, steps and calls wait. It can make an adapter, a sleep, a wake, a restart or any method fail, also
on one rank, or hang or kill. It can corrupt or keep memory of a rank.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import ClassVar

from msgspec.msgpack import decode, encode

from diffusion_worker.engine.state.rank_protocol import Loss, TickReport
from diffusion_worker.engine.state.state_document import RankDocument, RankState
from diffusion_worker.errors import ConfigError, ErrorCode, Fault, GroupFailed, RequestError
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import (
    ErrorReport,
    LoadedLoRA,
    ModelInfo,
    ModelMerging,
    PreparedPart,
    Recipe,
    RpcReply,
    SleepLevel,
    SleepTask,
    Tick,
    WakeTask,
    WarmedUp,
    WarmTick,
    pack,
)
from support.worker.fake_rank import (
    CHANGE,
    FAKE_STAGES,
    WEIGHTS_BYTES,
    FakeRank,
    FakeRequests,
    fake_digest,
    fake_identity,
    fake_pixels,
    fake_preview,
)

__all__ = ["CHANGE", "FAKE_STAGES", "WEIGHTS_BYTES", "FakeRankGroup", "fake_digest", "fake_identity", "fake_pixels", "fake_preview"]


class NothingPrepared:
    """A prepared adapter without parts, since no rank here needs any."""

    parts: ClassVar[list[PreparedPart]] = []

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""


class FakeRankGroup(FakeRequests):
    """Ranks that load at once unless `loading` is cleared, and step at once unless `stepping` is."""

    def __init__(self, ranks: int = 1, *, config_error: str | None = None, step_s: float = 0.0) -> None:
        self.loading, self.stepping, self.calling = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.loading, self.stepping, self.calling):
            gate.set()
        # Errors of loads by the adapter's folder, on all ranks or on the last one alone, and of methods on all ranks.
        self.adapter_errors: dict[str, ErrorReport] = {}
        self.adapter_errors_of_one: dict[str, ErrorReport] = {}
        self.method_errors: dict[str, ErrorReport] = {}
        # Recipes that loads report beside the digest, by the adapter's folder.
        self.adapter_recipes: dict[str, Recipe] = {}
        # The most copies of adapters that ranks keep; one more while one replaces another.
        self.max_cached = 16
        # The model as the ranks report it.
        merging = [ModelMerging("transformer", "FakeTransformer", "forward", True, "tested with nothing")]
        self.model = ModelInfo("FakePipeline", "float32", size_multiple=8, weights_bytes=WEIGHTS_BYTES, merging=merging)
        # Methods that were called, over all generations; those of every start and every sleep are only counted.
        self.calls: list[str] = []
        self.counts = dict.fromkeys(("warm_up", "fingerprint", "mirror_weights", "synchronize"), 0)
        # The effects of the worker's options, as the ranks report them after their warm-up.
        self.features: dict[str, str] = {}
        # The times of the warm-up's ticks, as the ranks report them.
        self.warm_ticks: list[WarmTick] = []
        # The checksum of the weights, and the result for a fixed seed, as the ranks report them.
        self.weights_checksum, self.probe = "weights", "probe"
        # Results of the next sleeps and wakes on the last rank: an error that it acknowledges, or None. The others succeed.
        self.sleep_errors: list[ErrorReport | None] = []
        self.wake_errors: list[ErrorReport | None] = []
        # Methods that no rank answers, and methods whose next call kills the group, with the reason of the loss.
        self.hanging: set[str] = set()
        self.killers: dict[str, str] = {}
        # For each start of a generation, in order, True if it was into sleep.
        self.starts_asleep: list[bool] = []
        self.stopped = False
        # Results of the next restarts, in order: an error to raise, or None. Later restarts succeed.
        self.restart_errors: list[Exception | None] = []
        self.generation = 1
        self.dropped_frames = (0, 0)
        # Standbys that are ready, and for each time that they were wanted or ended, in order, True or False.
        self.standbys = 0
        self.standbys_kept: list[bool] = []
        self._count, self._config_error, self._step_s = ranks, config_error, step_s
        super().__init__()

    def _forget(self) -> None:
        super()._forget()
        self._failure: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        self._ticks: asyncio.Queue[tuple[Tick, list[bytes | memoryview]]] = asyncio.Queue()
        # A test may corrupt a rank; the fault ends with the generation.
        self.members = [FakeRank(number) for number in range(self._count)]
        # The state of all ranks; None where each is ready or asleep.
        self._state: RankState | None = RankState.STARTING

    @property
    def loss(self) -> Loss | None:
        """Return the loss that the first `lose` gave to this generation of the group; None while it lives."""
        return self._failure.result() if self._failure.done() else None

    def lose(self, reason: str, fault: Fault = Fault.DIED) -> None:
        """Lose the group, as when a process of a rank ends. Only the first reason and fault of a generation count."""
        self._state = RankState.DEAD
        if not self._failure.done():
            self._failure.set_result(Loss(reason, fault))

    def keep_standbys(self) -> None:
        """Add True to `standbys_kept`; no standby is made."""
        self.standbys_kept.append(True)

    def end_standbys(self) -> None:
        """Add False to `standbys_kept`; nothing is ended."""
        self.standbys_kept.append(False)

    async def start(self, *, asleep: bool = False) -> ModelInfo:
        """Wait for `loading`, and return the model's facts; with `asleep` each rank then discards its weights. Raises a ConfigError if
        the test gave one."""
        if self._config_error is not None:
            raise ConfigError(self._config_error)
        self.starts_asleep.append(asleep)
        await self._wait(self.loading)
        for rank in self.members if asleep else []:
            rank.sleep(SleepLevel.DISCARD)
        self._state = None
        return self.model

    async def restart(self, *, asleep: bool = False) -> ModelInfo:
        """Start the next generation, and wait for `loading`. If the next of `restart_errors` is an error, lose the group and raise it."""
        self._forget()
        self.generation += 1
        error = self.restart_errors.pop(0) if self.restart_errors else None
        if error is not None:
            self.lose(str(error))
            raise error
        return await self.start(asleep=asleep)

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        self._check()
        self._ticks.put_nowait((tick, list(frames)))

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """Run the next queued tick, after waiting for `stepping` and for a tick. After `timeout_s` the group is lost, which raises
        GroupFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait(self.stepping)
                tick, frames = await self._ticks.get()
                await asyncio.sleep(self._step_s)
                self._check()
        except TimeoutError:
            self.lose(f"{phase} was not finished within {timeout_s:g} s", Fault.STALLED)
            self._check()
        report = self._run(tick, frames)
        assert not report.done.rows or not any(rank.asleep for rank in self.members), "a step on memory that was given back"
        return report

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: object
    ) -> list[RpcReply]:
        """Run a method of the worker on every rank, and return a reply of each. Wait for `calling` first, except for `synchronize`.

        After `timeout_s` a RequestError (Timeout) is raised, and GroupFailed if the group is lost.
        """
        self._check()
        if method in self.counts:
            self.counts[method] += 1
        else:
            self.calls.append(method)
        try:
            async with asyncio.timeout(timeout_s):
                if method != "synchronize":
                    await self._wait(self.calling)
                if method in self.hanging:
                    await self._wait(asyncio.Event())
        except TimeoutError:
            raise RequestError(ErrorCode.TIMEOUT, f"{method}: no answer within {timeout_s:g} s") from None
        if method in self.killers:
            self.lose(self.killers.pop(method))
            self._check()
        raw = pack(**kwargs)
        if method in self.method_errors:
            return self._replies(error=self.method_errors[method])
        match method:
            case "warm_up":
                return self._replies(WarmedUp(dict(self.features), self.warm_ticks))
            case "add_lora":
                return self._add_lora(decode(raw["request"], type=LoRARequest), decode(raw["options"], type=LoadOptions))
            case "remove_lora":
                return self._replies(self.registered.pop(decode(raw["lora_int_id"], type=int), None) is not None)
            case "list_loras":
                return self._replies(sorted(self.registered))
            case "handle_sleep_task":
                task = decode(raw["task"], type=SleepTask)
                if task.level is SleepLevel.DISCARD:
                    self.registered.clear()
                return self._acked(task, self.sleep_errors)
            case "handle_wake_task":
                return self._acked(decode(raw["task"], type=WakeTask), self.wake_errors)
            case "fingerprint":
                return self._each([rank.fingerprint(self.registered, self.weights_checksum, self.probe) for rank in self.members])
            case "mirror_weights" | "synchronize":
                return self._replies()
            case "profile":
                return self._replies(decode(raw["is_start"]) or f"/traces/{self.generation}.json")
        raise AssertionError(f"the worker has no method {method}")

    async def prepare_adapter(self, request: dict[str, object], options: dict[str, object], *, timeout_s: float) -> "NothingPrepared":
        """Prepare nothing: `add_lora` reports the faults of an adapter."""
        self._check()
        return NothingPrepared()

    def _acked(self, task: SleepTask | WakeTask, errors: list[ErrorReport | None]) -> list[RpcReply]:
        """Acknowledge a task on all ranks; the last rank fails where the next of the errors is not None."""
        error = errors.pop(0) if errors else None
        return self._each([rank.act(task, error if rank is self.members[-1] else None) for rank in self.members])

    def _add_lora(self, request: LoRARequest, options: LoadOptions) -> list[RpcReply]:
        path, found, evicted = request.lora_path, fake_digest(request.lora_path), []
        if path in self.adapter_errors:
            return self._replies(error=self.adapter_errors[path])
        if options.digest not in (None, found):
            message = f"adapter {request.lora_name!r}: expected {options.digest}, found {found}"
            return self._replies(error=ErrorReport(ErrorCode.DIGEST_MISMATCH, message))
        kept = self.registered | {request.lora_int_id: path}
        for lora_int_id in options.evict or []:
            if len(set(kept.values())) > self.max_cached:
                evicted.append(lora_int_id)
                kept.pop(lora_int_id, None)
        if len(set(kept.values())) > self.max_cached + 1:
            return self._replies(error=ErrorReport(ErrorCode.CAPACITY_EXCEEDED, f"{len(kept)} adapters"))
        self.registered = kept
        for rank in self.members:
            rank.load_adapter(request.lora_int_id)
        loaded = LoadedLoRA(
            found, 8, 24, 4096, recipe=self.adapter_recipes.get(path), evicted=evicted, checksum="kept", identity=fake_identity(path)
        )
        replies = self._replies(loaded)
        if path in self.adapter_errors_of_one:
            replies[-1] = RpcReply(1, replies[-1].rank, None, self.adapter_errors_of_one[path])
        return replies

    def _replies(self, result: object = None, *, error: ErrorReport | None = None) -> list[RpcReply]:
        if error is not None:
            return [RpcReply(1, rank.number, None, error) for rank in self.members]
        return self._each([result] * len(self.members))

    def _each(self, results: Sequence[object]) -> list[RpcReply]:
        return [RpcReply(1, rank.number, encode(result), None, rank.memory()) for rank, result in zip(self.members, results, strict=True)]

    async def failed(self) -> Loss:
        """Wait until `lose` is called, and return the loss."""
        return await asyncio.shield(self._failure)

    def documents(self) -> list[RankDocument]:
        """Return a document for each rank. The state is that of the group while it starts or fails, otherwise Asleep or Ready, and the
        pid is this process's."""
        states = [self._state or (RankState.ASLEEP if rank.asleep else RankState.READY) for rank in self.members]
        return [RankDocument(rank.number, os.getpid(), states[rank.number], 0.0, rank.memory()) for rank in self.members]

    def load_progress(self) -> tuple[int, int]:
        return (0 if self._state is RankState.STARTING else WEIGHTS_BYTES), WEIGHTS_BYTES

    async def stop(self) -> None:
        """End the group: as with real ranks, what waits for it raises GroupFailed."""
        self.lose("the ranks were ended")
        self.stopped, self._state = True, RankState.DEAD

    def _check(self) -> None:
        if self._failure.done():
            raise GroupFailed(self._failure.result().reason)

    async def _wait(self, event: asyncio.Event) -> None:
        """Wait for an event; raise if the group is lost first."""
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({waiting, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        self._check()
