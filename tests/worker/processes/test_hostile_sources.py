# SPDX-License-Identifier: Apache-2.0
"""A sample of the hostile sources of `make soak`, with a fixed seed: refused or loaded as expected, at no cost to others (fault
104).
"""

import random
from pathlib import Path

import pytest

from support.soak.sources import run_sources
from support.sources.hostile import Lair
from support.sources.servers import SourceServer


def test_sources_are_the_same_from_the_same_seed_and_have_all_kinds(tmp_path: Path) -> None:
    drawn = []
    for name in ("one", "again"):
        server = SourceServer()
        lair, rng = Lair(tmp_path / name, server), random.Random(1)
        hostile = [lair.draw(rng) for _ in range(200)]
        drawn.append([(each.kind, each.codes, each.loads) for each in hostile])
        server.server_close()
    assert drawn[0] == drawn[1]
    kinds = {kind.partition(":")[0].partition(" to")[0].removesuffix(" bucket") for kind, _, _ in drawn[0]}
    assert kinds == {"address", "rebinding", "redirect", "badly served", "no adapter", "hub", "path", "claim", "swapped", "ordinary"}


# A busy machine may take minutes to start a worker, besides the time of the sample.
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_hostile_sources_are_refused_in_time_and_cost_others_nothing(short_path: Path) -> None:
    outcome = run_sources(short_path, 40, seed=1, limit_s=200.0)
    assert outcome.wrong == []
    assert outcome.done >= 12 and outcome.loaded and outcome.images and len(outcome.refused) >= 3
