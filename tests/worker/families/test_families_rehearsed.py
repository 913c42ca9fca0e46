# SPDX-License-Identifier: Apache-2.0
"""Variants of four files of families on the rehearsal's device, through the model runner.

Results are those of the CPU, nothing is used before it is there, and steady steps wait for nothing but what is allowed. `make soak` has all
variants.
"""

import functools
from collections import Counter

import pytest

from support.families.rig.all import BY_FILE, FAMILIES
from support.rehearsal.allowed import ALLOWED, faults_of, stale, unexpected
from support.rehearsal.family_trial import BEYOND, METER, Trial, try_family
from support.rehearsal.records import Cause
from support.sample import WHOLE, sample

pytestmark = pytest.mark.slow
FILES = [[family for family in families if family.name not in BEYOND] for families in BY_FILE.values()]
SAMPLE = [family for families in sample(FILES, 4) for family in sample(families, 1)]


@functools.cache
def _trial_of(name: str) -> Trial:
    return try_family(next(family for family in SAMPLE if family.name == name))


@pytest.mark.parametrize("name", [family.name for family in SAMPLE])
def test_a_family_makes_the_same_on_the_device_and_waits_for_nothing_that_is_not_allowed(name: str) -> None:
    trial = _trial_of(name)
    assert trial.ticks == 3
    assert faults_of(trial) == [], "\n".join(trial.causes())


@pytest.mark.skipif(not WHOLE, reason="`make soak` runs all variants, of which each allowed wait needs one")
def test_every_wait_that_is_allowed_occurs_in_a_family() -> None:
    assert stale([_trial_of(family.name) for family in SAMPLE]) == []


def _trial(*functions: str) -> Trial:
    return Trial("a family", 1e-6, ticks=1, waits=Counter(Cause("item", function, "file.py:1") for function in functions))


def test_a_wait_that_is_not_allowed_is_a_fault_and_so_is_an_entry_without_a_wait() -> None:
    allowed = {"Scheduler.step": "it asks for a number", METER: "the end of a tick"}
    trial = _trial("Scheduler.step", METER)
    assert unexpected(trial, allowed) == [] and faults_of(trial, allowed) == []
    assert unexpected(_trial("Model.forward"), allowed) == ["item by Model.forward (file.py:1)"]
    assert stale([trial], allowed) == [] and stale([_trial(METER)], allowed) == ["Scheduler.step"]


def test_a_result_that_differs_and_a_race_are_faults() -> None:
    trial = Trial("a family", 0.5, races=["stream 0 reads early"])
    assert len(faults_of(trial, {})) == 2


def test_each_entry_has_a_reason() -> None:
    assert ALLOWED and all(len(reason) > 10 for reason in ALLOWED.values())
    assert len(FAMILIES) > 100 and len(BEYOND) == 1
