# SPDX-License-Identifier: Apache-2.0
"""Real rank processes in gloo groups, each running a scenario of `Parallel`; what they saw comes back.

A start costs ten seconds of importing torch: a fork server does that once for all, and a scenario may make one group after
another.
"""

import contextlib
import functools
import importlib
import itertools
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.parallel.rows import CallFailed, Parallel

DEADLINE_S = 240.0


class Rank:
    """One process of a scenario."""

    def __init__(self, rank: int, world: int, store: TCPStore) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def group(self, **sizes: int) -> Iterator[Parallel]:
        """A group of all processes; `sizes` are those of its parallel kinds. All processes make the same ones in the same order."""
        store = PrefixStore(f"group-{next(self._numbers)}", self._store)
        parallel = Parallel(rank=self.rank, world=self.world, device=torch.device("cpu"), store=store, timeout_s=60, **sizes)
        try:
            yield parallel
        finally:
            parallel.close()


def run(scenario: str, *, world: int = 2, exit_codes: tuple[int, ...] | None = None) -> list[Any]:
    """Run a scenario, `module:function` of a `Rank`, in `world` processes; what each returned, in rank order.

    `exit_codes` are those expected of the processes, 0 unless given; a process that ends with another returns nothing.
    """
    context = _fork_server()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results: Any = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, world, port, scenario, results), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    for process, code in zip(ranks, exit_codes or (0,) * world, strict=True):
        process.join(DEADLINE_S)
        assert process.exitcode == code, f"{process.name} ended with {process.exitcode}"
    return [found for _, found in sorted((results.get() for process in ranks if process.exitcode == 0), key=lambda item: item[0])]


def _fork_server() -> Any:
    """Imports what scenarios need before the first process is forked; no tensor is touched there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusers", "support.runner.parallel_scenarios"])
    # Before 3.13 the fork server does not take over its parent's path, and leaves out in silence what it does not find.
    path, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


def _rank(rank: int, world: int, port: int, scenario: str, results: Any) -> None:
    torch.set_num_threads(1)
    module, _, function = scenario.partition(":")
    store = TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
    results.put((rank, getattr(importlib.import_module(module), function)(Rank(rank, world, store))))


def in_a_group(scenario: Callable[[Parallel], Any]) -> Callable[[Rank], Any]:
    """A scenario of one group with rows only."""

    @functools.wraps(scenario)
    def run_in_group(rank: Rank) -> Any:
        with rank.group() as parallel:
            return scenario(parallel)

    return run_in_group


def _call(rows: int) -> ModelCall:
    return ModelCall("transformer", "forward", {"hidden_states": torch.arange(rows * 3.0).reshape(rows, 3), "scale": 2.0})


@in_a_group
def spread(parallel: Parallel) -> list[dict[str, Any]]:
    """Calls of one to five rows: which rows ran here, and the gathered result."""
    seen = []
    for rows in range(1, 6):
        ran: list[int] = []

        def execute(call: ModelCall, part: slice, ran: list[int] = ran) -> Any:
            ran.extend(range(part.start, part.stop))
            states = call.arguments["hidden_states"]
            return states * call.arguments["scale"], [states.sum(dim=1).to(torch.int32)]

        doubled, (sums,) = parallel.run(_call(rows), execute)
        seen.append({"ran": ran, "doubled": doubled.tolist(), "sums": sums.tolist()})
    return seen


@in_a_group
def one_fails(parallel: Parallel) -> dict[str, Any]:
    """Rank 1 raises in a shared call; the call after it must work."""

    def execute(call: ModelCall, part: slice) -> torch.Tensor:
        if parallel.rank == 1:
            raise RuntimeError("out of memory")
        return call.arguments["hidden_states"] + 0

    try:
        parallel.run(_call(4), execute)
    except CallFailed as error:
        message = str(error)
    after = parallel.run(_call(2), lambda call, part: call.arguments["hidden_states"] + 1)
    return {"message": message, "after": after.tolist()}
