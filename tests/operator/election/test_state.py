# SPDX-License-Identifier: Apache-2.0
"""The election in virtual time: several candidates with clocks of their own, and one Lease that behaves as the API server's does."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_operator.election.lease import Lease
from diffusion_operator.election.state import MOST_RISE, Election, Timing, bid, due_s, give_up, look, report

TIMING = Timing()
STEP_S = 0.5


class Server:
    """A Lease whose version is checked at each write. Nothing else of an API server is here."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.now = 0.0
        self._numbers = itertools.count(1)

    def write(self, lease: Lease) -> Lease | None:
        """Write the Lease and return it with its new version; return None for a conflict."""
        if (self.lease.version if self.lease is not None else "") != lease.version:
            return None
        number = str(next(self._numbers))
        self.lease = msgspec.structs.replace(lease, version=number, uid=lease.uid or f"uid-{number}")
        return self.lease


class Candidate:
    """A process whose clock began at another time and may run at another speed."""

    def __init__(self, server: Server, identity: str, *, offset_s: float = 0.0, speed: float = 1.0) -> None:
        self._server = server
        self._offset_s = offset_s
        self._speed = speed
        self.state = Election(identity=identity)
        self.cut_off = False
        self.stopped = False
        self.loses_answers = False

    @property
    def now(self) -> float:
        return self._offset_s + self._speed * self._server.now

    @property
    def leads(self) -> bool:
        return self.state.leads(self.now, TIMING)

    def turn(self) -> bool:
        """Read the Lease and bid if a bid is due; return whether the bid was written."""
        if self.cut_off or self.stopped:
            return False
        self.state = look(self.state, self._server.lease, self.now)
        if due_s(self.state, self.now, TIMING):
            return False
        self.state, lease = bid(self.state, f"{self.now:.6f}", self.now, TIMING)
        answer = self._server.write(lease)
        if answer is not None and not self.loses_answers:
            self.state = look(self.state, answer, self.now)
        return answer is not None

    def release(self) -> None:
        self.state, lease = give_up(self.state, f"{self.now:.6f}")
        assert lease is not None and self._server.write(lease) is not None


class Play:
    def __init__(self, *candidates: Candidate, server: Server) -> None:
        self.candidates, self.server = candidates, server
        self.epochs: list[int] = []

    def run(self, seconds: float) -> None:
        """Let all candidates take turns, half a second apart; assert that never two lead."""
        ends = self.server.now + seconds
        while self.server.now < ends:
            for one in self.candidates:
                if one.turn() and one.state.epoch not in self.epochs[-1:]:
                    self.epochs.append(one.state.epoch)
            assert sum(one.leads for one in self.candidates) <= 1
            self.server.now += STEP_S

    def until(self, one: Candidate, within_s: float = 60.0) -> float:
        """Run until a candidate leads and return the seconds that it took."""
        begun = self.server.now
        while not one.leads:
            self.run(STEP_S)
            assert self.server.now - begun < within_s
        return self.server.now - begun


def pair(**second: float) -> tuple[Play, Candidate, Candidate]:
    """Return a play of two candidates in which the first leads, and both candidates; `second` sets the second one's clock."""
    server = Server()
    one, two = Candidate(server, "one"), Candidate(server, "two", **second)
    play = Play(one, two, server=server)
    play.until(one)
    return play, one, two


def test_the_first_process_waits_for_as_long_as_a_lease_lasts_since_an_operator_without_election_may_still_run() -> None:
    server = Server()
    one = Candidate(server, "one")
    assert Play(one, server=server).until(one) == pytest.approx(TIMING.lease, abs=1)
    assert server.lease is not None
    assert (server.lease.holder, server.lease.epoch, server.lease.transitions) == ("one", 1, 0)


def test_a_leader_renews_under_its_epoch_and_the_other_one_follows() -> None:
    play, one, two = pair()
    play.run(300)
    assert (one.leads, two.leads, play.epochs) == (True, False, [1])


@pytest.mark.parametrize("fault", ["cut_off", "stopped"])
@pytest.mark.parametrize(("offset_s", "speed"), [(0, 1.0), (1e9, 1.0), (-1e6, 1.01), (0, 0.99)])
def test_a_leader_that_is_away_stops_before_the_other_one_leads_whatever_their_clocks_say(
    fault: str, offset_s: float, speed: float
) -> None:
    play, one, two = pair(offset_s=offset_s, speed=speed)
    setattr(one, fault, True)
    play.run(TIMING.renew + STEP_S)
    assert (one.leads, two.leads) == (False, False)
    assert play.until(two) + TIMING.renew < 20 - TIMING.retry
    setattr(one, fault, False)
    play.run(120)
    assert (one.leads, two.leads, play.epochs) == (False, True, [1, 2])
    assert play.server.lease is not None and play.server.lease.transitions == 1


def test_a_leader_without_an_api_server_goes_on_under_its_epoch_when_nobody_else_led() -> None:
    play, one, two = pair()
    one.cut_off = two.cut_off = True
    play.run(60)
    assert not one.leads
    one.cut_off = False
    play.run(1)
    two.cut_off = False
    play.run(60)
    assert (one.leads, one.state.epoch, play.epochs) == (True, 1, [1])


def test_a_lease_that_was_given_up_is_taken_at_once() -> None:
    play, one, two = pair()
    one.release()
    one.stopped = True
    assert play.until(two) <= 2 * STEP_S
    assert two.state.epoch == 2


def test_a_lease_from_a_backup_that_was_given_up_then_is_not_taken_from_its_leader() -> None:
    play, one, two = pair()
    one.release()
    one.stopped, backup = True, play.server.lease
    play.until(two)
    one.stopped = False
    play.run(STEP_S)
    assert backup is not None
    two.cut_off, play.server.lease = True, msgspec.structs.replace(backup, version="99")
    assert play.until(one) >= TIMING.renew


