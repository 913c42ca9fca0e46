# SPDX-License-Identifier: Apache-2.0
"""A variant of each file of families on the rehearsal's device, through the model runner.

Results are those of the CPU, nothing is used before it is there, and steady steps wait for nothing but what is allowed. `make soak` has all
variants.
"""

import importlib
import random
from collections import Counter
from pathlib import Path

import pytest

from support.families.rig.all import FAMILIES
from support.families.rig.family import Family
from support.rehearsal.allowed import ALLOWED, faults_of, stale, unexpected
from support.rehearsal.family_trial import BEYOND, METER, Trial, try_family
from support.rehearsal.records import Cause

pytestmark = pytest.mark.slow
ROOMS = Path(importlib.import_module("support.families.rig.all").__file__ or "").parents[1]
SEED = 23


def _a_variant_of_each_file() -> list[Family]:
    chosen = []
    for path in sorted(path for room in ("images", "videos") for path in (ROOMS / room).glob("*.py")):
        families = getattr(importlib.import_module(f"support.families.{path.parent.name}.{path.stem}"), "FAMILIES", [])
        families = [family for family in families if family.name not in BEYOND]
        chosen += random.Random(f"{SEED} {path.stem}").sample(families, min(1, len(families)))
    return chosen


@pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in _a_variant_of_each_file()])
def test_a_family_makes_the_same_on_the_device_and_waits_for_nothing_that_is_not_allowed(family: Family) -> None:
    trial = try_family(family)
    assert trial.ticks == 3
    assert faults_of(trial) == [], "\n".join(trial.causes())


def _trial(*functions: str) -> Trial:
    return Trial("a family", 1e-6, ticks=1, waits=Counter(Cause("item", function, "file.py:1") for function in functions))


def test_a_wait_that_is_not_allowed_is_a_fault_and_so_is_an_entry_without_a_wait() -> None:
    allowed = {"Scheduler.step": "it asks for a number", METER: "the end of a tick"}
    trial = _trial("Scheduler.step", METER)
    assert unexpected(trial, allowed) == [] and faults_of(trial, allowed) == [] and not trial.is_quiet
    assert unexpected(_trial("Model.forward"), allowed) == ["item by Model.forward (file.py:1)"]
    assert stale([trial], allowed) == [] and stale([_trial(METER)], allowed) == ["Scheduler.step"]
    assert _trial(METER).is_quiet


def test_a_result_that_differs_and_a_race_are_faults() -> None:
    trial = Trial("a family", 0.5, races=["stream 0 reads early"])
    assert len(faults_of(trial, {})) == 2


def test_each_entry_has_a_reason() -> None:
    assert ALLOWED and all(len(reason) > 10 for reason in ALLOWED.values())
    assert len(FAMILIES) > 100 and len(BEYOND) == 1
