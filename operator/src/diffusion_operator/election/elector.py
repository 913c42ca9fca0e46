# SPDX-License-Identifier: Apache-2.0
"""The runner of the election: looks at the Lease, bids for it, and tells who leads. All decisions are in state.py.

`kubernetes.aio.leaderelection` has no timeout of a call, ends at a lost connection, compares wall clocks and cannot give a Lease up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime

from diffusion_operator.api.names import LEASE
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.election.lease import Lease, Leases, lease_manifest, micro_time, read_lease
from diffusion_operator.election.state import Election, Timing, bid, due_s, give_up, look, report
from diffusion_operator.errors import ClusterConflict, ClusterError
from diffusion_operator.settings import ElectionSettings

RACE_S = 0.5
"""The longest pause after another candidate was faster."""
NOT_FOUND = 404

log = logging.getLogger(__name__)


class Elector:
    def __init__(
        self,
        leases: Leases,
        place: ElectionSettings,
        leadership: Leadership,
        *,
        lead: Callable[[bool], None],
        follow: Callable[[], Awaitable[None]],
        wall: Callable[[], datetime],
        random: Callable[[], float],
        timing: Timing | None = None,
    ) -> None:
        """Call `lead` when this process begins to lead, and await `follow` when it no longer does.

        `lead` is given True if nobody else led since this process did. `random` gives numbers in [0, 1).
        """
        self._leases = leases
        self._place = place
        self._leadership = leadership
        self._lead = lead
        self._follow = follow
        self._wall = wall
        self._random = random
        self._timing = timing or Timing()
        self._state = Election(identity=place.identity)
        self._leads = False
        self._last_epoch = 0
        """The epoch of the last lead of this process."""
        self._doubted = False
        """The outcome of the last bid is not known, or another one was faster."""
        self._error = ""

    async def run(self) -> None:
        """Take part in the election until the task is cancelled; after an unexpected error try again."""
        while True:
            pause_s = self._timing.retry
            try:
                pause_s = await self._turn()
                await self._settle()
            except Exception:  # a process that takes no part any more would look healthy
                log.exception("election failed unexpectedly, it is tried again lease=%s", self._place.lease)
            await asyncio.sleep(pause_s)

    async def release(self) -> None:
        """Close the gate and give the Lease up, if this process holds it, so that another process leads at once.

        A write that fails is only logged. Call it when nothing writes any more and `run` has ended.
        """
        self._leadership.close()
        self._state, lease = give_up(self._state, micro_time(self._wall()))
        if lease is None:
            return
        try:
            async with asyncio.timeout(self._timing.call):
                await self._leases.merge(lease_manifest(self._place, lease))
            log.info("lease released lease=%s epoch=%d", self._place.lease, lease.epoch)
        except (ClusterError, TimeoutError) as error:
            log.warning("lease not released, it will expire lease=%s error=%s", self._place.lease, error)

    async def _turn(self) -> float:
        """Look at the Lease and bid for it, as far as it is due, and return the seconds until the next turn.

        Errors of the API server and timeouts are not raised; a new one is logged.
        """
        pause_s = self._timing.retry * (1 + self._random()) / 2
        self._state = report(self._state, self._leadership.highest_reported)
        try:
            if self._doubted or not (self._state.held and self._state.leads(self._now(), self._timing)):
                await self._look()
            due = due_s(self._state, self._now(), self._timing)
            if due:
                return min(pause_s, due)
            await self._bid()
            self._error = ""
        except ClusterConflict:
            self._doubted = True
            return RACE_S * self._random()
        except (ClusterError, TimeoutError) as error:
            self._doubted = True
            self._complain(error)
            return pause_s if isinstance(error, ClusterError) else 0.0  # the time is spent
        return pause_s

    async def _look(self) -> None:
        async with asyncio.timeout(self._timing.call):
            found = await self._leases.get(LEASE, self._place.namespace, self._place.name)
        self._state, self._doubted = look(self._state, read_lease(found), self._now()), False
        await self._settle()  # before a bid that may take its time

    async def _bid(self) -> None:
        self._state, lease = bid(self._state, micro_time(self._wall()), self._now(), self._timing)
        async with asyncio.timeout(self._timing.call):
            answer = await self._write(lease)
        self._state = look(self._state, answer, self._now())

    async def _write(self, lease: Lease) -> Lease:
        """Write the Lease; raise ClusterConflict if another client was faster or deleted it."""
        manifest = lease_manifest(self._place, lease)
        try:
            if lease.version:
                answer = read_lease(await self._leases.merge(manifest))
            else:
                made = await self._leases.create(manifest)
                answer = read_lease(await self._leases.get(LEASE, self._place.namespace, self._place.name)) if made else None
        except ClusterError as error:
            if error.status != NOT_FOUND or not lease.version:
                raise
            answer = None
        if answer is None or answer.renewed != lease.renewed:
            raise ClusterConflict(f"another client wrote or deleted the Lease {self._place.lease}", status=409, reason="Conflict")
        return answer

    async def _settle(self) -> None:
        """Open or close the gate by the state. If the lead began, call `lead`; if it ended, await `follow`."""
        state, now = self._state, self._now()
        leads = state.leads(now, self._timing)
        if leads and state.renewed_at is not None:
            self._leadership.open(state.epoch, renewed_at=state.renewed_at, until=state.renewed_at + self._timing.renew)
        if leads and not self._leads:
            log.info("leading lease=%s identity=%s epoch=%d", self._place.lease, state.identity, state.epoch)
            self._lead(state.epoch == self._last_epoch)
        elif self._leads and not leads:
            self._leadership.close()
            self._leadership.lost += 1
            log.warning("not leading any more lease=%s identity=%s holder=%s", self._place.lease, state.identity, self._holder)
            await self._follow()
        self._leads = leads
        if leads:
            self._last_epoch = state.epoch

    @property
    def _holder(self) -> str:
        return self._state.seen.holder if self._state.seen is not None else "nobody"

    def _complain(self, error: Exception) -> None:
        """Log an error of the Lease, unless it is the same as the one before."""
        failure = f"{type(error).__name__}: {error}" if str(error) else f"no answer within {self._timing.call:g} s"
        if failure != self._error:
            log.warning("lease not read or written lease=%s error=%s", self._place.lease, failure)
        self._error = failure

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
