# SPDX-License-Identifier: Apache-2.0
"""Trains the autoencoder to latents that we prescribe: the image at half its size in three channels, the ink's strength in the fourth.

Left to find latents of its own it spent most of its time on losing and finding the colours again. With prescribed ones the encoder and the
decoder learn side by side, and the denoiser need not wait for either. Images in every style are shown, so that an adapter never asks for
something that cannot be decoded.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from diffusers import AutoencoderKL
from torch import Tensor

from digits_training.architecture import LATENT_SCALE, LATENT_SHIFT
from digits_training.images import GROUNDS, Scans, draw_batch

STEPS = 800
BATCH = 8
PEAK_RATE = 3e-3
# The encoder's log variance: its samples are practically its mean.
CERTAINTY = -10.0
# A denoiser's latents are a little off; the decoder has to draw a clean image all the same.
DECODER_NOISE = 0.08


def prescribed_latents(pixels: Tensor) -> Tensor:
    """Return the latents that the encoder learns for images in -1..1, before shift and scale."""
    small = functional.avg_pool2d(pixels, 2)
    ink = small.amax(dim=1, keepdim=True) - small.amin(dim=1, keepdim=True)
    return torch.cat([small, ink - 1], dim=1)


def denoiser_latents(pixels: Tensor) -> Tensor:
    """Return the latents that the denoiser works on."""
    return (prescribed_latents(pixels) - LATENT_SHIFT) * LATENT_SCALE


def train_autoencoder(autoencoder: AutoencoderKL, scans: Scans, *, seed: int, report: Callable[[str], None], steps: int = STEPS) -> None:
    random = torch.Generator().manual_seed(seed)
    styles = list(GROUNDS)
    autoencoder.train()
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=PEAK_RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        chosen = torch.randint(len(scans.labels), (BATCH,), generator=random)
        # Half of all images are plain ones: those are what the base model draws.
        style = styles[0] if step % 2 else styles[(step // 2) % len(styles)]
        pixels = draw_batch(scans, chosen, random, style).pixels
        encoding, decoding = _losses(autoencoder, pixels, random)
        optimizer.zero_grad()
        torch.autograd.backward(encoding + decoding)
        torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step == steps - 1:
            report(f"autoencoder step={step} encoding={encoding.item():.4f} decoding={decoding.item():.4f}")
    autoencoder.eval()


def _losses(autoencoder: AutoencoderKL, pixels: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    latents = prescribed_latents(pixels)
    posterior = autoencoder.encode(pixels).latent_dist
    encoding = functional.mse_loss(posterior.mean, latents) + 0.001 * (posterior.logvar - CERTAINTY).square().mean()
    drawn = autoencoder.decode(latents + DECODER_NOISE * torch.randn(latents.shape, generator=random)).sample
    return encoding, functional.l1_loss(drawn, pixels) + functional.mse_loss(drawn, pixels)
