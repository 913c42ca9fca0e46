# SPDX-License-Identifier: Apache-2.0
"""P9: how long a rank waits for its next message, and how many messages a tick takes.

The real step loop and the real wire with two rank processes whose ticks take 20 ms of a device's time: they sleep. Beside
that the round trip of one message to both ranks and back, by this wire and by PUB/SUB with pickle on the same sockets.
"""

import asyncio
import multiprocessing
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import zmq

from benchmarks.result import Measured
from benchmarks.stand_ins.rank_group import StandInRanks
from diffusion_worker.engine.scheduling.step_loop import StepLoop
from diffusion_worker.engine.state.rank_protocol import RankGroup, TickReport
from diffusion_worker.messages import Finished, RequestSpec, Shutdown, Tick, TickDone
from diffusion_worker.ranks.broadcast import Endpoints, RankEnd, ServerEnd

RANKS = 2
TICK_S = 0.020
REQUESTS = 4
BLOCK = 20
# The first ticks meet cold code at both ends.
WARM_UP = 20
# For a whole part of the measurement; the longest takes some six seconds.
DEADLINE_S = 600.0

T = TypeVar("T")
# Takes the number of a rank, where the wire is, and where the result goes.
RankProgram = Callable[[int, Endpoints, Connection], None]


class BenchmarkRanks(StandInRanks):
    """The server's end of a rank group on the real wire, whose processes are started elsewhere. It counts the ticks that it sends."""

    def __init__(self, wire: ServerEnd) -> None:
        super().__init__()
        self.sent = 0
        self._wire = wire

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Send a tick and its frames over the wire, once for the whole group, and count it in `sent`."""
        self.sent += 1
        self._wire.send(tick, frames)

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """Wait for rank 0's answer to the oldest tick without one, and return it.

        Raises:
            TimeoutError: it did not come within `timeout_s`, or within the benchmark's deadline.
        """
        async with asyncio.timeout(min(timeout_s, DEADLINE_S)):
            message, frames = await self._wire.receive()
        assert isinstance(message, TickDone)
        return TickReport(message, frames)


def measure(*, tiny: bool = False) -> Measured:
    """Run the step loop over the real wire, then round trips by this wire and by pickle; `tiny` makes fewer of each.

    A stall is the wait for the next message, relative to the 20 ms of a tick. The figure is a median over blocks of 20 ticks, for the
    slower rank. `messages_per_tick` divides the ticks that were sent by those that a rank received.

    Raises:
        RuntimeError: the step loop broke, or a part was not done in time.
    """
    waits, messages = _run("the ticks", _stalls(steps=3 * WARM_UP if tiny else 250))
    round_trips = 2 * WARM_UP if tiny else 500
    trips = _run("round trips", _round_trips(round_trips))
    pickled = _run("round trips with pickle", _pickled_round_trips(round_trips))
    # The median of the blocks is the wire's; the mean of all has other programs of the machine in it.
    stall = max(statistics.median(_block_means(of_rank)) for of_rank in waits) / TICK_S
    mean = max(statistics.fmean(of_rank) for of_rank in waits) / TICK_S
    p50_us, pickled_us = (statistics.median(samples) * 1e6 for samples in (trips, pickled))
    samples = [{"rank": float(rank), "wait_ms": wait * 1000} for rank, of_rank in enumerate(waits) for wait in of_rank]
    return Measured(
        figures={
            "stall_fraction": round(stall, 5),
            "stall_fraction_mean": round(mean, 5),
            "messages_per_tick": round(messages, 4),
            "wait_p99_us": round(max(sorted(of_rank)[int(len(of_rank) * 0.99)] for of_rank in waits) * 1e6, 1),
            "round_trip_p50_us": round(p50_us, 1),
            "round_trip_pickle_p50_us": round(pickled_us, 1),
        },
        targets={"stall_fraction": "<= 0.01", "messages_per_tick": "<= 1"},
        samples=samples,
    )


def _block_means(waits: list[float]) -> list[float]:
    return [statistics.fmean(waits[start : start + BLOCK]) for start in range(0, len(waits) - BLOCK + 1, BLOCK)]


def _run(what: str, work: Coroutine[Any, Any, T]) -> T:
    async def within() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await work

    try:
        return asyncio.run(within())
    except (TimeoutError, zmq.Again) as error:
        raise RuntimeError(f"{what}: not done within {DEADLINE_S:g} s") from error


class _RankProcesses:
    """Rank processes of a benchmark, started when the block begins. When it ends, they are awaited, and killed after the deadline.

    They are killed at once if the block ends by an error.
    """

    def __init__(self, program: RankProgram, endpoints: Endpoints) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        self._results: list[Connection] = [receiving for receiving, _ in pipes]
        self._processes = [
            context.Process(target=program, args=(rank, endpoints, sending), daemon=True) for rank, (_, sending) in enumerate(pipes)
        ]

    def results(self) -> list[Any]:
        """Wait for the one result that each rank sends at its end, and return them in the order of ranks.

        Raises:
            RuntimeError: a result has not come within the deadline.
        """
        ends = time.monotonic() + DEADLINE_S
        for rank, result in enumerate(self._results):
            if not result.poll(max(0.0, ends - time.monotonic())):
                raise RuntimeError(f"rank {rank} gave no result within {DEADLINE_S:g} s")
        return [result.recv() for result in self._results]

    def __enter__(self) -> "_RankProcesses":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for process in self._processes:
            process.join(DEADLINE_S if error is None else 0)
            process.kill()


async def _stalls(*, steps: int) -> tuple[list[list[float]], float]:
    """Return the seconds that each rank waited before each tick, and the number of messages sent for each tick received.

    The first and last ticks are left out of the waits.
    """
    wire = ServerEnd()
    try:
        with _RankProcesses(_ticking_rank, wire.endpoints) as ranks:
            await wire.wait_for_ranks(RANKS)
            group = BenchmarkRanks(wire)
            await _make_images(group, steps=steps)
            wire.send(Shutdown())
            waits = await asyncio.to_thread(ranks.results)
            return [of_rank[WARM_UP:-WARM_UP] for of_rank in waits], group.sent / len(waits[0])
    finally:
        wire.close()


async def _make_images(group: RankGroup, *, steps: int) -> None:
    """Make `REQUESTS` images of so many steps through the step loop, and return when all are made.

    Raises:
        RuntimeError: the loop broke.
    """
    broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    loop = StepLoop(group, max_batch_size=REQUESTS, tick_timeout_s=DEADLINE_S, broken=broken.set_result)
    specs = [RequestSpec(request_id=str(name), prompt="a red digit seven", seed=name, steps=steps) for name in range(REQUESTS)]
    made = asyncio.gather(*(loop.submit(spec) for spec in specs))
    stepping = asyncio.create_task(loop.run())
    try:
        await asyncio.wait((made, broken), return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            raise RuntimeError(f"the step loop broke: {broken.result()}")
        await made
    finally:
        for spec in specs:
            loop.forget(spec.request_id)
        stepping.cancel()
        await asyncio.gather(stepping, made, return_exceptions=True)


def _end_with_parent() -> None:
    """Exit this rank's process with status 1 if the benchmark that started it is dead; else do nothing."""
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        sys.exit(1)


