# SPDX-License-Identifier: Apache-2.0
"""A sample of the hostile images of `make soak`, with a fixed seed: refused or made into images, at no cost to others."""

from random import Random

import pytest

from support.encoding.hostile_images import KINDS, draw
from support.encoding.soak import send_images
from support.worker.process import WorkerProcess


def test_files_are_the_same_from_the_same_seed_and_of_all_kinds() -> None:
    drawn = [[draw(rng) for _ in range(120)] for rng in (Random(1), Random(1))]
    assert drawn[0] == drawn[1]
    assert {each.kind for each in drawn[0]} == KINDS.keys()


@pytest.mark.slow
def test_hostile_images_are_refused_or_read_in_time_and_cost_others_nothing(worker: WorkerProcess) -> None:
    outcome = send_images(worker, 12, seed=1, limit_s=600.0)
    assert outcome.wrong == []
    assert outcome.done == 12 and outcome.made and outcome.images and outcome.refused["InvalidRequest"]
