# SPDX-License-Identifier: Apache-2.0
"""The election as a pure state machine: transitions on a clock that counts seconds from anywhere.

A process never compares its clock with another's. It trusts a record for as long as its duration after it saw the record change for the
last time. An absent Lease is a record, too: it may have been deleted under a leader.
"""

import msgspec

from diffusion_operator.election.lease import Lease

MOST_RISE = 2**32
"""A report raises the epoch by so much at most. A tenant's worker may report anything, and must not use the numbers up."""


class Timing(msgspec.Struct, frozen=True):
    """Durations of the election in seconds, as the components of Kubernetes have them."""

    lease: float = 15.0
    """A record that does not change for so long has no leader."""
    renew: float = 10.0
    """A leader writes for so long after its last renewal."""
    retry: float = 2.0
    """The longest pause between two looks or renewals."""
    call: float = 5.0


class Election(msgspec.Struct, frozen=True):
    """The election as one candidate knows it. A transition returns another state and changes none."""

    identity: str
    seen: Lease | None = None
    seen_at: float | None = None
    """The time at which `seen` was new. None before the first look."""
    acquired: str = ""
    """`acquireTime` of this process's last attempt. It tells this process from another one of the same identity."""
    sent: str = ""
    """`renewTime` of the last bid, by which it is recognized, also where its answer was lost."""
    sent_at: float = 0.0
    renewed_at: float | None = None
    """The time at which the last bid was sent that succeeded. None for a follower."""
    epoch: int = 0
    """The epoch of that renewal."""
    highest: int = 0
    """The highest epoch that a Lease had or a worker reported."""

    @property
    def held(self) -> bool:
        """Return whether the Lease that was seen last is this process's."""
        return self.seen is not None and self.seen.holder == self.identity and self.seen.acquired == self.acquired

    def leads(self, now: float, timing: Timing) -> bool:
        return self.renewed_at is not None and now - self.renewed_at < timing.renew


def look(state: Election, lease: Lease | None, now: float) -> Election:
    """Return the state after a look at the Lease (None: it is missing), or after the answer to a bid.

    A Lease of another holder ends this one's lead at once; a missing Lease does not.
    A bid that is found in it has succeeded, and the lead counts from the time at which it was sent.
    """
    changed = state.seen_at is None or _record(lease) != _record(state.seen)
    after = msgspec.structs.replace(
        state,
        seen=lease,
        seen_at=now if changed else state.seen_at,
        highest=max(state.highest, lease.epoch if lease is not None else 0),
    )
    if lease is not None and not after.held:
        return msgspec.structs.replace(after, renewed_at=None)
    if lease is not None and lease.renewed == state.sent:
        return msgspec.structs.replace(after, renewed_at=state.sent_at, epoch=lease.epoch)
    return after


def report(state: Election, epoch: int) -> Election:
    """Return the state after a worker reported an epoch that it has seen: the next bid goes above a higher one.

    A report raises the highest epoch by 2**32 at most.
    """
    return msgspec.structs.replace(state, highest=max(state.highest, min(epoch, state.highest + MOST_RISE)))


def due_s(state: Election, now: float, timing: Timing) -> float:
    """Return the seconds until the Lease may be taken or renewed; 0 for now."""
    if state.seen_at is None:
        return 0.0
    if state.seen is None:
        return 0.0 if state.leads(now, timing) else max(0.0, state.seen_at + timing.lease - now)
    # A container that was started again in its pod goes on at once: the process before it is dead.
    again = state.seen.holder == state.identity and not state.acquired
    # A record from a backup says nothing of the leader, who is still there.
    given_up = not state.seen.holder and state.seen.epoch >= state.highest
    if state.held or again or given_up:
        return 0.0
    return max(0.0, state.seen_at + max(timing.lease, state.seen.duration_s) - now)


def bid(state: Election, wall: str, now: float, timing: Timing) -> tuple[Election, Lease]:
    """Return the state that knows of the attempt, and the Lease to write. `wall` is the time for people, and unique.

    A renewal keeps its epoch, unless a higher one was seen. Any other bid has an epoch above all that were seen.
    """
    seen = state.seen
    renews = state.held and 0 < state.epoch >= state.highest
    lease = Lease(
        holder=state.identity,
        epoch=state.epoch if renews else state.highest + 1,
        acquired=state.acquired if state.held else wall,
        renewed=wall,
        duration_s=round(timing.lease),
        transitions=0 if seen is None else seen.transitions + (seen.holder != state.identity),
        version=seen.version if seen is not None else "",
        uid=seen.uid if seen is not None else "",
    )
    return msgspec.structs.replace(state, acquired=lease.acquired, sent=wall, sent_at=now), lease


def give_up(state: Election, wall: str) -> tuple[Election, Lease | None]:
    """Return the state of a follower, and the Lease to write, without a holder; None instead if this process does not hold it."""
    lease = msgspec.structs.replace(state.seen, holder="", renewed=wall) if state.seen is not None and state.held else None
    return msgspec.structs.replace(state, renewed_at=None), lease


def _record(lease: Lease | None) -> object:
    return lease.record if lease is not None else None
