# SPDX-License-Identifier: Apache-2.0
"""Rank processes in gloo groups, each running a scenario of `Parallel`, whose results come back.

Real: the processes, their groups and their store. Not real: the server process and its ticks, in whose place a scenario is. A start imports
torch for ten seconds. A fork server does that once for all, and a scenario may make one group after another.
"""

import contextlib
import itertools
import multiprocessing
import os
import pkgutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from diffusion_worker.runner.parallel.rows import Parallel

DEADLINE_S = 240.0


@dataclass(frozen=True)
class Rank:
    """The place of a process among those of a test: its rank, how many there are, and the store in which they meet."""

    rank: int
    world: int
    _store: TCPStore
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextlib.contextmanager
    def group(self, **sizes: int) -> Iterator[Parallel]:
        """Provide a group of all processes; `sizes` are those of its parallel kinds. All processes make the same groups in order."""
        store = PrefixStore(f"group-{next(self._numbers)}", self._store)
        parallel = Parallel(rank=self.rank, world=self.world, device=torch.device("cpu"), store=store, timeout_s=60, **sizes)
        try:
            yield parallel
        finally:
            parallel.close()


def run(scenario: str, *, world: int = 2, exit_codes: tuple[int, ...] | None = None, **options: Any) -> list[Any]:
    """Run `scenario`, a `module:function` that gets a `Rank` and the options, in `world` processes at once. Return what the ranks that
    ended with code 0 gave, in order.

    Fails with AssertionError on any other code than the rank's in `exit_codes`, which are all 0 unless set.
    """
    context = _fork_server()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results: Any = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, world, port, scenario, options, results), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    for process, code in zip(ranks, exit_codes or (0,) * world, strict=True):
        process.join(DEADLINE_S)
        assert process.exitcode == code, f"{process.name} ended with {process.exitcode}"
    found = dict(results.get() for process in ranks if process.exitcode == 0)
    return [found[rank] for rank in sorted(found)]


def _fork_server() -> Any:
    """Start the fork server with the imports that scenarios need; no tensor is touched there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusers", "support.runner.parallel_scenarios"])
    # Before 3.13 the fork server does not inherit its parent's path, and silently skips modules that it does not find.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


def _rank(rank: int, world: int, port: int, scenario: str, options: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
    results.put((rank, pkgutil.resolve_name(scenario)(Rank(rank, world, store), **options)))
