# SPDX-License-Identifier: Apache-2.0
"""Supervision of a rank group: step it, and after a loss restart it with its adapters and in its former state.

Queued requests stay queued, and running ones are made again from their seed, one at a time. A group that is lost too often, or cannot
load its model any more, fails the engine. Losses that a single request caused do not count.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from diffusion_worker.engine.adapters.runner import AdapterRunner
from diffusion_worker.engine.scheduling.step_loop import StepLoop
from diffusion_worker.engine.startup.preparation import Preparation
from diffusion_worker.engine.state.lifecycle import EngineLife
from diffusion_worker.engine.state.rank_protocol import Loss, RankGroup
from diffusion_worker.engine.state.restart_budget import RestartBudget
from diffusion_worker.engine.state.state_document import EngineState, LoadStage
from diffusion_worker.errors import ConfigError, Fault, GroupFailed, LoadTimeout

log = logging.getLogger(__name__)


class Supervisor:
    """Two tasks for a rank group: one steps its requests, the other starts a lost group again, within the budget.

    `failed` gets the reason when the engine cannot go on, such as when no restart is left.
    """

    def __init__(
        self,
        life: EngineLife,
        ranks: RankGroup,
        steps: StepLoop,
        adapters: AdapterRunner,
        preparation: Preparation,
        *,
        budget: RestartBudget,
        failed: Callable[[str], None],
    ) -> None:
        self._life = life
        self._ranks = ranks
        self._steps = steps
        self._adapters = adapters
        self._budget = budget
        self._preparation = preparation
        self._failed = failed
        self._stepping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        # Done at the end of the current restart, or else of the next one.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        """Start the two background tasks: the loop that makes steps, and the watch that restarts lost ranks."""
        self._stepping = asyncio.create_task(self._steps.run())
        self._watching = asyncio.create_task(self._watch())

    async def end(self) -> None:
        """Cancel stepping and watching, and wait for their end; the ranks stay. Harmless before `begin` and when repeated."""
        for task in (self._watching, self._stepping):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def settled(self) -> None:
        """Wait until a group is there, after a restart that runs or is due; raise GroupFailed if none comes."""
        while self._life.failure is None and (self._life.restarting or self._ranks.loss is not None):
            await asyncio.shield(self._over)
        if self._life.failure is not None:
            raise GroupFailed(self._life.failure)

    def on_stepping_broken(self, reason: str) -> None:
        """Fail the engine if stepping ended by a defect; an end with the loss of the group is handled by the watch."""
        if self._ranks.loss is None:
            self._failed(reason)

    async def _watch(self) -> None:
        while self._life.failure is None:
            loss = await self._ranks.failed()
            try:
                await self._recover(loss)
            except Exception as error:
                log.exception("the rank group cannot be started again, and the worker fails")
                self._failed(f"the rank group cannot be started again: {error!r}")
            over, self._over = self._over, asyncio.get_running_loop().create_future()
            over.set_result(None)

    async def _recover(self, loss: Loss) -> None:
        """Start the group again, repeatedly if the new one is lost too; fail the engine if the budget is spent or the model cannot load."""
        started = time.monotonic()
        while True:
            self._life.lose_group(loss, self._ranks.generation)
            await self._stop_stepping()
            number = self._ranks.generation
            explained = self._steps.lost(loss.reason, number)
            self._budget.explain(explained)
            if number not in explained and not self._budget.spend(number, time.monotonic()):
                self._failed(f"the rank group was lost too often for --max-restarts, the last time because: {loss.reason}")
                return
            self._life.losses.restarts += 1
            try:
                await self._start_again()
                break
            except (ConfigError, LoadTimeout) as error:
                self._failed(f"the rank group was lost ({loss.reason}) and cannot be started again: {error}")
                return
            except GroupFailed as error:
                loss = self._ranks.loss or Loss(str(error), Fault.DEFECT)
        self._life.group_is_back()
        seconds = time.monotonic() - started
        log.warning("rank group started again generation=%d seconds=%.3f", self._ranks.generation, seconds)
        self._stepping = asyncio.create_task(self._steps.run())

    async def _start_again(self) -> None:
        """Start the next generation into the requested state: with its adapters, or asleep, without memory for them."""
        asleep = self._life.state_after_restart is EngineState.ASLEEP
        self._life.stage = LoadStage.STARTING_RANKS
        await self._preparation.begin(await self._ranks.restart(asleep=asleep), asleep=asleep)
        self._life.stage = LoadStage.LOADING_ADAPTERS
        if asleep:
            self._adapters.ranks_emptied()
        else:
            await self._adapters.reload()
        self._life.stage = LoadStage.DONE

    async def _stop_stepping(self) -> None:
        """Cancel the stepping task and wait until it is over; a loss ends it only if it needs the group just then."""
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
