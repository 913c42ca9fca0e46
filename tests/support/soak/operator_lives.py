# SPDX-License-Identifier: Apache-2.0
"""Operators whose lives are disturbed: one that dies and restarts at once, or two of which one leads.

Real: the processes, their signals, their accounts and their Lease. Not real: the wrappers of `support.operator.process` in them.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx2

from support.apiserver.rest_client import RestClient
from support.cluster.audit import read_log
from support.operator.two_operators import LEASE, account, arguments, make_lease
from support.soak.frame import Outcome
from support.soak.operator_process import OperatorProcess
from support.soak.writers import Entry, foreign_writes

# These make NetworkPolicies possible, which name the operator's pods.
PODS = ("--operator-namespace=operators", "--operator-label=app=operator")
ACCOUNTS = ("one", "two")
LIVES_S = (0.5, 3.0)
DIE_WITHIN = 600  # places: the first few hundred after a start are applies of children
STOPPED_S = (20.0, 60.0)
LED_WITHIN_S = 60.0


class OneOperator:
    """An operator without election that dies again and again: at any moment, or before or after one of its actions."""

    least_deaths = 3

    def __init__(self, folder: Path, kubeconfig: Path, **options: Any) -> None:
        self.processes = (OperatorProcess(folder, kubeconfig, arguments=("--all-namespaces", *PODS), **options),)

    async def begin(self, _: RestClient) -> None:
        """Start the first life."""
        self.processes[0].start()

    async def disturb(self, outcome: Outcome, rng: Random) -> None:
        """Kill the operator, start it again, and let it run for a moment. In most lives it dies by itself at a random place, if it gets
        there. `outcome.killed` counts the lives that did not."""
        (operator,) = self.processes
        operator.kill()
        operator.start(die_at=rng.randint(1, DIE_WITHIN) if rng.random() < 0.7 else None)
        with contextlib.suppress(AssertionError):  # the operator died during its start
            await asyncio.to_thread(operator.wait_ready)
        await asyncio.sleep(rng.uniform(*LIVES_S))
        outcome.killed += operator.is_alive()

    async def calm(self) -> None:
        """Kill the operator, start its last life, and wait until it is ready."""
        (operator,) = self.processes
        operator.kill()
        operator.start()
        await asyncio.to_thread(operator.wait_ready)

    def judge(self, outcome: Outcome) -> None:
        """Judge nothing: there is no other operator that could write."""


class TwoOperators:
    """Two processes of one release. Each has an account of its own, so the audit log tells their writes apart."""

    least_deaths = 1

    def __init__(self, folder: Path, kubeconfig: Path, **options: Any) -> None:
        make_lease(kubeconfig)
        self._log, self._judged = kubeconfig.parent / "audit.log", datetime.now(UTC)
        self.processes = tuple(made(folder / name, account(kubeconfig, name), **options) for name in ACCOUNTS)

    async def begin(self, _: RestClient) -> None:
        """Start both, and wait until one leads."""
        for operator in self.processes:
            operator.start()
        await self.calm()

    async def disturb(self, outcome: Outcome, rng: Random) -> None:
        """Kill the leader, stop it for longer than its Lease lasts, or end it; or kill the follower. A killed or ended process starts
        again, and a stopped one goes on."""
        leader = await self._leader()
        what = rng.choice(("leader killed", "leader stopped", "leader ended", "follower killed"))
        outcome.steps[what] += 1
        operator = next(one for one in self.processes if (one is leader) == what.startswith("leader"))
        if what == "leader stopped":
            with stopped(operator):
                await asyncio.sleep(rng.uniform(*STOPPED_S))
        else:
            await asyncio.to_thread(operator.stop if what == "leader ended" else operator.kill)
            outcome.killed += 1
            operator.start()
        await asyncio.sleep(rng.uniform(*LIVES_S))

    async def _leader(self) -> OperatorProcess:
        """Wait for a process that reports that it leads, and return it."""
        ends = time.monotonic() + LED_WITHIN_S
        while not (leading := [one for one in self.processes if await asyncio.to_thread(leads, one)]):
            assert time.monotonic() < ends, f"nobody leads for {LED_WITHIN_S:g} s"
            await asyncio.sleep(0.2)
        return leading[0]

    async def calm(self) -> None:
        """Wait until both are ready and one leads. Neither is started or ended."""
        for operator in self.processes:
            await asyncio.to_thread(operator.wait_ready)
        await self._leader()

    def judge(self, outcome: Outcome) -> None:
        """Read the audit log since the last call; count the changes of leader and the writes. A write by a process that did not lead is
        a fault."""
        since, self._judged = self._judged, datetime.now(UTC)
        files = sorted(self._log.parent.glob(f"{self._log.stem}*{self._log.suffix}"), key=lambda file: file.stat().st_mtime)
        lines = [line for file in files for line in file.read_text().splitlines()]
        changes, writes, foreign = foreign_writes(read_log(lines, since), account_of)
        outcome.lead_changes += changes - 1
        outcome.writes += writes
        outcome.wrong += foreign


def leads(operator: OperatorProcess) -> bool:
    """Return whether a process reports that it leads; False where it reports nothing."""
    try:
        return operator.metrics()["diffusion_operator_leader"] == 1
    except (httpx2.TransportError, KeyError):
        return False


def made(folder: Path, kubeconfig: Path, **options: Any) -> OperatorProcess:
    """Make the new folder, and return an operator's process that is not started yet, under the account of the folder's name."""
    folder.mkdir(parents=True)
    return OperatorProcess(folder, kubeconfig, arguments=(*arguments(folder.name), *PODS), **options)


@contextlib.contextmanager
def stopped(operator: OperatorProcess) -> Iterator[None]:
    """Stop a process while the block runs, with its connections open."""
    os.kill(operator.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(operator.pid, signal.SIGCONT)


def account_of(entry: Entry) -> str | None:
    """Return the account of an entry if it is one of the two operators'; otherwise None."""
    name = str(entry["user"].get("username", "")).removeprefix(f"system:serviceaccount:{LEASE[0]}:")
    return name if name in ACCOUNTS else None
