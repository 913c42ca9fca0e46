# SPDX-License-Identifier: Apache-2.0
"""Step caches on the digits model: each request skips steps by its own memory, in any company."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_worker.config import StepCache
from diffusion_worker.engine.scheduling.request_class import Defaults, class_of
from diffusion_worker.errors import ConfigError
from diffusion_worker.messages import RequestSpec, Tick
from diffusion_worker.runner.loading.step_cache import make_step_cache
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.step_cache import first_block
from diffusion_worker.runner.step_cache.cache import MixedVerdicts
from diffusion_worker.runner.step_cache.hooked_run import CacheVerdict
from diffusion_worker.runner.stepping.step_output import StepOutput
from support.families.rig.all import FAMILIES
from support.runner.digit_judge import DIGIT_WORDS, HUES, judge
from support.runner.rig import Images, OneRank, RunnerRig, levels_apart, request

BY_NAME = {family.name: family for family in FAMILIES}


class CachedRig(RunnerRig):
    """A runner with a step cache of this kind; `rows` counts the rows of the last run, and `skipped` those that the cache saved."""

    def __init__(self, kind: StepCache) -> None:
        super().__init__(step_cache=kind, prompt_cache_size=0)
        self._tick = self.runner.execute_stepwise
        self.runner.execute_stepwise = self._counted  # type: ignore[method-assign,assignment]
        self.rows = self.skipped = 0

    def _counted(self, tick: Tick, frames: Sequence[bytes] = ()) -> StepOutput:
        output = self._tick(tick, frames)
        self.rows += output.rows
        self.skipped += output.skipped
        return output

    def images(self, *requests: RequestSpec, joining: list[int] | None = None) -> Images:
        """Run requests, which must succeed, and return their images; the counts begin again with this run."""
        self.rows = self.skipped = 0
        images, errors = self.run(*requests, joining=joining)
        assert not errors, errors
        return images


class Rigs(dict[StepCache, CachedRig]):
    """Rigs by kind, each made at its first use."""

    def __missing__(self, kind: StepCache) -> CachedRig:
        self[kind] = CachedRig(kind)
        return self[kind]


@pytest.fixture(scope="module")
def rigs() -> Iterator[dict[StepCache, CachedRig]]:
    """Provide rigs by kind of step cache, each made when it is first used.

    Tests make few steps, so the first-block cache needs a higher threshold than usual to save about half of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_block, "THRESHOLD", 0.3)
        yield Rigs()


@pytest.fixture(scope="module")
def plain() -> RunnerRig:
    return RunnerRig(prompt_cache_size=0)


# Half of the digits are enough, and take half the time.
DIGITS = list(enumerate(DIGIT_WORDS))[::2]
every_kind = pytest.mark.parametrize("kind", [StepCache.FIRST_BLOCK, pytest.param(StepCache.TAYLOR_SEER, marks=pytest.mark.slow)])

ONE = request("one", steps=8, guidance_scale=3.0, accelerated=True)


@every_kind
def test_what_a_request_holds_between_steps_is_reported_with_the_values_of_its_step_cache(
    rigs: dict[StepCache, CachedRig], plain: RunnerRig, kind: StepCache
) -> None:
    held = {}
    for name, rig in (("cached", rigs[kind]), ("plain", plain)):
        output = rig.runner.execute_stepwise(Tick(0, [ONE]))
        assert [progress.request_id for progress in output.progress] == ["one"]
        held[name] = output.progress[0].held_bytes
        rig.runner.drop_all()
    # Guidance gives two rows of four channels of 16 x 16 latents, with float32, and their embeddings.
    latents = 2 * 4 * 16 * 16 * 4
    assert latents < held["plain"] < 100 * latents
    # The cache keeps at least the change of all tokens by the blocks.
    assert held["cached"] > held["plain"] + latents


OTHER = request("other", prompt="a blue digit two", seed=5, steps=11, guidance_scale=4.0, accelerated=True)
THIRD = request("third", prompt="a green digit four", seed=9, steps=7, guidance_scale=2.0, accelerated=True)


def slow(spec: RequestSpec) -> RequestSpec:
    return msgspec.structs.replace(spec, accelerated=False)


