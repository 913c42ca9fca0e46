# SPDX-License-Identifier: Apache-2.0
"""A look at sleeping replicas between two passes, at what they say only: a request may wake one of them without us.

A whole pass asks the API server for three things. A model that nobody uses should not cost that every two seconds.
"""

import asyncio
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.worker_state import HeldReport, WorkerPhase, WorkerState
from diffusion_operator.errors import ControlError
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.sleep.next_look import WAKEABLE_POLL_S
from diffusion_operator.reconcile.memory import DeploymentMemory, SleepSnapshot
from diffusion_operator.reconcile.runtime import Runtime


def snapshot_of(observed: Observed, *, look_again_s: float | None, now: datetime, steady_s: float) -> SleepSnapshot | None:
    """None where something else than a request may change what is to be done."""
    polled = [(pod.ip, observed.polls[pod.uid]) for pod in observed.pods if pod.uid in observed.polls]
    said = {ip: _without_ages(poll.state) for ip, poll in polled if poll.fresh and poll.state is not None}
    asleep = all(state.state is WorkerPhase.ASLEEP for state in said.values())
    if look_again_s != WAKEABLE_POLL_S or len(said) != len(observed.pods) or not asleep:
        return None
    return SleepSnapshot(until=now + timedelta(seconds=steady_s), said=said)


async def sleepers_unchanged(runtime: Runtime, memory: DeploymentMemory, snapshot: SleepSnapshot) -> bool:
    """Whether every replica still does."""
    return all(await asyncio.gather(*(_says(runtime, memory, ip, state) for ip, state in snapshot.said.items())))


async def _says(runtime: Runtime, memory: DeploymentMemory, ip: str, before: WorkerState) -> bool:
    try:
        state = await memory.tokens.call(ip, lambda token: runtime.workers.state(ip, token=token))
    except ControlError:
        return False  # a pass counts it
    return _without_ages(state) == before


def _without_ages(state: WorkerState) -> WorkerState:
    return msgspec.structs.replace(
        state,
        held=HeldReport(current=state.held.current),
        last_request_age_seconds=None,
        state_age_seconds=0.0,
        adapters=tuple(msgspec.structs.replace(one, last_request_age_seconds=None) for one in state.adapters),
    )
