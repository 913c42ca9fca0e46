# SPDX-License-Identifier: Apache-2.0
"""A sample of the configurations of `make soak`, with a fixed seed: loaded or refused as by peft, at no cost to others."""

from pathlib import Path

import pytest

from support.lora.hostile_configurations import BASE, ORDINARY, fits
from support.soak.configurations import put_configurations
from support.worker.process import WorkerProcess

# A busy machine may take minutes to start a worker, besides the time of the sample.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_peft_finds_that_ordinary_patterns_fit_and_that_hostile_ones_take_for_ever() -> None:
    assert [fits(BASE | {"target_modules": pattern}) for pattern in ORDINARY].count(False) == 2
    assert fits(BASE | {"target_modules": "(.*)*!"}) is False
    assert fits(BASE | {"rank_pattern": {"to_q": 4}}) is False


def test_configurations_are_loaded_or_refused_as_peft_would_and_cost_others_nothing(worker: WorkerProcess, tmp_path: Path) -> None:
    outcome = put_configurations(worker, tmp_path, 8, seed=1, limit_s=600.0)
    assert outcome.wrong == []
    assert outcome.done == 8 and outcome.loaded and outcome.refused and outcome.images