@pytest.mark.slow
@every_kind
def test_an_accelerated_request_gets_in_company_what_it_gets_alone_and_skips_as_much(
    rigs: dict[StepCache, CachedRig], kind: StepCache
) -> None:
    rig = rigs[kind]
    alone: Images = {}
    skipped = 0
    for spec in (ONE, OTHER, THIRD):
        alone |= rig.images(spec)
        assert 0 < rig.skipped < rig.rows
        skipped += rig.skipped
    together = rig.images(ONE, OTHER, THIRD, slow(msgspec.structs.replace(ONE, request_id="slow")), joining=[0, 1, 3, 2])
    assert rig.skipped == skipped
    for name, image in alone.items():
        assert levels_apart(together[name], image) <= 1
    assert levels_apart(alone["one"], together["slow"]) > 1


@every_kind
def test_requests_that_skip_alike_share_their_calls(rigs: dict[StepCache, CachedRig], kind: StepCache) -> None:
    rig = rigs[kind]
    twins = [msgspec.structs.replace(ONE, request_id=str(number)) for number in range(3)]
    rig.images(*twins)
    assert len(rig.denoiser_calls()) == ONE.steps
    assert 0 < rig.skipped < rig.rows == 3 * 2 * 8


def test_quality_is_part_of_the_class_by_which_requests_share_a_tick() -> None:
    assert class_of(ONE, Defaults()) != class_of(slow(ONE), Defaults())
    assert class_of(ONE, Defaults()) == class_of(msgspec.structs.replace(ONE, request_id="other", seed=3), Defaults())


@pytest.mark.slow
@every_kind
def test_a_shared_call_that_fails_is_made_for_each_request_by_itself(rigs: dict[StepCache, CachedRig], kind: StepCache) -> None:
    rig = rigs[kind]
    twin = msgspec.structs.replace(ONE, request_id="twin", seed=8)
    alone = rig.images(ONE) | rig.images(twin)
    failed = []

    def before(call: ModelCall) -> None:
        if call.component == "transformer" and call.rows > 2 and len(failed) < 5:
            failed.append(call)
            raise torch.OutOfMemoryError("no such luck")

    rig.parallel.before = before
    try:
        together = rig.images(ONE, twin)
    finally:
        rig.parallel.before = lambda call: None
    assert len(failed) == 5
    for name, image in alone.items():
        assert levels_apart(together[name], image) <= 1


@pytest.mark.slow
@every_kind
def test_an_exact_request_and_one_that_is_not_accelerated_are_bit_equal_to_a_worker_without_a_cache(
    rigs: dict[StepCache, CachedRig], plain: RunnerRig, kind: StepCache
) -> None:
    rig = rigs[kind]
    expected, _ = plain.run(slow(ONE))
    np.testing.assert_array_equal(rig.images(slow(ONE))["one"], expected["one"])
    exact = msgspec.structs.replace(ONE, exact=True)
    np.testing.assert_array_equal(rig.images(exact, OTHER)["one"], expected["one"])


@pytest.mark.slow
def test_with_a_threshold_of_zero_nothing_is_skipped_and_all_is_as_without(plain: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_block, "THRESHOLD", 0.0)
    rig = CachedRig(StepCache.FIRST_BLOCK)
    expected, _ = plain.run(slow(ONE))
    np.testing.assert_array_equal(rig.images(ONE)["one"], expected["one"])
    assert rig.skipped == 0


def test_what_a_request_remembers_goes_with_it_whether_it_ends_or_is_dropped(rigs: dict[StepCache, CachedRig]) -> None:
    rig = rigs[StepCache.FIRST_BLOCK].runner
    gc.disable()
    try:
        for ends in (True, False):
            rig.execute_stepwise(Tick(0, [ONE]))
            remembered = [weakref.ref(branch) for branch in rig._states["one"].branches.values()]
            assert len(remembered) == 1
            if ends:
                while "one" not in rig.execute_stepwise(Tick(1)).images:
                    pass
            else:
                rig.drop_all()
            assert [reference() for reference in remembered] == [None]
    finally:
        gc.enable()


