# SPDX-License-Identifier: Apache-2.0
"""Random sequences of sleeps, wakes, pauses, requests, faults and losses over fake ranks: nothing hangs, nothing is lost or changed."""

import asyncio
import random
from pathlib import Path

import pytest

from diffusion_worker.engine.state.request_events import Generation
from diffusion_worker.engine.state.state_document import OperationCall, PauseCall, SleepMode, SleepPolicy
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ErrorReport, MemoryTag, RequestSpec, SleepLevel
from support.worker.fake_rank_group import FakeRankGroup, fake_pixels
from support.worker.sleep_rig import KILLED, SleepRig, sleep_rig, write_desired

FAULTS = [
    ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "no memory"),
    ErrorReport(ErrorCode.RANK_FAILED, "broken"),
]
METHODS = ("mirror_weights", "handle_sleep_task", "handle_wake_task", "fingerprint", "synchronize")
# The other outcomes of a request beside its image: a code that tells the client to try again.
TOLD = {ErrorCode.ASLEEP, ErrorCode.RANK_FAILED}


class Sequence:
    """A random sequence of requests, sleeps, wakes and faults over one engine."""

    def __init__(self, rig: SleepRig, chance: random.Random) -> None:
        self.rig = rig
        self.chance = chance
        self.requests: dict[int, asyncio.Task[Generation]] = {}

    async def step(self) -> None:
        """Do one random thing and let some time pass; an error that the engine may give then is ignored."""
        acts = (self.request, self.request, self.cancel, self.sleep, self.wake, self.fault, self.lose, self.pause)
        try:
            await self.chance.choice(acts)()
        except RequestError as error:
            assert error.code in (ErrorCode.CONFLICT, ErrorCode.BUSY, ErrorCode.ASLEEP, ErrorCode.STARTING), error
        await asyncio.sleep(self.chance.choice((0, 0, 0.001, 0.3, 2.0)))

    async def request(self) -> None:
        seed = len(self.requests)
        self.requests[seed] = asyncio.create_task(self.rig.image(seed))

    async def cancel(self) -> None:
        if self.requests:
            self.requests[self.chance.randrange(len(self.requests))].cancel()

    async def sleep(self) -> None:
        mode, level = self.chance.choice(list(SleepMode)), self.chance.choice(list(SleepLevel))
        policy = self.chance.choice((None, None, *SleepPolicy))
        self.rig.begin_sleep(mode=mode, level=level, policy=policy, deadline_seconds=self.chance.choice((0.001, 5.0)))

    async def wake(self) -> None:
        tags = self.chance.choice((None, None, [MemoryTag.WEIGHTS], [MemoryTag.ADAPTERS, MemoryTag.CACHES]))
        self.rig.begin_wake(tags=tags, deadline_seconds=5.0)

    async def fault(self) -> None:
        ranks, rank = self.rig.ranks, self.chance.randrange(2)
        match self.chance.randrange(5):
            case 0:
                ranks.sleep_errors = [self.chance.choice(FAULTS)]
            case 1:
                ranks.wake_errors = [self.chance.choice(FAULTS)]
            case 2:
                ranks.killers[self.chance.choice(METHODS)] = KILLED
            case 3:
                ranks.members[rank].checksum = "other"
            case 4:
                ranks.members[rank].leaked = 500_000

    async def lose(self) -> None:
        if self.chance.random() < 0.3:
            self.rig.ranks.lose(KILLED)

    async def pause(self) -> None:
        if self.chance.random() < 0.5:
            await self.rig.engine.pause(PauseCall(operation_id="pause", deadline_seconds=5.0))
            await asyncio.sleep(0.2)
        self.rig.engine.resume(OperationCall(operation_id="resume"))

    async def end(self) -> None:
        """Wake the model, and check each request's outcome: the right image, an error that may be retried, or its cancellation."""
        engine = self.rig.engine
        engine.resume(OperationCall(operation_id="resume"))
        async with asyncio.timeout(3600):
            while engine.state != "ready":
                try:
                    await self.rig.wake(policy=SleepPolicy.ALWAYS_AWAKE)
                except (RequestError, AssertionError):
                    await engine.life.wait_for_change()
            outcomes = await asyncio.gather(*self.requests.values(), return_exceptions=True)
            # The image shows that the model serves and that nobody has put it to sleep in between.
            await self.rig.image()
        for seed, outcome in zip(self.requests, outcomes, strict=True):
            if isinstance(outcome, Generation):
                assert outcome.images[0].pixels == fake_pixels(RequestSpec(request_id="", prompt="p kumquatfen", seed=seed))
            elif isinstance(outcome, RequestError):
                assert outcome.code in TOLD, outcome
            else:
                assert isinstance(outcome, asyncio.CancelledError), outcome
        document = self.rig.document
        assert (document.in_flight, document.queued, document.held.current, document.operation) == (0, 0, 0, None)


@pytest.mark.slow
@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(60))
async def test_any_sequence_ends_with_a_model_that_serves_and_no_request_lost(seed: int, tmp_path: Path) -> None:
    group = FakeRankGroup(2, step_s=0.05)
    async with sleep_rig(group=group, max_restarts=10_000, desired_path=write_desired(tmp_path, "OnIdle")) as rig:
        sequence = Sequence(rig, random.Random(seed))
        for _ in range(40):
            await sequence.step()
        group.sleep_errors, group.wake_errors, group.killers = [], [], {}
        await sequence.end()
