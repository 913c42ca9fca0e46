# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines that take words, for what the worker asks of a model by itself: those of the families take embeddings.

Real: the pipelines of diffusers and the runner. Not real: the text encoders, and the models' sizes and weights.
"""

from typing import Any

import torch
from diffusers import FluxImg2ImgPipeline, FluxPipeline, WanPipeline

from diffusion_worker.runner.model_runner import DiffusionModelRunner
from support.families.images import flux
from support.families.rig.family import build_seeded, seeded
from support.families.videos import wan
from support.families.videos.shared import TEXT_TOKENS
from support.runner.rig import OneRank, runner_with


class _FluxWords:
    """Values that are the same for the same words."""

    def encode_prompt(self, prompt: Any, *_args: Any, **_kwargs: Any) -> Any:
        """As the pipelines of Flux do."""
        seed = sum(map(ord, prompt))
        return seeded(seed, 1, flux.TEXT_TOKENS, 16), seeded(seed + 100, 1, 16), torch.zeros(flux.TEXT_TOKENS, 3)


class WordyFlux(_FluxWords, FluxPipeline):
    """Text to image."""


class WordyFluxEdits(_FluxWords, FluxImg2ImgPipeline):
    """Image to image, and nothing else."""


class WordyWan(WanPipeline):
    """Videos."""

    def encode_prompt(self, prompt: Any, *_args: Any, **_kwargs: Any) -> Any:
        """As the pipelines of Wan do."""
        return seeded(1, 1, TEXT_TOKENS, 16), seeded(2, 1, TEXT_TOKENS, 16)


class LargeFlux(WordyFlux):
    """Makes no small images, and none in a single step."""

    SMALLEST, FEWEST_STEPS = 80, 2

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses what is too small."""
        if (kwargs.get("height") or self.SMALLEST) < self.SMALLEST or kwargs["num_inference_steps"] < self.FEWEST_STEPS:
            raise ValueError("too small")
        return super().__call__(*args, **{**kwargs, "height": self.SMALLEST, "width": self.SMALLEST})


class NeverFlux(LargeFlux):
    """Makes nothing that is asked of it without being a person."""

    FEWEST_STEPS = 50


def runner_of(kind: type[Any], parallel: Any = None, **options: Any) -> DiffusionModelRunner:
    """A runner that serves one of these, with random weights from one seed."""

    def make() -> Any:
        plain = wan.pipeline("WanPipeline") if issubclass(kind, WanPipeline) else flux.pipeline("FluxPipeline")
        return kind(**plain.components)

    return runner_with(build_seeded(make)(), parallel or OneRank(), **options)
