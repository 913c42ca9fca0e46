# SPDX-License-Identifier: Apache-2.0
"""A bounded queue: its refusals, and the times at which refused clients should come back."""

import pytest

from diffusion_worker.config import QueueLimits
from diffusion_worker.engine.scheduling.pace import Pace
from diffusion_worker.engine.scheduling.queue_bounds import Bound, Place, QueueBounds, Refusal


def admit(bounds: QueueBounds, seconds: float = 1.0, size_bytes: int = 0, now_s: float = 0.0) -> Place | Refusal:
    return bounds.admit(lambda: seconds, size_bytes, now_s)


def admitted(bounds: QueueBounds, seconds: float = 1.0, size_bytes: int = 0, now_s: float = 0.0) -> Place:
    place = admit(bounds, seconds, size_bytes, now_s)
    assert isinstance(place, Place), place
    return place


def refused(bounds: QueueBounds, seconds: float = 1.0, size_bytes: int = 0, now_s: float = 0.0) -> Refusal:
    refusal = admit(bounds, seconds, size_bytes, now_s)
    assert isinstance(refusal, Refusal)
    return refusal


def test_a_request_over_the_bound_of_requests_is_refused_with_what_was_found() -> None:
    bounds = QueueBounds(QueueLimits(max_queued=2))
    admitted(bounds), admitted(bounds)
    refusal = refused(bounds)
    assert (refusal.bound, refusal.found, refusal.most) == (Bound.REQUESTS, 3, 2)
    assert bounds.waiting == 2


def test_a_request_that_runs_waits_no_more() -> None:
    bounds = QueueBounds(QueueLimits(max_queued=1))
    first = admitted(bounds)
    bounds.start(first, 0.0)
    bounds.start(first, 0.0)
    second = admitted(bounds)
    assert bounds.waiting == 1
    bounds.end(first, 1.0, done=True)
    bounds.end(second, 1.0, done=False)
    assert (bounds.waiting, bounds.left_s) == (0, 0.0)


def test_seconds_and_bytes_are_bounded_and_what_is_over_a_bound_by_itself_has_to_be_alone() -> None:
    bounds = QueueBounds(QueueLimits(max_queued_seconds=10.0, max_queued_bytes=100))
    first = admitted(bounds, seconds=50.0, size_bytes=500)
    assert refused(bounds, seconds=1.0).bound is Bound.SECONDS
    bounds.end(first, 1.0, done=False)
    admitted(bounds, seconds=2.0, size_bytes=60)
    refusal = refused(bounds, seconds=2.0, size_bytes=60)
    assert (refusal.bound, refusal.found, refusal.most) == (Bound.BYTES, 120, 100)
    admitted(bounds, seconds=2.0)  # a request without images takes no bytes
    assert bounds.size_bytes == 60


@pytest.mark.parametrize(
    ("limits", "waits_s"),
    [(QueueLimits(max_queued=2), 12), (QueueLimits(max_queued_seconds=25.0), 12), (QueueLimits(max_queued_bytes=9), 12)],
)
def test_a_refused_client_finds_room_at_its_time(limits: QueueLimits, waits_s: int) -> None:
    bounds = QueueBounds(limits)
    first, _ = admitted(bounds, 10.0, 4), admitted(bounds, 10.0, 4)
    assert refused(bounds, 10.0, 4).retry_after_s == waits_s
    bounds.end(first, 10.0, done=True)
    admitted(bounds, 10.0, 4, now_s=float(waits_s))


def test_the_time_of_a_refused_client_follows_the_measured_pace() -> None:
    bounds = QueueBounds(QueueLimits(max_queued=2))
    now_s = 0.0
    bounds.start(runs := admitted(bounds, 10.0), now_s)
    for _ in range(9):  # each takes twice the expected time
        following = admitted(bounds, 10.0, now_s=now_s)
        now_s += 20.0
        bounds.end(runs, now_s, done=True)
        bounds.start(runs := following, now_s)
    admitted(bounds, 10.0, now_s=now_s), admitted(bounds, 10.0, now_s=now_s)
    assert refused(bounds, 10.0, now_s=now_s).retry_after_s == pytest.approx(23, abs=1)


def test_the_pace_is_the_time_that_passes_for_each_second_of_expected_work() -> None:
    pace = Pace()
    assert pace.ratio == 1.0
    pace.begin(0.0)
    for batch in range(1, 20):
        for _ in range(8):  # a batch ends together
            pace.done(1.0, batch * 16.0)
    assert pace.ratio == pytest.approx(2.0, rel=0.05)
