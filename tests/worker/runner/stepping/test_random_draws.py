# SPDX-License-Identifier: Apache-2.0
"""A seed gives one image, also where a model draws numbers inside its calls: alone, in company, made again, and on several ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from diffusion_worker.runner.model_call.prompt_cache import PromptCache
from diffusion_worker.runner.stepping.request_state import mark_step
from diffusion_worker.runner.stepping.stepper import Stepper
from diffusion_worker.runner.stepping.suspending_module import SuspendingModule
from support.families.images.glm_prior import drawing_family
from support.families.rig.family import Family, build_seeded
from support.families.rig.family_rig import Asked, FamilyRig, apart
from support.families.videos import ltx
from support.runner import rank_processes
from support.runner.merged_calls import SEEDS, STEPS, Drawing, body, counted, serve
from support.runner.rig import OneRank

ROWS, WIDTH = 2, 2


def of_diffusers(seed: int) -> torch.Tensor:
    """Return the states that a plain loop of STEPS calls of the model makes after `torch.manual_seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        states, model = torch.zeros(ROWS, WIDTH), Drawing()
        for _ in range(STEPS):
            states = model(states)
    return states


def drawing() -> Callable[[], torch.Tensor]:
    return body(Drawing(), rows=ROWS, width=WIDTH)


def test_a_model_that_draws_gives_the_image_of_the_seed_alone_and_in_company() -> None:
    alone = serve(OneRank(), {"a": drawing()}, **SEEDS).images["a"]
    assert torch.equal(alone, of_diffusers(SEEDS["a"]))
    shared = Drawing()
    together = serve(OneRank(), {name: body(shared, rows=ROWS, width=WIDTH) for name in SEEDS}, **SEEDS).images
    assert all(torch.equal(together[name], of_diffusers(seed)) for name, seed in SEEDS.items())


def test_calls_that_draw_are_merged_once_and_then_kept_alone() -> None:
    rank, model = OneRank(), Drawing()
    made, stepper = counted(rank), Stepper({}, rank, None)  # type: ignore[arg-type]
    serve(rank, {name: body(model) for name in SEEDS}, stepper=stepper, **SEEDS)
    assert made == [3] + [1] * 3 * STEPS
    made.clear()
    # A size that was not seen before draws as well.
    serve(rank, {name: body(model, width=5) for name in SEEDS}, stepper=stepper, **SEEDS)
    assert made == [1] * 3 * STEPS


def test_a_class_whose_call_drew_alone_is_not_merged_at_all() -> None:
    rank, model = OneRank(), Drawing()
    made, stepper = counted(rank), Stepper({}, rank, None)  # type: ignore[arg-type]
    serve(rank, {"a": body(model)}, stepper=stepper)
    serve(rank, {name: body(model) for name in SEEDS}, stepper=stepper, **SEEDS)
    assert set(made) == {1}


def test_a_request_that_is_made_again_by_itself_draws_the_same_numbers() -> None:
    model: Any = SuspendingModule("transformer", Drawing())

    def run() -> torch.Tensor:
        states = torch.zeros(ROWS, WIDTH)
        for step in range(STEPS):
            states = model(states)
            mark_step(STEPS)
            if step == 0:
                model.requires_grad_(True)
        return states

    first = serve(OneRank(), {"a": run, "b": drawing()}, **SEEDS)
    assert list(first.replays) == ["a"]
    vars(run).update(whole=True)
    again = serve(OneRank(), {"a": run}, **SEEDS)
    assert torch.equal(again.images["a"].detach(), of_diffusers(SEEDS["a"]))


def test_a_failed_attempt_takes_no_numbers_from_the_next_one() -> None:
    rank, failed = OneRank(), [False]
    model = Drawing()

    class Once(Drawing):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            made = model(hidden_states)
            if not failed[0]:
                failed[0] = True
                raise RuntimeError("once")
            return made

    def run() -> torch.Tensor:
        stand_in: Any = SuspendingModule("transformer", Once())
        states = torch.zeros(ROWS, WIDTH)
        for _ in range(STEPS):
            try:
                states = stand_in(states)
            except Exception:
                states = stand_in(states)
            mark_step(STEPS)
        return states

    assert torch.equal(serve(rank, {"a": run}, **SEEDS).images["a"], of_diffusers(SEEDS["a"]))


def test_what_a_text_encoder_draws_is_no_other_requests_answer() -> None:
    class Sampling(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return torch.rand(input_ids.shape)

    encoder: Any = SuspendingModule("text_encoder", Sampling())
    prompts, rank = PromptCache(8), OneRank()
    bodies = dict.fromkeys(SEEDS, lambda: encoder(input_ids=torch.ones(1, 4, dtype=torch.int64)))
    images = serve(rank, bodies, stepper=Stepper({}, rank, prompts), **SEEDS).images  # type: ignore[arg-type]
    assert len({tuple(image.reshape(-1).tolist()) for image in images.values()}) == len(SEEDS)
    assert prompts.stats().size == 0


def noisy_ltx() -> Family:
    """Return the family of LTX with a decoder that draws noise and adds it."""
    make = partial(ltx.pipeline, "LTXPipeline", vae=partial(ltx.vae, decoder_inject_noise=(True,) * 5))
    return replace(ltx.FAMILIES[0], build=build_seeded(make))


@pytest.mark.parametrize("make", [noisy_ltx, drawing_family])
def test_a_family_that_draws_in_its_calls_gives_the_image_of_diffusers_in_company(make: Callable[[], Family]) -> None:
    rig = FamilyRig(make(), torch.float64)
    requests = Asked(1, 2), Asked(2, 2)
    for _ in range(2):
        # Without the check of the modules' attributes: GLM-Image's language model keeps the positions of its last text.
        results, errors = rig.finish(requests, (0, 0))
        assert not errors
        for number, asked in enumerate(requests):
            assert apart(results[str(number)], rig.alone(asked)) <= rig.family.tolerance


@pytest.mark.slow
def test_two_ranks_draw_the_numbers_of_one() -> None:
    first, second = rank_processes.run("support.runner.merged_calls:draws")
    assert first == second
    assert first["alone"] == first["together"] == of_diffusers(SEEDS["a"]).tolist()
    assert first["calls"][:1] == [3]
