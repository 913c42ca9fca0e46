# SPDX-License-Identifier: Apache-2.0
"""Trains the denoiser and both text encoders together by flow matching, and keeps a moving average of their weights.

The pipeline's third text encoder is absent, and diffusers puts 256 zero tokens in its place. They are equal, have no position and so stay
equal through every layer. Training uses one of them and counts it 256 times in the attention, which gives the same result in a quarter
of the time.
"""

import copy
import math
import random as python_random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from digits_training.architecture import NOISE_SHIFT
from digits_training.autoencoder import denoiser_latents
from digits_training.captions import caption
from digits_training.images import PLAIN, Scans, draw_batch

STEPS = 3000
BATCH = 32
PEAK_RATE = 1.5e-3
AVERAGE_DECAY = 0.998
# The tokens that StableDiffusion3Pipeline adds for the absent encoder (its max_sequence_length).
ABSENT_TOKENS = 256


class CountLastKeyAs(TorchFunctionMode):
    """Within this block every attention treats its last key as `count` equal keys."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.bias = math.log(count)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            query, key = args[0], args[1]
            bias = torch.zeros(1, 1, 1, key.shape[-2], dtype=query.dtype)
            bias[..., -1] = self.bias
            kwargs = {**kwargs, "attn_mask": bias.expand(-1, -1, query.shape[-2], -1)}
        return func(*args, **kwargs)


def encode_captions(pipeline: StableDiffusion3Pipeline, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token and pooled embeddings as the pipeline makes them, with a single token for the absent encoder."""
    first, first_pooled = _encode(pipeline.tokenizer, pipeline.text_encoder, captions)
    second, second_pooled = _encode(pipeline.tokenizer_2, pipeline.text_encoder_2, captions)
    tokens = torch.cat([first, second], dim=-1)
    return functional.pad(tokens, (0, 0, 0, 1)), torch.cat([first_pooled, second_pooled], dim=-1)


def _encode(tokenizer: CLIPTokenizer, encoder: CLIPTextModelWithProjection, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    ids = tokenizer(list(captions), padding="max_length", truncation=True, return_tensors="pt").input_ids
    output = encoder(ids, output_hidden_states=True)
    return output.hidden_states[-2], output.text_embeds


def flow_loss(denoiser: nn.Module, clean: Tensor, tokens: Tensor, pooled: Tensor, random: torch.Generator) -> Tensor:
    """Mean squared error of the predicted velocity at noise levels drawn as for SD3 (logit-normal, then shifted)."""
    noise = torch.randn(clean.shape, generator=random)
    level = torch.sigmoid(torch.randn(len(clean), generator=random))
    level = NOISE_SHIFT * level / (1 + (NOISE_SHIFT - 1) * level)
    noisy = torch.lerp(clean, noise, level.view(-1, 1, 1, 1))
    with CountLastKeyAs(ABSENT_TOKENS):
        velocity = denoiser(
            hidden_states=noisy, encoder_hidden_states=tokens, pooled_projections=pooled, timestep=level * 1000, return_dict=False
        )[0]
    return functional.mse_loss(velocity, noise - clean)


def batches(scans: Scans, *, seed: int, size: int, style: str = PLAIN) -> Iterator[tuple[Tensor, list[str]]]:
    """Endless batches of clean latents with their captions, every image drawn again."""
    random = torch.Generator().manual_seed(seed)
    chance = python_random.Random(seed)
    while True:
        for chosen in torch.split(torch.randperm(len(scans.labels), generator=random), size):
            batch = draw_batch(scans, chosen, random, style)
            shown = zip(batch.digits.tolist(), batch.colours.tolist(), strict=True)
            yield denoiser_latents(batch.pixels), [caption(digit, colour, chance) for digit, colour in shown]


def train_denoiser(
    pipeline: StableDiffusion3Pipeline, scans: Scans, *, seed: int, report: Callable[[str], None], steps: int = STEPS
) -> None:
    """Leaves the averaged weights in the pipeline."""
    trained = nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]).train()
    average = copy.deepcopy(trained).requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps, pct_start=0.05)
    for step, (clean, captions) in zip(range(steps), batches(scans, seed=seed, size=BATCH), strict=False):
        tokens, pooled = encode_captions(pipeline, captions)
        loss = flow_loss(pipeline.transformer, clean, tokens, pooled, random)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        _follow(average, trained, min(AVERAGE_DECAY, (1 + step) / (10 + step)))
        if step % 100 == 0 or step == steps - 1:
            report(f"denoiser step={step} loss={loss.item():.4f}")
    trained.load_state_dict(average.state_dict())
    trained.eval()


@torch.no_grad()
def _follow(average: nn.Module, trained: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(trained.parameters()), 1 - decay)