def test_no_two_requests_and_no_two_branches_of_one_share_what_they_remember(rigs: dict[StepCache, CachedRig]) -> None:
    rig = rigs[StepCache.FIRST_BLOCK].runner
    rig.execute_stepwise(Tick(0, [ONE, OTHER]))
    try:
        found = [branch.recall("tail") for name in ("one", "other") for branch in rig._states[name].branches.values()]
        first, second = (tensors[0] for tensors in found if tensors is not None and tensors[0] is not None)
        assert first.untyped_storage().nbytes() == first.numel() * first.element_size()
        assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    finally:
        rig.drop_all()


def test_a_branch_is_told_by_context_number_and_shape(rigs: dict[StepCache, CachedRig]) -> None:
    rig = rigs[StepCache.FIRST_BLOCK].runner
    rig.execute_stepwise(Tick(0, [ONE]))
    try:
        state = rig._states["one"]
        call = rigs[StepCache.FIRST_BLOCK].denoiser_calls()[-1]
        kinds = [state.kind_of(call), state.kind_of(call), state.kind_of(msgspec.structs.replace(call, context="uncond"))]
        wider = {**call.arguments, "hidden_states": torch.zeros(4, 4, 8, 8)}
        kinds.append(state.kind_of(msgspec.structs.replace(call, arguments=wider)))
        assert len(set(kinds)) == 4
    finally:
        rig.drop_all()


def test_if_ranks_differ_the_request_computes_on_all() -> None:
    asked: list[list[bool]] = []

    class TwoRanks(OneRank):
        world = 2

        def any_of(self, flags: list[bool]) -> list[bool]:
            asked.append(flags)
            return [True, flags[1]]

    class Always:
        verdict = CacheVerdict.OPEN

        def decide(self, kept: object) -> CacheVerdict:
            return CacheVerdict.SKIP

        def keep(self, kept: object) -> None:
            pass

    pipeline = BY_NAME["StableDiffusion3Pipeline"].build()
    cache = make_step_cache(StepCache.FIRST_BLOCK, pipeline, {"transformer": pipeline.transformer}, TwoRanks())  # type: ignore[arg-type]
    assert cache is not None
    branches = [Always(), Always()]
    with pytest.raises(MixedVerdicts):
        cache.plan("transformer", branches, [1, 1]).keep([(None, {}), (None, {})])  # type: ignore[arg-type]
    assert asked == [[False, False]]
    assert [branch.verdict for branch in branches] == [CacheVerdict.COMPUTE, CacheVerdict.SKIP]


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        (StepCache.FIRST_BLOCK, "StableDiffusionPipeline", "UNet2DConditionModel is not supported: it has 0 transformer blocks"),
        (StepCache.FIRST_BLOCK, "StableDiffusion3ControlNetPipeline", "a ControlNet adds to the states after each block"),
        (StepCache.FIRST_BLOCK, "Flux2Pipeline", "no test has shown that it makes right images with this cache"),
        (StepCache.TAYLOR_SEER, "StableDiffusionPipeline", "it has no attention layers by the names"),
        (
            StepCache.MAG_CACHE,
            "StableDiffusion3Pipeline",
            "diffusers has no magnitudes of its residuals",
        ),
    ],
)
def test_a_model_that_a_kind_does_not_fit_is_refused_at_start_by_name_with_what_is_supported(kind: StepCache, name: str, why: str) -> None:
    pipeline = BY_NAME[name].build()
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    with pytest.raises(ConfigError) as refused:
        make_step_cache(kind, pipeline, modules, OneRank())  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"--step-cache {kind}: {name} with ")
    assert why in str(refused.value)
    assert "supported: " in str(refused.value)
    assert "FluxTransformer2DModel" in str(refused.value)


@pytest.mark.slow
def test_digits_are_still_recognised_at_the_default_threshold() -> None:
    rig = CachedRig(StepCache.FIRST_BLOCK)
    colours = [list(HUES)[digit % len(HUES)] for digit in range(10)]
    shape: dict[str, Any] = {"height": 64, "width": 64, "steps": 20, "guidance_scale": 4.0, "accelerated": True}
    specs = [request(word, prompt=f"a {colours[digit]} digit {word}", seed=100 + digit, **shape) for digit, word in DIGITS]
    images = rig.images(*specs)
    assert rig.skipped > 0
    for digit, word in DIGITS:
        assert judge(Image.fromarray(images[word])) == (digit, colours[digit]), word