def _ticking_rank(rank: int, endpoints: Endpoints, result: Connection) -> None:
    """Be a rank until a message comes that is no tick; then send the waits before each tick into `result`, in seconds.

    Each tick takes 20 ms of sleep. A request ends after its steps. Rank 0 answers each tick and hands out three bytes for an image.
    """
    waits: list[float] = []
    left: dict[str, int] = {}
    with RankEnd(endpoints) as wire:
        while True:
            # A message that is there already is not waited for, however long other programs keep this one from its core.
            there = wire._broadcast.poll(0)
            started = time.perf_counter()
            message, _ = wire.receive(lambda count: None, _end_with_parent)
            if not isinstance(message, Tick):
                break
            waits.append(0.0 if there else time.perf_counter() - started)
            time.sleep(TICK_S)
            left |= {spec.request_id: spec.steps or 1 for spec in message.join}
            advanced = set(left) if message.advance is None else set(message.advance) & set(left)
            left = {name: steps - (name in advanced) for name, steps in left.items()}
            done = [name for name, steps in left.items() if steps == 0]
            left = {name: steps for name, steps in left.items() if steps}
            if rank == 0:
                finished = [Finished(name, index, (1, 1, 3)) for index, name in enumerate(done)]
                wire.send(TickDone(message.number, finished, rows=len(advanced), calls=1, seconds=TICK_S), [memoryview(b"rgb")] * len(done))
    result.send(waits)


