# SPDX-License-Identifier: Apache-2.0
"""The runner of the election in virtual time, over Leases in memory: errors, silence, lost answers, and the gate."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from diffusion_operator.election.elector import Elector
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.election.state import Timing
from diffusion_operator.errors import NotLeading
from diffusion_operator.settings import ElectionSettings
from support.operator.fake_leases import FakeLeases

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TIMING = Timing()


class Member:
    """A process that takes part in the election. The wall clock may be off by any offset."""

    def __init__(self, server: FakeLeases, identity: str, *, wall_offset: timedelta = timedelta(), chance: float = 0.5) -> None:
        self.client = server.client()
        self.leadership = Leadership()
        self.told: list[str] = []
        self.elector = Elector(
            self.client,
            ElectionSettings(namespace="ops", name="op", identity=identity),
            self.leadership,
            lead=lambda again: self.told.append("leads again" if again else "leads"),
            follow=self._follow,
            wall=lambda: NOON + wall_offset + timedelta(seconds=asyncio.get_running_loop().time()),
            random=lambda: chance,
        )
        self.task = asyncio.create_task(self.elector.run())

    async def _follow(self) -> None:
        self.told.append("follows")

    @property
    def leads(self) -> bool:
        return self.leadership.is_open

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.elector.release()


async def until(look: Callable[[], bool], within_s: float = 60.0) -> float:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while not look():
        assert loop.time() - begun < within_s
        await asyncio.sleep(0.1)
    return loop.time() - begun


async def pair(server: FakeLeases) -> tuple[Member, Member]:
    """Return two members: the first leads, and the other one's wall clock is a year behind."""
    one = Member(server, "one")
    await until(lambda: one.leads)
    two = Member(server, "two", wall_offset=timedelta(days=-365))
    await asyncio.sleep(5)
    return one, two


async def test_a_leader_stays_and_renews_every_two_seconds_with_one_call() -> None:
    server = FakeLeases()
    one, two = await pair(server)
    before = len(server.writes)
    await asyncio.sleep(60)
    assert (one.leads, two.leads, one.told, two.told) == (True, False, ["leads"], [])
    assert 30 <= len(server.writes) - before <= 61
    assert (one.leadership.epoch, set(server.writes)) == (1, {"one"})


@pytest.mark.parametrize(("chance", "renewals"), [(0.0, 60), (1.0, 30)])
async def test_processes_that_began_together_do_not_renew_together(chance: float, renewals: int) -> None:
    server = FakeLeases()
    one = Member(server, "one", chance=chance)
    await until(lambda: one.leads)
    before = len(server.writes)
    await asyncio.sleep(60.5)
    assert len(server.writes) - before == pytest.approx(renewals, abs=1)


@pytest.mark.parametrize("fault", ["hangs", "fails"])
async def test_a_leader_that_hears_nothing_closes_its_gate_after_ten_seconds_and_the_other_one_leads(fault: str) -> None:
    server = FakeLeases()
    one, two = await pair(server)
    setattr(one.client, fault, True)
    await asyncio.sleep(TIMING.renew)
    assert (one.leads, two.leads) == (False, False)
    assert TIMING.renew + await until(lambda: two.leads) < 20
    setattr(one.client, fault, False)
    await asyncio.sleep(30)
    assert (one.leads, two.leads, one.told, two.told) == (False, True, ["leads", "follows"], ["leads"])
    assert (two.leadership.epoch, one.leadership.lost) == (2, 1)


async def test_a_leader_whose_renewals_are_done_and_never_answered_leads_on_but_for_moments() -> None:
    """Check that a leader whose renewals are never answered leads on, but for moments. Otherwise it would renew its Lease without
    knowing it, and nobody else could lead."""
    server = FakeLeases()
    one, two = await pair(server)
    one.client.loses_answers = True
    seconds = 0
    for _ in range(60):
        await asyncio.sleep(1)
        seconds += one.leads
        assert not two.leads
    assert seconds > 50
    assert one.leadership.epoch == 1


async def test_without_an_api_server_nobody_leads_and_the_one_that_did_goes_on_with_what_it_remembers() -> None:
    server = FakeLeases()
    one, two = await pair(server)
    one.client.fails = two.client.fails = True
    await asyncio.sleep(60)
    assert (one.leads, two.leads) == (False, False)
    one.client.fails = False
    await until(lambda: one.leads, within_s=3)
    two.client.fails = False
    await asyncio.sleep(30)
    assert (one.leads, one.told, one.leadership.epoch) == (True, ["leads", "follows", "leads again"], 1)


async def test_a_process_that_ends_gives_its_lease_up_and_the_other_one_leads_within_two_seconds() -> None:
    server = FakeLeases()
    one, two = await pair(server)
    await one.end()
    assert not one.leads
    assert await until(lambda: two.leads) <= TIMING.retry + 0.1
    assert server.manifest is not None and server.manifest["spec"]["leaseTransitions"] == 1


async def test_a_deleted_lease_is_made_again_by_its_leader_who_does_not_stop() -> None:
    server = FakeLeases()
    one, two = await pair(server)
    server.manifest = None
    await asyncio.sleep(30)
    assert (one.leads, two.leads, one.told, one.leadership.epoch) == (True, False, ["leads"], 2)


async def test_a_worker_that_has_seen_a_higher_epoch_raises_that_of_the_leader() -> None:
    server = FakeLeases()
    one, _ = await pair(server)
    one.leadership.report(7)
    await until(lambda: one.leadership.epoch == 8, within_s=TIMING.retry + 0.1)
    assert one.told == ["leads"]
    assert server.manifest is not None and server.manifest["metadata"]["annotations"] == {"diffusion-operator.dev/epoch": "8"}


async def test_a_missing_right_is_told_once_and_nothing_is_written(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeLeases()
    one = Member(server, "one")
    one.client.fails = True
    await asyncio.sleep(60)
    assert (one.leads, server.writes) == (False, [])
    assert [record.getMessage() for record in caplog.records if "lease not read or written" in record.getMessage()] == [
        "lease not read or written lease=ops/op error=ClusterUnavailable: connection refused"
    ]


async def test_an_error_that_nobody_expected_ends_a_turn_and_not_the_election(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeLeases()
    one, two = await pair(server)

    async def fail(*_: object) -> None:
        raise ValueError("an answer that is no Lease")

    with monkeypatch.context() as broken:
        for name in ("get", "merge"):
            broken.setattr(one.client, name, fail)
        await until(lambda: two.leads)
        assert not one.leads
    await two.end()
    await until(lambda: one.leads, within_s=5)


async def test_what_is_under_way_ends_when_the_lead_does_and_goes_on_while_it_is_renewed() -> None:
    server = FakeLeases()
    one, _ = await pair(server)
    async with one.leadership.passage():
        await asyncio.sleep(60)
    one.client.hangs = True
    begun = asyncio.get_running_loop().time()
    with pytest.raises(NotLeading):
        async with one.leadership.passage():
            await asyncio.sleep(60)
    assert asyncio.get_running_loop().time() - begun <= TIMING.renew
    with pytest.raises(NotLeading):
        async with one.leadership.passage():
            raise AssertionError("nothing begins any more")


async def test_a_timeout_inside_is_not_taken_for_the_end_of_the_lead() -> None:
    leadership = Leadership.for_ever()
    with pytest.raises(TimeoutError):
        async with leadership.passage(), asyncio.timeout(1):
            await asyncio.sleep(2)
    async with leadership.passage():
        await asyncio.sleep(1e6)
    assert (leadership.is_open, leadership.epoch) == (True, None)
