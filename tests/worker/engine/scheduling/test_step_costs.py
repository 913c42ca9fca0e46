# SPDX-License-Identifier: Apache-2.0
"""Estimates of steps for deadlines: measured sizes as they are, others scaled from the nearest, before the first request by the warm-up."""

import pytest

from diffusion_worker.engine.scheduling.request_class import Defaults, RequestClass, class_of
from diffusion_worker.engine.scheduling.step_costs import StepCosts
from diffusion_worker.messages import RequestSpec, TickDone, WarmTick


def spec(side: int) -> RequestSpec:
    return RequestSpec(request_id="a", prompt="p kumquatfen", seed=1, height=side, width=side)


def square(side: int) -> RequestClass:
    return class_of(spec(side), Defaults())


def measured(*steps: tuple[int, float]) -> StepCosts:
    """Return costs that have observed a step of one request for each side and number of seconds."""
    costs = StepCosts()
    for side, seconds in steps:
        costs.observe(square(side), 1, 1, TickDone(1, calls=1, denoise_seconds=seconds))
    return costs


def warmed(side: int, step_s: float, longest_s: float, images: int = 1) -> StepCosts:
    costs = StepCosts()
    costs.warmed_up(square(side), WarmTick(spec(side), images, step_s, longest_s))
    return costs


def test_nothing_is_expected_of_a_step_before_anything_was_measured() -> None:
    assert StepCosts().careful_step_s(square(64), 1) is None
    assert StepCosts().once_s(square(64)) == 0.0


def test_a_measured_size_takes_what_it_took_and_batches_grow_in_proportion() -> None:
    costs = measured((512, 2.0), (1024, 20.0))
    assert costs.careful_step_s(square(512), 1) == 2.0
    assert costs.careful_step_s(square(512), 4) == 8.0


@pytest.mark.parametrize(("side", "seconds"), [(2048, 20.0 * 16), (768, 2.0 * 2.25**2), (256, 2.0)])
def test_another_size_grows_from_the_nearest_smaller_one_by_the_square_of_its_pixels_and_shrinks_below_none(
    side: int, seconds: float
) -> None:
    assert measured((512, 2.0), (1024, 20.0)).careful_step_s(square(side), 1) == pytest.approx(seconds)


def test_the_warm_up_counts_for_its_size_until_requests_were_measured_and_for_each_image_of_a_batch() -> None:
    costs = warmed(512, 6.0, 60.0, images=3)
    assert costs.careful_step_s(square(512), 2) == 4.0
    assert costs.careful_step_s(square(1024), 1) == 2.0 * 16
    costs.observe(square(512), 1, 1, TickDone(1, calls=1, denoise_seconds=0.5))
    assert costs.careful_step_s(square(512), 1) == 0.5
    assert costs.careful_step_s(square(1024), 1) == 0.5 * 16


def test_times_of_the_warm_up_with_its_first_run_of_everything_choose_no_batch_and_no_order() -> None:
    costs = warmed(512, 600.0, 600.0)
    assert costs.step_s(square(512), 1) < 1.0
    assert not costs.has_measured(square(512))


def test_of_several_variants_of_a_size_the_longest_tick_counts() -> None:
    costs = warmed(512, 1.0, 30.0)
    costs.warmed_up(square(512), WarmTick(spec(512), 1, 1.0, 200.0))
    costs.warmed_up(square(512), WarmTick(spec(512), 1, 1.0, 5.0))
    assert costs.once_s(square(512)) == 200.0
    assert costs.once_s(square(1024)) == 200.0 * 16
