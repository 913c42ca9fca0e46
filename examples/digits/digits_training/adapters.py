# SPDX-License-Identifier: Apache-2.0
"""Trains one peft LoRA for each style on the finished model, whose own weights stay as they are."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model

from digits_training.architecture import let_everyone_read
from digits_training.denoiser import batches, encode_captions, flow_loss
from digits_training.images import Scans

BATCH = 32
PEAK_RATE = 3e-3
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")


@dataclass(frozen=True)
class Recipe:
    """An adapter's effect on the image. The ranks and targets differ on purpose, since a server must cope with that."""

    rank: int
    targets: tuple[str, ...]
    steps: int


RECIPES = {
    "stripes": Recipe(rank=8, targets=ATTENTION, steps=400),
    "frame": Recipe(rank=16, targets=ATTENTION + FEED_FORWARD, steps=900),
    "paper": Recipe(rank=8, targets=ATTENTION + FEED_FORWARD, steps=900),
}


def train_adapter(
    pipeline: StableDiffusion3Pipeline,
    scans: Scans,
    folder: Path,
    *,
    style: str,
    seed: int,
    report: Callable[[str], None],
    steps: int | None = None,
) -> None:
    """Adapts the pipeline's transformer to `style` and writes `folder`; the pipeline must not be used for anything else afterwards.

    `steps` is for tests; without it the style's recipe says how many.
    """
    torch.manual_seed(seed)
    recipe = RECIPES[style]
    steps = steps or recipe.steps
    config = LoraConfig(r=recipe.rank, lora_alpha=recipe.rank, target_modules=list(recipe.targets))
    adapted = get_peft_model(pipeline.transformer, config).train()
    weights = [weight for weight in adapted.parameters() if weight.requires_grad]
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(weights, lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps, pct_start=0.05)
    for step, (clean, captions) in zip(range(steps), batches(scans, seed=seed, size=BATCH, style=style), strict=False):
        with torch.no_grad():
            tokens, pooled = encode_captions(pipeline, captions)
        loss = flow_loss(adapted, clean, tokens, pooled, random)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99 or step == steps - 1:
            report(f"adapter {style} step={step} loss={loss.item():.4f}")
    adapted.half().save_pretrained(folder)
    # peft writes an empty form of a model card beside the weights; ours covers the adapters too.
    (folder / "README.md").unlink(missing_ok=True)
    let_everyone_read(folder)
