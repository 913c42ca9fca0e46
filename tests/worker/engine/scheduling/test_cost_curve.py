# SPDX-License-Identifier: Apache-2.0
"""The batch size of a class adapts to the measured cost of its steps."""

import pytest

from diffusion_worker.engine.scheduling.cost_curve import ENOUGH, FORGET_AFTER, RETRY_AFTER, CostCurve


def run(curve: CostCurve, seconds: list[float] | None = None, *, demand: int = 8, steps: int = 60, per_step: float = 0.0) -> list[int]:
    """Let the curve choose a batch size for the demand, observe the time that it takes, and repeat; return the sizes.

    Seconds of each size come from the list, else from the linear law `1 + batch * per_step`.
    """
    batches = []
    for _ in range(steps):
        batch = curve.batch(demand)
        curve.observe(batch, seconds[batch - 1] if seconds else 1 + batch * per_step)
        batches.append(batch)
    return batches


def test_a_batch_that_makes_images_cheaper_is_kept_at_its_full_size() -> None:
    batches = run(CostCurve(), per_step=0.05)
    assert batches[-1] == 8
    # The cost of smaller batches is measured once, down to the smallest size that could pay.
    assert sum(batch != 8 for batch in batches) <= ENOUGH


def test_where_batching_saves_nothing_requests_run_one_after_another() -> None:
    batches = run(CostCurve(), [float(n) for n in range(1, 9)])
    assert batches[-1] == 1
    assert sum(batch > 1 for batch in batches) <= 2 * ENOUGH


def test_the_batch_stops_growing_where_the_time_per_image_stops_falling() -> None:
    seconds = [1.0, 1.1, 1.3, 1.4, 2.2, 2.6, 3.0, 3.2]
    assert run(CostCurve(), seconds)[-1] == 4


def test_savings_that_are_small_at_each_doubling_still_add_up() -> None:
    per_image = {1: 1.0, 2: 0.96, 4: 0.92, 8: 0.885}
    seconds = [per_image[max(size for size in per_image if size <= n)] * n for n in range(1, 9)]
    assert run(CostCurve(), seconds)[-1] == 8


def test_a_few_slow_steps_do_not_change_the_batch() -> None:
    curve = CostCurve()
    run(curve, per_step=0.05)
    for _ in range(4):
        curve.observe(8, 100.0)
    assert curve.batch(8) == 8


def test_a_batch_that_could_not_be_run_as_one_is_halved_and_tried_again_later() -> None:
    curve = CostCurve()
    run(curve, per_step=0.05)
    curve.split(8)
    batches = run(curve, per_step=0.05, steps=RETRY_AFTER)
    assert (max(batches), batches[-1]) == (4, 4)
    assert curve.batch(8) == 8


def test_what_was_measured_long_ago_is_measured_again() -> None:
    curve = CostCurve()
    run(curve, per_step=0.05)
    batches = run(curve, [float(n) for n in range(1, 9)], steps=2 * FORGET_AFTER)
    assert batches[-1] == 1


@pytest.mark.parametrize(("batch", "seconds"), [(1, 4.0), (4, 4.0), (8, 8.0)])
def test_sizes_that_were_not_measured_are_estimated_from_the_nearest(batch: int, seconds: float) -> None:
    curve = CostCurve()
    curve.observe(4, 4.0)
    assert curve.seconds(batch) == pytest.approx(seconds)
    assert CostCurve().seconds(batch) is None
