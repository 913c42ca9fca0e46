# SPDX-License-Identifier: Apache-2.0
"""A rank group in memory: the engine's `RankGroup` without processes or torch, for tests of the engine and its HTTP edge.

It behaves: requests take as many ticks as they have steps and tell each of them, with previews where asked, images follow
from the request alone, adapters have digests, sleep gives memory back. A test holds the steps, loads slowly, breaks an
adapter or kills the group; lets a method fail on one rank, hang or kill; corrupts what a rank holds, or lets it keep it.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from diffusion_worker.engine.state.rank_protocol import Loss, TickReport
from diffusion_worker.engine.state.state_document import RankDocument, RankState
from diffusion_worker.errors import ConfigError, ErrorCode, Fault, GroupFailed, RequestError
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import (
    ErrorReport,
    Failed,
    Fingerprint,
    Finished,
    LoadedLoRA,
    ModelInfo,
    Preview,
    Progress,
    PromptCacheStats,
    Recipe,
    Replay,
    RequestSpec,
    RpcReply,
    SleepLevel,
    SleepTask,
    StageSeconds,
    TaskAck,
    TaskStatus,
    Tick,
    TickDone,
    WakeTask,
    pack,
)
from support.worker.fake_images import DEFAULT_STEPS, fake_pixels, fake_preview, fake_preview_steps, fake_shape
from support.worker.fake_rank import WEIGHTS_BYTES, FakeRank

# What every image is said to have taken.
FAKE_STAGES = StageSeconds(encode=0.01, denoise=0.08, decode=0.02, post=0.005, peak_bytes=2_000_000)

# The reason why requests need the model alone, where `changing` says so.
CHANGE = "calls vae.enable_tiling()"


def fake_digest(path: str) -> str:
    """The digest of the adapter in a folder that need not exist."""
    return "sha256:" + hashlib.sha256(path.encode()).hexdigest()


class FakeRankGroup:
    """Ranks that load at once unless `loading` is cleared, and step at once unless `stepping` is."""

    def __init__(self, ranks: int = 1, *, config_error: str | None = None, step_s: float = 0.0) -> None:
        self.loading = asyncio.Event()
        self.loading.set()
        self.stepping = asyncio.Event()
        self.stepping.set()
        self.calling = asyncio.Event()
        self.calling.set()
        # Errors that a load of the adapter in this folder, or a method, answers with.
        self.adapter_errors: dict[str, ErrorReport] = {}
        self.method_errors: dict[str, ErrorReport] = {}
        # The same, of the last rank alone.
        self.adapter_errors_of_one: dict[str, ErrorReport] = {}
        # What a load of the adapter in this folder says beside its digest.
        self.adapter_recipes: dict[str, Recipe] = {}
        # Copies that the ranks keep of adapters; one more while one replaces another.
        self.max_cached = 16
        # Adapters that requests used at once, at the most.
        self.most_active = 0
        # Images of so many pixels and more are out of memory.
        self.out_of_memory_pixels: int | None = None
        # What the ranks say of the model they loaded.
        self.model = ModelInfo(pipeline="FakePipeline", dtype="float32", size_multiple=8, weights_bytes=WEIGHTS_BYTES)
        # What was called; what every start or every sleep has is counted apart.
        self.calls: list[str] = []
        self.counts = dict.fromkeys(("warm_up", "fingerprint", "synchronize"), 0)
        # At which of its steps a request needs the model alone; and who joined, with whether it is made so.
        self.changing: int | None = None
        self.joined: list[tuple[str, bool]] = []
        # What became of the worker's options, as the ranks say after their warm-up.
        self.features: dict[str, str] = {}
        # What the ranks say of their weights and make of a fixed seed.
        self.weights_checksum, self.probe = "weights", "probe"
        # How the next sleeps and wakes end on the last rank: an error that it acknowledges, or None. The others succeed.
        self.sleep_errors: list[ErrorReport | None] = []
        self.wake_errors: list[ErrorReport | None] = []
        # Methods that no rank answers, and those whose next call kills the group, with the reason that is told then.
        self.hanging: set[str] = set()
        self.killers: dict[str, str] = {}
        # Whether each start of a generation, in order, was one into sleep.
        self.starts_asleep: list[bool] = []
        self.stopped = False
        # How the next restarts end, in order: an error to raise, or None; past them every restart works.
        self.restart_errors: list[Exception | None] = []
        self.generation = 1
        self.dropped_frames = (0, 0)
        self._config_error = config_error
        self._step_s = step_s
        self._state = [RankState.STARTING] * ranks
        self._begin()

    def _begin(self) -> None:
        """Nothing of an earlier generation is left."""
        self._failure: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        self._ticks: asyncio.Queue[tuple[Tick, list[bytes | memoryview]]] = asyncio.Queue()
        self._frames: dict[str, list[bytes | memoryview]] = {}
        self._active: dict[str, tuple[RequestSpec, int]] = {}
        self._adapters: dict[int, str] = {}
        self._ranks = [FakeRank() for _ in self._state]
        self._prompt_cache: set[str] = set()
        self._prompt_hits = self._prompt_misses = 0

    @property
    def warm_ups(self) -> int:
        """Calls of the warm-up, over all generations."""
        return self.counts["warm_up"]

    @property
    def active(self) -> list[str]:
        """Ids of the requests that the ranks know."""
        return list(self._active)

    @property
    def registered(self) -> dict[int, str]:
        """The folders of the adapters that the ranks hold, by their ids."""
        return dict(self._adapters)

    def register(self, lora_int_id: int, path: str) -> None:
        """The ranks hold an adapter that nobody asked them to."""
        self._adapters[lora_int_id] = path

    def evict(self, lora_int_id: int) -> None:
        """An adapter is gone from the ranks' memory, as after a load that came late."""
        del self._adapters[lora_int_id]

    @property
    def loss(self) -> Loss | None:
        """What `die` said."""
        return self._failure.result() if self._failure.done() else None

    def die(self, reason: str, fault: Fault = Fault.DIED) -> None:
        """Lose the group, as when a rank's process ends."""
        self._state = [RankState.DEAD] * len(self._state)
        if not self._failure.done():
            self._failure.set_result(Loss(reason, fault))

    async def start(self, *, asleep: bool = False) -> ModelInfo:
        """Load; waits for `loading`."""
        if self._config_error is not None:
            raise ConfigError(self._config_error)
        self.starts_asleep.append(asleep)
        await self._wait(self.loading)
        for rank in self._ranks if asleep else []:
            rank.sleep(SleepLevel.DISCARD)
        self._show_states()
        return self.model

    def lose(self, reason: str, fault: Fault) -> None:
        """As if it had died."""
        self.die(reason, fault)

    async def restart(self, *, asleep: bool = False) -> ModelInfo:
        """The next generation, unless `restart_errors` says otherwise; waits for `loading`."""
        self._begin()
        self.generation += 1
        self._state = [RankState.STARTING] * len(self._state)
        error = self.restart_errors.pop(0) if self.restart_errors else None
        if error is not None:
            self.die(str(error))
            raise error
        return await self.start(asleep=asleep)

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Queue one tick."""
        self._check()
        self._ticks.put_nowait((tick, list(frames)))

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """Run the next queued tick; waits for `stepping`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait(self.stepping)
                tick, frames = await self._ticks.get()
                await asyncio.sleep(self._step_s)
                self._check()
        except TimeoutError:
            self.die(f"{phase} was not finished within {timeout_s:g} s", Fault.STALLED)
            self._check()
        for request_id in tick.leave:
            self._active.pop(request_id, None)
        for spec, count in zip(tick.join, tick.frames or [0] * len(tick.join), strict=True):
            self.joined.append((spec.request_id, spec.whole))
            self._active[spec.request_id] = (spec, spec.steps or DEFAULT_STEPS)
            self._frames[spec.request_id] = [frames.pop(0) for _ in range(count)]
        active = {use.lora_int_id for spec, _ in self._active.values() for use in spec.loras}
        self.most_active = max(self.most_active, len(active))
        return self._advance(tick)

    def _advance(self, tick: Tick) -> TickReport:
        advancing = {name: at for name, at in self._active.items() if tick.advance is None or name in tick.advance}
        rows = len(advancing)
        done = TickDone(tick.number, [], [], rows, 1 if rows else 0, 0.001, 0.001, prompt_cache=self._prompts(tick))
        frames: list[bytes | memoryview] = []
        assert not rows or not any(rank.asleep for rank in self._ranks), "a step on memory that was given back"
        for request_id, (spec, left) in advancing.items():
            self._active[request_id] = (spec, left - 1)
            if self.out_of_memory_pixels is not None and (spec.height or 0) * (spec.width or 0) >= self.out_of_memory_pixels:
                del self._active[request_id]
                done.failed.append(Failed(request_id, ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "rank 0: out of memory")))
                continue
            if any(use.lora_int_id not in self._adapters for use in spec.loras):
                del self._active[request_id]
                done.failed.append(Failed(request_id, ErrorReport(ErrorCode.ADAPTER_NOT_LOADED, "rank 0: the adapter is not loaded")))
                continue
            if self.changing == (spec.steps or DEFAULT_STEPS) - left + 1 and not spec.whole:
                del self._active[request_id]
                done.replays.append(Replay(request_id, CHANGE))
                continue
            self._progress(spec, left, done, frames)
            if left == 1:
                del self._active[request_id]
                done.finished.append(Finished(request_id, len(frames), fake_shape(spec), FAKE_STAGES))
                adapter = " + ".join(self._adapters[use.lora_int_id] for use in spec.loras) or None
                frames.append(fake_pixels(spec, adapter, self._frames[request_id]))
        return TickReport(done, frames)

    def _progress(self, spec: RequestSpec, left: int, done: TickDone, frames: list[bytes | memoryview]) -> None:
        """A request's step, and its preview where one is due."""
        steps = spec.steps or DEFAULT_STEPS
        step = steps - left + 1
        done.progress.append(Progress(spec.request_id, step, steps))
        if step in (due := fake_preview_steps(spec)):
            number = due.index(step)
            done.previews.append(Preview(spec.request_id, number, len(frames), fake_shape(spec)))
            frames.append(fake_preview(spec, number))

    def _prompts(self, tick: Tick) -> PromptCacheStats:
        """A cache that keeps every prompt, as counted since the start of this generation."""
        for spec in tick.join:
            self._prompt_hits += spec.prompt in self._prompt_cache
            self._prompt_misses += spec.prompt not in self._prompt_cache
            self._prompt_cache.add(spec.prompt)
        return PromptCacheStats(len(self._prompt_cache), 32, self._prompt_hits, self._prompt_misses)

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: object
    ) -> list[RpcReply]:
        """Run a method of the worker on every rank; waits for `calling`, but for one that only waits itself."""
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
            self.die(self.killers.pop(method))
            self._check()
        raw = pack(**kwargs)
        if method in self.method_errors:
            return self._replies(error=self.method_errors[method])
        match method:
            case "warm_up":
                return self._replies(dict(self.features))
            case "add_lora":
                request = msgspec.msgpack.decode(raw["request"], type=LoRARequest)
                return self._add_lora(request, msgspec.msgpack.decode(raw["options"], type=LoadOptions))
            case "remove_lora":
                return self._replies(self._adapters.pop(msgspec.msgpack.decode(raw["lora_int_id"], type=int), None) is not None)
            case "list_loras":
                return self._replies(sorted(self._adapters))
            case "handle_sleep_task":
                return self._sleep(msgspec.msgpack.decode(raw["task"], type=SleepTask))
            case "handle_wake_task":
                return self._wake(msgspec.msgpack.decode(raw["task"], type=WakeTask))
            case "fingerprint":
                return self._each([self._fingerprint(rank) for rank in self._ranks])
            case "synchronize":
                return self._replies(None)
            case "profile":
                return self._replies(msgspec.msgpack.decode(raw["is_start"]) or f"/traces/{self.generation}.json")
        raise AssertionError(f"the worker has no method {method}")

    def _sleep(self, task: SleepTask) -> list[RpcReply]:
        if task.level is SleepLevel.DISCARD:
            self._adapters.clear()
        return self._acked(task.task_id, self.sleep_errors, lambda rank: rank.sleep(task.level))

    def _wake(self, task: WakeTask) -> list[RpcReply]:
        return self._acked(task.task_id, self.wake_errors, lambda rank: rank.wake(task.tags))

    def _acked(self, task_id: str, errors: list[ErrorReport | None], act: Callable[[FakeRank], int]) -> list[RpcReply]:
        """What the ranks acknowledge; the last one fails where the next of the errors is one."""
        error = errors.pop(0) if errors else None
        acks = []
        for number, rank in enumerate(self._ranks):
            if error is not None and number == len(self._ranks) - 1:
                acks.append(TaskAck(task_id, TaskStatus.ERROR, number, 0, rank.resident, error.code, error.message))
            else:
                acks.append(TaskAck(task_id, TaskStatus.SUCCESS, number, act(rank), rank.resident))
        self._show_states()
        return self._each(acks)

    def _show_states(self) -> None:
        self._state = [RankState.ASLEEP if rank.asleep else RankState.READY for rank in self._ranks]

    def _fingerprint(self, rank: FakeRank) -> Fingerprint:
        assert not rank.asleep, "there is nothing to fingerprint on a rank that sleeps"
        kept = {lora_int_id: rank.spoilt.get(lora_int_id, "kept") for lora_int_id in self._adapters}
        adapters = {lora_int_id: f"{fake_digest(path)} {kept[lora_int_id]}" for lora_int_id, path in self._adapters.items()}
        return Fingerprint(rank.checksum or self.weights_checksum, adapters, rank.probe or self.probe)

    def corrupt(self, rank: int, *, checksum: str | None = None, probe: str | None = None) -> None:
        """From now until its process ends a rank holds other weights, or makes something else of them."""
        self._ranks[rank].checksum, self._ranks[rank].probe = checksum, probe

    def spoil_adapter(self, rank: int, lora_int_id: int, *, for_good: bool = False) -> None:
        """What a rank keeps of an adapter is something else, until it is loaded again, or `for_good` until the rank's process ends."""
        self._ranks[rank].spoilt[lora_int_id] = "other"
        self._ranks[rank].spoils_for_good |= for_good

    def leak(self, rank: int, size_bytes: int) -> None:
        """From now until its process ends a rank keeps so much of its weights when it sleeps."""
        self._ranks[rank].leaked = size_bytes

    def _add_lora(self, request: LoRARequest, options: LoadOptions) -> list[RpcReply]:
        found = fake_digest(request.lora_path)
        if request.lora_path in self.adapter_errors:
            return self._replies(error=self.adapter_errors[request.lora_path])
        if options.digest not in (None, found):
            message = f"adapter {request.lora_name!r}: expected {options.digest}, found {found}"
            return self._replies(error=ErrorReport(ErrorCode.DIGEST_MISMATCH, message))
        kept = self._adapters | {request.lora_int_id: request.lora_path}
        evicted = []
        for lora_int_id in options.evict or []:
            if len(set(kept.values())) > self.max_cached:
                evicted.append(lora_int_id)
                kept.pop(lora_int_id, None)
        if len(set(kept.values())) > self.max_cached + 1:
            return self._replies(error=ErrorReport(ErrorCode.CAPACITY_EXCEEDED, f"{len(kept)} adapters"))
        self._adapters = kept
        for rank in self._ranks:
            rank.load_adapter(request.lora_int_id)
        if request.lora_path in self.adapter_errors_of_one:
            failed = RpcReply(1, len(self._state) - 1, None, self.adapter_errors_of_one[request.lora_path])
            return [*self._replies(LoadedLoRA(found, 8, 24, 4096, checksum="kept"))[:-1], failed]
        recipe = self.adapter_recipes.get(request.lora_path)
        return self._replies(LoadedLoRA(found, 8, 24, 4096, recipe=recipe, evicted=evicted, checksum="kept"))

    def _replies(self, result: object = None, *, error: ErrorReport | None = None) -> list[RpcReply]:
        if error is not None:
            return [RpcReply(1, rank, None, error) for rank in range(len(self._ranks))]
        return self._each([result] * len(self._ranks))

    def _each(self, results: Sequence[object]) -> list[RpcReply]:
        """A result of each rank."""
        return [
            RpcReply(1, number, msgspec.msgpack.encode(result), None, self._ranks[number].memory()) for number, result in enumerate(results)
        ]

    async def failed(self) -> Loss:
        """Returns when `die` was called."""
        return await asyncio.shield(self._failure)

    def documents(self) -> list[RankDocument]:
        """The ranks, all with the pid of this process."""
        return [RankDocument(n, os.getpid(), state, 0.0, self._ranks[n].memory()) for n, state in enumerate(self._state)]

    def load_progress(self) -> tuple[int, int]:
        """All or nothing."""
        return (0 if self._state[0] is RankState.STARTING else WEIGHTS_BYTES), WEIGHTS_BYTES

    async def stop(self) -> None:
        """End the group."""
        self.stopped = True
        self._state = [RankState.DEAD] * len(self._state)

    def _check(self) -> None:
        if self._failure.done():
            raise GroupFailed(self._failure.result().reason)

    async def _wait(self, event: asyncio.Event) -> None:
        """Wait for the event, or raise when the group is lost before."""
        waiting = asyncio.ensure_future(event.wait())
        awaited: set[asyncio.Future[Any]] = {waiting, self._failure}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        self._check()