def test_a_container_that_is_started_again_in_its_pod_leads_at_once_under_a_new_epoch() -> None:
    play, one, two = pair()
    one.state = Election(identity="one")
    assert play.until(one) <= 2 * STEP_S
    assert (one.state.epoch, two.leads) == (2, False)
    assert play.server.lease is not None and play.server.lease.transitions == 0


def test_two_processes_of_one_identity_do_not_both_lead_for_longer_than_a_look() -> None:
    play, one, two = pair()
    two.state = Election(identity="one")
    assert two.turn(), "it takes itself for the process that the other one is"
    one.turn()
    play.run(60)
    assert (one.leads, two.leads) == (False, True)


def test_a_lease_that_is_deleted_under_its_leader_is_made_again_by_it_with_a_higher_epoch() -> None:
    play, one, two = pair()
    play.server.lease = None
    play.run(60)
    assert (one.leads, two.leads, play.epochs) == (True, False, [1, 2])


def test_a_deleted_lease_is_made_by_another_one_only_after_its_leader_has_stopped() -> None:
    play, one, two = pair()
    one.cut_off, play.server.lease = True, None
    assert play.until(two) >= TIMING.renew
    assert two.state.epoch == 2, "a follower remembers the epoch that it read"


def test_an_older_lease_from_a_backup_locks_nobody_out() -> None:
    play, one, two = pair()
    backup = play.server.lease
    one.stopped = True
    play.until(two)
    assert backup is not None and two.state.epoch == 2
    play.server.lease = msgspec.structs.replace(backup, version="99")
    play.run(STEP_S)
    assert not two.leads, "it says that another one leads"
    assert play.until(two) <= TIMING.lease + 1
    assert two.state.epoch == 3, "one above its own, which the backup does not know"


def test_a_backup_of_the_leaders_own_lease_is_renewed_under_its_epoch() -> None:
    play, one, _ = pair()
    backup = play.server.lease
    play.run(30)
    assert backup is not None
    play.server.lease = msgspec.structs.replace(backup, version="99")
    play.run(30)
    assert (one.leads, play.epochs) == (True, [1])


def test_a_leader_goes_above_what_workers_report_and_stays_there() -> None:
    play, one, two = pair()
    one.state = report(one.state, 41)
    play.run(30)
    assert (one.leads, play.epochs) == (True, [1, 42])
    one.stopped = True
    play.until(two)
    assert two.state.epoch == 43


def test_a_worker_that_reports_nonsense_does_not_use_the_epochs_up() -> None:
    play, one, _ = pair()
    for _ in range(1000):
        one.state = report(one.state, 2**63 - 1)
        play.run(STEP_S)
    assert one.leads and one.state.epoch < 2**63 - 1000 * MOST_RISE


def test_a_bid_whose_answer_was_lost_is_recognized_and_one_that_was_too_late_is_not() -> None:
    server = Server()
    one, two = Candidate(server, "one"), Candidate(server, "two")
    for each in (one, two):
        each.state = look(each.state, None, 0.0)
    server.now = TIMING.lease
    one.state, lease = bid(one.state, "1", 15.0, TIMING)
    assert server.write(lease) is not None
    two.state, lease = bid(two.state, "2", 15.0, TIMING)
    assert server.write(lease) is None
    Play(one, two, server=server).run(30)
    assert (one.leads, two.leads) == (True, False)


def test_a_leader_whose_writes_are_done_and_not_answered_leads_by_what_it_reads() -> None:
    play, one, two = pair()
    one.loses_answers = True
    play.run(60)
    assert (one.leads, two.leads, play.epochs) == (True, False, [1])


def test_a_foreign_record_with_a_long_duration_is_waited_for() -> None:
    server = Server()
    server.lease = Lease(holder="theirs", epoch=5, acquired="1", renewed="1", duration_s=40, version="1", uid="u")
    one = Candidate(server, "one")
    assert Play(one, server=server).until(one) == pytest.approx(40, abs=1)
    assert (one.state.epoch, server.lease.transitions) == (6, 1)


FAULTS = ("cut", "heal", "stop", "continue", "restart", "delete", "restore", "release", "report", "wait", "wait longer")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 2)), max_size=14))
def test_whatever_happens_never_do_two_lead_and_in_the_end_one_does(faults: list[tuple[str, int]]) -> None:
    server = Server()
    candidates = [Candidate(server, f"{number}", offset_s=1000.0 * number, speed=1 + number / 100) for number in range(3)]
    play, backups = Play(*candidates, server=server), [server.lease]
    for fault, number in faults:
        one = candidates[number]
        backups.append(server.lease)
        match fault:
            case "cut" | "heal":
                one.cut_off = fault == "cut"
            case "stop" | "continue":
                one.stopped = fault == "stop"
            case "restart":
                one.state, one.cut_off, one.stopped = Election(identity=one.state.identity), False, False
            case "delete":
                server.lease = None
            case "restore":
                kept = backups[number % len(backups)]
                server.lease = msgspec.structs.replace(kept, version=f"restored-{len(backups)}") if kept is not None else None
            case "release" if one.leads and one.state.seen == server.lease:
                one.release()
            case "report":
                one.state = report(one.state, 10 * len(backups))
            case "wait" | "wait longer":
                play.run(3 if fault == "wait" else 20)
        play.run(STEP_S)
    for one in candidates:
        one.cut_off = one.stopped = False
    play.run(2 * TIMING.lease + 5)
    assert sum(one.leads for one in candidates) == 1
