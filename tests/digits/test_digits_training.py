# SPDX-License-Identifier: Apache-2.0
"""The training of the digits model: its parts agree with the pipeline that will use them, and it runs from start to finish."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from diffusers import StableDiffusion3Pipeline
from digits_training.adapters import RECIPES, train_adapter
from digits_training.architecture import build_pipeline, build_tokenizer, load_pipeline, save_pipeline
from digits_training.autoencoder import denoiser_latents, train_autoencoder
from digits_training.captions import caption, known_words
from digits_training.denoiser import ABSENT_TOKENS, CountLastKeyAs, encode_captions, train_denoiser
from digits_training.images import COLOURS, GROUNDS, draw_batch, load_scans

from support.runner.digit_judge import HUES

PROMPTS = ["a red digit seven", "green 8", ""]


@pytest.fixture
def pipeline() -> Iterator[StableDiffusion3Pipeline]:
    built = build_pipeline(0)
    random_bits = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # SD3's gates start at zero, which would hide every difference inside the blocks.
        for weight in built.transformer.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=random_bits))
    yield built


def test_captions_are_encoded_as_the_pipeline_does(pipeline: StableDiffusion3Pipeline) -> None:
    tokens, pooled = encode_captions(pipeline, PROMPTS)
    expected, _, expected_pooled, _ = pipeline.encode_prompt(PROMPTS, None, None, do_classifier_free_guidance=False)
    torch.testing.assert_close(functional.pad(tokens, (0, 0, 0, ABSENT_TOKENS - 1)), expected)
    torch.testing.assert_close(pooled, expected_pooled)


def test_one_absent_token_counted_many_times_gives_what_the_pipelines_many_give(pipeline: StableDiffusion3Pipeline) -> None:
    tokens, pooled = encode_captions(pipeline, PROMPTS)
    all_tokens = functional.pad(tokens, (0, 0, 0, ABSENT_TOKENS - 1))
    noisy, level = torch.randn(3, 4, 32, 32, generator=torch.Generator().manual_seed(2)), torch.tensor([100.0, 500.0, 900.0])
    with torch.no_grad():
        expected = pipeline.transformer(noisy, all_tokens, pooled, level).sample
        with CountLastKeyAs(ABSENT_TOKENS):
            counted = pipeline.transformer(noisy, tokens, pooled, level).sample
        uncounted = pipeline.transformer(noisy, tokens, pooled, level).sample
    torch.testing.assert_close(counted, expected, atol=1e-5, rtol=1e-4)
    assert (uncounted - expected).abs().max() > 0.01


def test_every_word_of_a_caption_is_one_token() -> None:
    tokenizer = build_tokenizer()
    assert [word for word in known_words() if len(tokenizer.tokenize(word)) != 1] == []


def test_captions_name_what_is_shown_or_leave_it_out() -> None:
    chance = random.Random(0)
    drawn = [caption(7, 0, chance) for _ in range(2000)]
    assert 0.09 < drawn.count("") / len(drawn) < 0.15
    assert all("seven" in line or "7" in line or "red" in line for line in drawn if line)
    assert not any(other in line for line in drawn for other in ("yellow", "blue", "eight"))


def test_plain_images_latents_have_about_mean_zero_and_deviation_one() -> None:
    latents = denoiser_latents(draw_batch(load_scans(), torch.arange(200), torch.Generator().manual_seed(0)).pixels)
    assert abs(latents.mean()) < 0.1
    assert 0.9 < latents.std() < 1.1


@pytest.mark.parametrize("style", GROUNDS)
def test_a_style_is_grey_so_that_saturation_tells_the_ink(style: str) -> None:
    ground = GROUNDS[style](64)
    assert (ground.amax(dim=1) - ground.amin(dim=1)).max() < 0.03


def test_the_judge_names_the_colours_that_are_drawn() -> None:
    assert list(HUES) == list(COLOURS)


@pytest.mark.slow
def test_training_runs_from_start_to_finish(tmp_path: Path) -> None:
    lines: list[str] = []
    fresh, scans = build_pipeline(0), load_scans()
    train_autoencoder(fresh.vae, scans, seed=1, report=lines.append, steps=2)
    train_denoiser(fresh, scans, seed=2, report=lines.append, steps=2)
    save_pipeline(fresh, tmp_path / "model")
    for style in RECIPES:
        train_adapter(load_pipeline(tmp_path / "model"), scans, tmp_path / style, style=style, seed=3, report=lines.append, steps=2)
        assert sorted(path.name for path in (tmp_path / style).iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert len([line for line in lines if "loss" in line or "decoding" in line]) == 6
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in tmp_path.rglob("*.safetensors"))