async def _round_trips(count: int) -> list[float]:
    """Return the seconds of each round trip by our wire: from the sending of a tick until all ranks have answered.

    The first `WARM_UP` of them are left out.
    """
    wire = ServerEnd()
    try:
        with _RankProcesses(_echoing_rank, wire.endpoints):
            await wire.wait_for_ranks(RANKS)
            samples = []
            for number in range(count):
                started = time.perf_counter()
                wire.send(_tick(number))
                for _ in range(RANKS):
                    await wire.receive()
                samples.append(time.perf_counter() - started)
            wire.send(Shutdown())
            return samples[WARM_UP:]
    finally:
        wire.close()


def _tick(number: int) -> Tick:
    """Make a tick that adds one request and advances eight others; encoded, it has about 500 bytes."""
    spec = RequestSpec(request_id="f" * 32, prompt="a red digit seven " * 6, seed=number, height=1024, width=1024, steps=28)
    return Tick(number, [spec], [], [f"{name}" * 32 for name in range(8)])


def _echoing_rank(rank: int, endpoints: Endpoints, result: Connection) -> None:
    with RankEnd(endpoints) as wire:
        while isinstance(message := wire.receive(lambda count: None, _end_with_parent)[0], Tick):
            wire.send(TickDone(message.number))
    result.send(rank)


async def _pickled_round_trips(count: int) -> list[float]:
    """Return the seconds of the same round trips with ZeroMQ's PUB/SUB and pickle in place of our wire.

    The first `WARM_UP` of them are left out.
    """
    context = _bounded_context()
    with tempfile.TemporaryDirectory() as folder:
        endpoints = Endpoints(f"ipc://{folder}/broadcast", f"ipc://{folder}/answers")
        broadcast, answers = context.socket(zmq.XPUB), context.socket(zmq.PULL)
        # Without this option the second rank's equal subscription is not reported.
        broadcast.setsockopt(zmq.XPUB_VERBOSE, 1)
        broadcast.bind(endpoints.broadcast)
        answers.bind(endpoints.answers)
        with _RankProcesses(_pickling_rank, endpoints):
            for _ in range(RANKS):
                broadcast.recv()
            samples = []
            for number in range(count):
                started = time.perf_counter()
                broadcast.send(pickle.dumps(_tick(number)))
                for _ in range(RANKS):
                    pickle.loads(answers.recv())
                samples.append(time.perf_counter() - started)
            broadcast.send(pickle.dumps(None))
        context.destroy(linger=0)
    return samples[WARM_UP:]


def _bounded_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Make a ZeroMQ context whose sockets raise `zmq.Again` when a send or receive waits past the deadline."""
    context = zmq.Context()
    context.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    context.setsockopt(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
    return context


def _pickling_rank(rank: int, endpoints: Endpoints, result: Connection) -> None:
    context = _bounded_context()
    answers, broadcast = context.socket(zmq.PUSH), context.socket(zmq.SUB)
    answers.connect(endpoints.answers)
    broadcast.subscribe(b"")
    broadcast.connect(endpoints.broadcast)
    while (message := pickle.loads(broadcast.recv())) is not None:
        answers.send(pickle.dumps(TickDone(message.number)))
    context.destroy(linger=1000)
    result.send(rank)
