# SPDX-License-Identifier: Apache-2.0
"""An operator that dies anywhere, or two at once, reach the same end as one that lives, in virtual time.

A first telling of the story, without a death, finds the places where the operator can die.
"""

import random
from collections import Counter

import pytest

from support.operator.story import Teller, Told
from support.sample import sample

# An operator that died forgets these Events before it writes them: a deleted adapter, and a child that another client changed.
MAY_BE_LOST = {"AdapterUnloaded", "Repaired"}
# `make test` takes so many of the places and of the rows of deaths.
PLACES = 8
ROWS = 2
OVERLAPS = 2


async def undisturbed() -> tuple[Told, list[str]]:
    """Run the story with an operator that lives to its end.

    Return the result that all other runs must reach, and the fault points on the way.
    """
    teller = Teller()
    return await teller.tell(), teller.points.passed


def check(told: Told, expected: Told) -> None:
    assert told.wrong == []
    may_be_lost = MAY_BE_LOST if told.deaths else set()
    for end, other in zip(told.ends, expected.ends, strict=False):
        assert end.standing == other.standing
        assert end.pods_made == other.pods_made, "each pod is made once"
        assert end.operations == other.operations, "nothing is done twice by a worker"
        assert not end.events - other.events, "no Event is written twice"
        assert {reason for reason, _ in other.events - end.events} <= may_be_lost, "no Event is lost"


@pytest.mark.slow
async def test_the_operator_may_die_before_and_after_everything_it_does() -> None:
    expected, places = await undisturbed()
    assert expected.wrong == []
    assert len(places) > 100
    assert {place.split()[1] for place in places} == {
        "create", "apply", "patch", "apply_status", "set_labels", "delete", "sleep", "wake", "drain", "put_adapter", "remove_adapter",
    }, "the story does everything that the ports have"  # fmt: skip
    for number, place in sample(list(enumerate(places, start=1)), PLACES):
        told = await Teller(number).tell(to_the_end=False)
        assert told.deaths == [place]
        _check_or_name(told, expected, f"it died at place {number}, {place}")


@pytest.mark.slow
async def test_the_operator_may_die_again_and_again() -> None:
    expected, places = await undisturbed()
    for seed in sample(range(20), ROWS):
        rng = random.Random(seed)
        told = await Teller(*(rng.randint(1, len(places) // 4) for _ in range(8))).tell()
        assert len(told.deaths) > 1
        _check_or_name(told, expected, f"with seed {seed} it died at {told.deaths}")


@pytest.mark.slow
async def test_two_operators_at_once_do_nothing_twice() -> None:
    expected, _ = await undisturbed()
    writes: Counter[int] = Counter()
    for seed in sample(range(20), OVERLAPS):
        told = await Teller(second=random.Random(seed)).tell()
        _check_or_name(told, expected, f"with seed {seed}")
        writes[told.status_writes] += 1
    assert max(writes) <= 2 * expected.status_writes, "each writes what it found once, and neither takes back what the other wrote"


def _check_or_name(told: Told, expected: Told, where: str) -> None:
    try:
        check(told, expected)
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error
