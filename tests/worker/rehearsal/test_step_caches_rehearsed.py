# SPDX-License-Identifier: Apache-2.0
"""Step caches on the rehearsal's device, for requests of each quality in one batch.

Each request gets the CPU's result, as many rows are skipped as there, and steady steps wait for nothing but a cache's own rule.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from diffusion_worker.config import StepCache
from diffusion_worker.messages import Tick
from diffusion_worker.runner.step_cache import first_block
from support.families.rig.all import FAMILIES
from support.families.rig.family import Family
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.rehearsal.allowed import CACHE_RULES
from support.rehearsal.fake_cuda import rehearse
from support.rehearsal.fake_tensor import inner_of
from support.rehearsal.family_trial import METER, TOLERANCE, RehearsedRig
from support.sample import sample

pytestmark = pytest.mark.slow
STEPS = 7
STEADY = range(2, STEPS - 1)
# Two requests of the quality `medium`, one of `high` and one of `max`.
QUALITIES = (
    Asked(1, STEPS, 5.0, accelerated=True),
    Asked(2, STEPS, 3.0, accelerated=True),
    Asked(3, STEPS, 7.0),
    Asked(4, STEPS, 4.0, accelerated=True, exact=True),
)
ACCELERATED = range(2)
BY_NAME = {family.name: family for family in FAMILIES}
# A family whose guidance is rows of a call, one with a call for each half, and the only one with magnitudes.
CASES: dict[StepCache, Family] = {
    StepCache.FIRST_BLOCK: BY_NAME["StableDiffusion3Pipeline"],
    StepCache.TAYLOR_SEER: BY_NAME["FluxPipeline (true guidance)"],
    StepCache.MAG_CACHE: BY_NAME["FluxPipeline"],
}
every_kind = pytest.mark.parametrize("kind", sample(list(CASES), 1))


@dataclass
class Rehearsed:
    """The outcome of a batch on the device: results, and of each tick the rows that were skipped and all rows.

    Waits are those of each steady tick, by function. Copies are those of steady ticks, races those of all.
    """

    results: list[torch.Tensor] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    waits: list[Counter[str]] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)


def _on_the_device(family: Family, requests: tuple[Asked, ...], **config: object) -> Rehearsed:
    found = Rehearsed()
    with rehearse() as rehearsal:
        rig = RehearsedRig(family, rehearsal, **config)
        records = rehearsal.records

        def note(tick: Tick) -> None:
            if tick.number in STEADY:
                waits: Counter[str] = Counter()
                for cause, count in records.waits.items():
                    waits[cause.function] += count
                found.waits.append(waits)
                found.copies += map(str, records.copies)
            found.races += records.races
            records.clear()

        rig.after_tick = note
        found.results = [inner_of(result) for result in rig.together(*requests)]
        found.rows = rig.rows
    return found


@cache
def _both(kind: StepCache) -> tuple[FamilyRig, list[torch.Tensor], Rehearsed]:
    """Run requests of each quality with a step cache: return the CPU's rig, its results, and the outcome on the device."""
    with pytest.MonkeyPatch.context() as patch:
        # With it each of the two requests skips some of the few steps, and not the same ones.
        patch.setattr(first_block, "THRESHOLD", 0.4)
        rig = FamilyRig(CASES[kind], step_cache=kind)
        return rig, rig.together(*QUALITIES), _on_the_device(CASES[kind], QUALITIES, step_cache=kind)


@every_kind
def test_requests_of_each_quality_get_what_the_cpu_gives_with_the_cache_and_skip_as_much(kind: StepCache) -> None:
    rig, truth, rehearsed = _both(kind)
    assert all(apart(one, other) <= TOLERANCE for one, other in zip(rehearsed.results, truth, strict=True))
    assert rehearsed.rows == rig.rows
    skipped, rows = map(sum, zip(*rehearsed.rows, strict=True))
    assert 0 < skipped < rows * len(ACCELERATED) / len(QUALITIES)
    assert not rehearsed.races


@every_kind
def test_a_request_of_high_quality_gets_what_a_pipeline_without_a_cache_makes_and_others_do_not(kind: StepCache) -> None:
    rig, _, rehearsed = _both(kind)
    for number, asked in enumerate(QUALITIES):
        distance = apart(rehearsed.results[number], rig.alone(asked))
        assert distance > 10 * TOLERANCE if number in ACCELERATED else distance <= TOLERANCE


@every_kind
def test_steady_steps_with_a_cache_wait_for_its_rule_alone_once_for_each_request_that_may_skip(kind: StepCache) -> None:
    *_, rehearsed = _both(kind)
    assert len(rehearsed.waits) == len(STEADY)
    skipped = [rehearsed.rows[number][0] for number in STEADY]
    assert kind is not StepCache.FIRST_BLOCK or {2, 4} <= set(skipped), "in a step one of them skips, in another both do"
    for waits in rehearsed.waits:
        del waits[METER]
        assert waits == dict.fromkeys(CACHE_RULES.get(kind, {}), len(ACCELERATED))
    assert not rehearsed.copies
