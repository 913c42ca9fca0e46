# SPDX-License-Identifier: Apache-2.0
"""The processes of one generation of a rank group, from their start to their end. They live and die together.

Nothing can free a rank that is stuck in a collective with a dead one. So a generation with a lost or stopped rank, or a missed deadline, is
killed as a whole. Everything here ends with its generation: processes, sockets, descriptors.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.state.rank_protocol import Loss, TickReport
from diffusion_worker.engine.state.state_document import RankState
from diffusion_worker.errors import ConfigError, ErrorCode, Fault, GroupFailed, LoadTimeout, RequestError
from diffusion_worker.main_thread import stage_of
from diffusion_worker.messages import (
    Dropped,
    Fatal,
    Finished,
    LoadProgress,
    MemoryReport,
    ModelInfo,
    Preview,
    Ready,
    Rpc,
    RpcReply,
    Shutdown,
    TickDone,
    ToRank,
    ToServer,
    pack,
)
from diffusion_worker.ranks.broadcast import ServerEnd
from diffusion_worker.ranks.calls_in_flight import CallInFlight, CallsInFlight
from diffusion_worker.ranks.launch import NewProcess, kill_fork_server, start_processes
from diffusion_worker.ranks.rank_process import RankProcess

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP_GRACE_S = 4.0
# A killed process is gone in milliseconds; one that the kernel holds in an uninterruptible wait never is.
KILL_GRACE_S = 5.0
# A dying rank's last message may come this long after the news of its death, which takes another way.
LAST_WORDS_S = 0.2
# A rank counts as stopped after two looks in a row, which takes less than two seconds. After one it may be about to continue.
STOP_WATCH_S = 0.5
# A rank that can write its stacks does so within milliseconds; on a busy machine it may take longer.
STACK_S = 2.0
STACK_LOOK_S = 0.02


class RankGeneration:
    """The rank processes that are started together, their wire and their unanswered calls. It is bound to the running event loop.

    `start` and `end` are called once.
    """

    def __init__(self, config: WorkerConfig, number: int, *, asleep: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.ranks: list[RankProcess] = []
        self.loss: asyncio.Future[Loss] = self._loop.create_future()
        self.wire = ServerEnd()
        self._config = config
        self._asleep = asleep
        self._reports: asyncio.Queue[TickReport] = asyncio.Queue()
        self._calls = CallsInFlight()
        self._ready = asyncio.Event()
        self._ending = False
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def dropped_frames(self) -> tuple[int, int]:
        """Frames that were no message, here and at the ranks."""
        return self.wire.dropped, sum(rank.dropped_frames for rank in self.ranks)

    async def start(self, standbys: Sequence[NewProcess] = ()) -> ModelInfo:
        """Start the processes and return the model's description once all have loaded; raise ConfigError, LoadTimeout or GroupFailed.

        Standbys become the first ranks.
        """
        self._tasks += [asyncio.create_task(self._read_answers()), asyncio.create_task(self._watch_for_stopped())]
        limit_s = self._config.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                start = asyncio.to_thread(start_processes, self._config, self.number, self.wire, self._add, self._asleep, standbys)
                self._starting = asyncio.create_task(start)
                await self._starting
                await self._or_loss(self.wire.wait_for_ranks(len(self.ranks)))
                await self._or_loss(self._ready.wait())
        except TimeoutError:
            reason = f"the ranks did not load the model within {limit_s:g} s"
            self.lose(reason, Fault.STALLED)
            raise LoadTimeout(reason) from None
        except EOFError:
            raise GroupFailed("the fork server ended while it started a rank") from None
        except GroupFailed:
            words = next((rank.last_report for rank in self.ranks if rank.last_report and rank.last_report.config), None)
            if words is not None:
                raise ConfigError(words.message) from None
            raise
        self.wire.hide()
        model = self.ranks[0].model
        assert model is not None
        return model

    def send(self, message: ToRank, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Put a message and its frames on the broadcast to all ranks. A lost generation raises GroupFailed with the reason of its loss."""
        if self.loss.done():
            raise GroupFailed(self.loss.result().reason)
        self.wire.send(message, frames)

    async def next_report(self, timeout_s: float, phase: str) -> TickReport:
        """Wait for the next tick's outcome. After `timeout_s` without it the group is lost, for a reason that names the `phase`.

        If the group is lost before the outcome comes, GroupFailed is raised. The deadline does not run while a call keeps the ranks busy,
        and starts again when the call is answered.
        """
        if not self._reports.empty():
            return self._reports.get_nowait()
        started = time.monotonic()
        waiting = asyncio.create_task(self._reports.get())
        waited: set[asyncio.Future[Any]] = {waiting, self.loss}
        left_s = timeout_s
        try:
            while left_s > 0:
                await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    return waiting.result()
                if self.loss.done():
                    raise GroupFailed(self.loss.result().reason)
                since = time.monotonic() if self._calls else max(started, self._calls.last_answer_at)
                left_s = since + timeout_s - time.monotonic()
        finally:
            waiting.cancel()
        self.lose(f"{phase} was not finished within {timeout_s:.3g} s: {await self._who_hangs()}", Fault.STALLED)
        raise GroupFailed(self.loss.result().reason)

    async def _who_hangs(self) -> str:
        """Return a text with the rank whose main thread holds the others up, and the place where that thread stands.

        Log the stacks of that rank's threads, for which it has two seconds.
        """
        ranks = self._alive()
        if not ranks:
            return "no rank is left"
        passed = {rank.number: rank.main_thread.passed for rank in ranks}
        last = min(ranks, key=lambda rank: (passed[rank.number].points, passed[rank.number].at_s))
        last.ask_for_stack()
        stack = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STACK_S):
                while (stage := stage_of(stack)) is None or stack != last.main_thread.stack():
                    stack = last.main_thread.stack()
                    await asyncio.sleep(STACK_LOOK_S)
        stage = stage_of(stack)
        log.error("the stacks of the threads of rank %d, which made no progress:\n%s", last.number, stack or "(it wrote nothing)")
        quiet_s = time.monotonic() - passed[last.number].at_s
        behind = len({passed[rank.number].points for rank in ranks}) > 1
        who = f"rank {last.number} (pid {last.pid}), for which the others wait," if behind else f"rank {last.number} (pid {last.pid})"
        return f"the main thread of {who} made no progress for {quiet_s:.3g} s, and is in {stage or 'a place that it cannot tell'}"

    async def call(
        self, method: str, kwargs: dict[str, object], *, timeout_s: float, output_rank: int | None, exec_all_ranks: bool
    ) -> list[RpcReply]:
        """Run a method on every rank, or on `output_rank` alone, and return the replies by rank; errors of the method are in these.

        With `exec_all_ranks` all ranks run it. A rank that stays silent for `rank_timeout_s` after a timeout loses the generation.

        Raises:
            RequestError: Timeout, a rank has not replied after `timeout_s`. GroupFailed: the generation is lost.
        """
        probe = Rpc(0, method, {}, output_rank, exec_all_ranks)
        call_id, call = self._calls.add(method, {rank.number for rank in self.ranks if probe.runs_on(rank.number)})
        self.send(Rpc(call_id, method, pack(**kwargs), output_rank, exec_all_ranks))
        try:
            async with asyncio.timeout(timeout_s):
                await self._or_loss(call.answered.wait())
        except TimeoutError:
            silent_ranks = ", ".join(map(str, call.silent))
            message = f"{method}: no answer of rank {silent_ranks} within {timeout_s:g} s"
            raise RequestError(ErrorCode.TIMEOUT, message, details={"method": method, "ranks": call.silent}) from None
        finally:
            self._calls.give_up(call_id, self._config.rank_timeout_s, self._on_overdue)
        return [call.replies[rank] for rank in sorted(call.replies)]

    def lose(self, reason: str, fault: Fault) -> None:
        """Mark the generation as lost and kill its processes. Only the first reason counts."""
        if not self.loss.done():
            log.error("rank group lost generation=%d fault=%s: %s", self.number, fault, reason)
            self.loss.set_result(Loss(reason, fault))
        self._kill_all()

    async def end(self) -> None:
        """End every process and wait for that: by `Shutdown` if the generation still lives, and after some seconds by SIGKILL.

        Then free all that belongs to the generation, and mark it as lost if it was not.
        """
        self._ending = True
        await self._end_start()
        if not self.loss.done():
            self.wire.send(Shutdown())
            await self._wait_for_exits(STOP_GRACE_S)
            for rank in self._alive():
                log.warning("rank %d (pid %d) did not end within %g s and is killed", rank.number, rank.pid, STOP_GRACE_S)
        self._kill_all()
        await self._wait_for_exits(KILL_GRACE_S)
        for rank in self._alive():
            log.error("rank %d (pid %d) is still there %g s after SIGKILL", rank.number, rank.pid, KILL_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._calls.clear()
        self.wire.close()
        await asyncio.gather(*(self._close(rank) for rank in self.ranks))
        if not self.loss.done():
            self.loss.set_result(Loss("the ranks were ended", Fault.DIED))

    async def _end_start(self) -> None:
        """End the thread that starts processes: it may wait for the fork server's imports, and this process would wait for the thread."""
        ends = self._loop.time() + KILL_GRACE_S
        while self._starting is not None and not self._starting.done() and self._loop.time() < ends:
            # The thread may be about to start the fork server.
            kill_fork_server()
            await asyncio.wait({self._starting}, timeout=STACK_LOOK_S)

    # --- processes ------------------------------------------------------------------------------------------------------

    def _add(self, rank: RankProcess) -> bool:
        """Add a process that `start_processes` started, in that function's thread; return False when no more are wanted."""
        self.ranks.append(rank)
        self._loop.call_soon_threadsafe(self._watch, rank)
        return not self._ending

    def _watch(self, rank: RankProcess) -> None:
        if rank.pidfd is None:
            self._on_death(rank)
            return
        self._loop.add_reader(rank.pidfd, self._on_death, rank)
        if self._ending:
            rank.kill()

    async def _watch_for_stopped(self) -> None:
        """Lose the generation when a signal stops a rank. The sockets stay open then, so an idle group does not notice otherwise."""
        suspects: set[int] = set()
        while True:
            await asyncio.sleep(STOP_WATCH_S)
            stopped = {rank.number for rank in self._alive() if rank.stopped}
            if numbers := sorted(stopped & suspects):
                rank = self.ranks[numbers[0]]
                self.lose(f"rank {rank.number} (pid {rank.pid}) was stopped by a signal", Fault.STALLED)
            suspects = stopped

    def _on_death(self, rank: RankProcess) -> None:
        if rank.pidfd is not None:
            self._loop.remove_reader(rank.pidfd)
        rank.state = RankState.DEAD
        rank.gone.set()
        if not self._ending and not self.loss.done():
            self._loop.call_later(LAST_WORDS_S, self._explain_death, rank)

    def _explain_death(self, rank: RankProcess) -> None:
        if self._ending or self.loss.done():
            return
        words = rank.last_report
        said = f": {words.message}" if words else ""
        self.lose(f"rank {rank.number} (pid {rank.pid}) {rank.exit_text()}{said}", words.fault if words else Fault.DIED)

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.state is not RankState.DEAD]

    def _kill_all(self) -> None:
        for rank in self._alive():
            rank.kill()

    async def _wait_for_exits(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for rank in self.ranks:
                    await rank.gone.wait()

    async def _close(self, rank: RankProcess) -> None:
        if rank.pidfd is not None:
            self._loop.remove_reader(rank.pidfd)
        await rank.close()

    # --- answers --------------------------------------------------------------------------------------------------------

    async def _read_answers(self) -> None:
        try:
            while True:
                message, frames = await self.wire.receive()
                if not self._on_message(message, frames):
                    self.wire.dropped += 1
        except Exception as error:
            # Without answers every caller would wait for its deadline.
            log.exception("an answer of the ranks cannot be read, and the rank group is lost")
            self.lose(f"an answer of the ranks cannot be read: {error}", Fault.DEFECT)

    def _on_message(self, message: ToServer, frames: list[bytes | memoryview]) -> bool:
        """Act on a message; return False, without effect, for an unknown rank or for a `TickDone` whose frames do not fit it."""
        number = 0 if isinstance(message, TickDone) else message.rank
        if not 0 <= number < len(self.ranks):
            return False
        rank = self.ranks[number]
        if isinstance(message, TickDone):
            if not _frames_fit(message, frames):
                return False
            self._reports.put_nowait(TickReport(message, frames))
        elif isinstance(message, LoadProgress):
            rank.loaded = (message.bytes_done, message.bytes_total)
        elif isinstance(message, Ready):
            rank.model, rank.memory = message.model, message.memory
            rank.state = _state_of(message.memory)
            if all(other.model is not None for other in self.ranks):
                self._ready.set()
        elif isinstance(message, Fatal):
            rank.last_report = message
        elif isinstance(message, Dropped):
            rank.dropped_frames = message.count
        else:
            self._on_reply(rank, message)
        rank.heard_at = time.monotonic()
        return True

    def _on_reply(self, rank: RankProcess, reply: RpcReply) -> None:
        if reply.memory is not None and rank.state is not RankState.DEAD:
            rank.memory = reply.memory
            rank.state = _state_of(reply.memory)
        self._calls.take(reply)

    def _on_overdue(self, call: CallInFlight) -> None:
        """Lose the generation for a call that was given up and that a rank has still not answered."""
        silent_ranks, limit_s = ", ".join(map(str, call.silent)), self._config.rank_timeout_s
        silence = f"{call.method}: rank {silent_ranks} did not answer, also not in the {limit_s:g} s after its time limit"
        self.lose(silence, Fault.STALLED)

    async def _or_loss(self, wanted: Coroutine[Any, Any, T]) -> T:
        """Await `wanted` and return its result. If the generation is lost first, cancel it and raise GroupFailed with the reason."""
        task = asyncio.create_task(wanted)
        waited: set[asyncio.Future[Any]] = {task, self.loss}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise GroupFailed(self.loss.result().reason)
            return task.result()
        finally:
            task.cancel()


def _state_of(memory: MemoryReport) -> RankState:
    """Return the state of a rank by its memory: asleep if any of it is given back, otherwise ready."""
    return RankState.ASLEEP if memory.asleep else RankState.READY


def _frames_fit(done: TickDone, frames: list[bytes | memoryview]) -> bool:
    """Return whether every image and preview has its frame, in the right size."""
    brought: list[Finished | Preview] = [*done.finished, *done.previews]
    return all(0 <= made.frame < len(frames) and len(frames[made.frame]) == math.prod(made.shape) for made in brought)
