# SPDX-License-Identifier: Apache-2.0
"""A test family: a tiny pipeline of one diffusers class with random weights, and its requests.

The weights are meaningless. The tests show that requests in company get what diffusers gives them alone. Zero parameters are made random,
because a zero output layer would make every comparison true.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image

Arguments = dict[str, Any]

flow = FlowMatchEulerDiscreteScheduler
# A scheduler that shifts its times by the size of an image.
dynamic_flow = partial(flow, use_dynamic_shifting=True)
plain_ddim = partial(DDIMScheduler, clip_sample=False)


def call_pipeline(view: Any, arguments: Arguments) -> Any:
    """Run a classic pipeline, and return the first element of its output."""
    return view(**arguments, return_dict=False)[0]


@dataclass(frozen=True)
class Family:
    """A pipeline class, or one way to use it.

    `request` makes the arguments of `__call__` from (seed, steps, guidance), without generator and output type. Another seed means other
    embeddings and images of the same sizes. `tolerance` bounds the largest difference between a request in company and the same request
    alone. It is in float64 and in standard deviations of the result; above 1e-9 it needs a `reason`. With `shares=False` requests of this
    family share no model call, which needs a `reason` too. `doubled` are the arguments that give a request twice as many rows; None where
    the class has no such argument. `compared_in` is float32 for a model that cannot run in float64, also with a `reason`.
    """

    name: str
    family: str
    build: Callable[[], Any]
    request: Callable[[int, int, float], Arguments]
    output_type: str = "latent"
    tolerance: float = 1e-9
    shares: bool = True
    reason: str = ""
    doubled: Arguments | None = None
    call: Callable[[Any, Arguments], Any] = call_pipeline
    compared_in: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        if (self.tolerance > 1e-9 or not self.shares or self.compared_in is not torch.float64) and not self.reason:
            raise ValueError(f"{self.name}: say why it is no better")


def randomise_zeros(*modules: torch.nn.Module) -> None:
    """Give every parameter that is zero throughout small random values, and switch to eval mode."""
    for module in modules:
        module.eval().requires_grad_(False)
        for parameter in module.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)


def build_seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a builder that makes the same pipeline each time: random weights from one seed, no parameter all zero, no progress bar."""

    def build() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            pipeline = make()
            randomise_zeros(*(part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return build


def with_config(family: Family, **changes: Any) -> Family:
    """Return the same family on a transformer with other settings."""

    def make() -> Any:
        pipeline = family.build()
        own = pipeline.transformer
        pipeline.register_modules(transformer=type(own).from_config(dict(own.config) | changes))
        return pipeline

    return replace(family, build=build_seeded(make))


def seeded(seed: int, *shape: int) -> torch.Tensor:
    """Return normally distributed values of a shape, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    """Return an image of random colours."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def mask(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    """Return a mask: a white rectangle at the left whose width depends on the seed."""
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[:, : width // 4 + seed % 3 * width // 4] = 255
    return Image.fromarray(pixels)


def tiny_vae(channels: int = 4, levels: int = 2, **config: Any) -> AutoencoderKL:
    """Build a VAE of `levels` resolutions: images are 2 ** (levels - 1) times as large as latents."""
    defaults = {
        "block_out_channels": (8,) * levels,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "latent_channels": channels,
        "norm_num_groups": 2,
        "sample_size": 32,
    }
    return AutoencoderKL(**defaults | config)


def shifted_vae(channels: int = 4) -> Any:
    """Build a tiny VAE whose latents are scaled and shifted."""
    return tiny_vae(channels, scaling_factor=1.5, shift_factor=0.1)


def in_float64(value: Any) -> Any:
    """Return arguments with every floating-point tensor in float64, and everything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: in_float64(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_float64(item) for item in value)
    return value


def as_tensor(output: Any) -> torch.Tensor:
    """Flatten a pipeline's output into a tensor: tensors, arrays or images, also in lists and dicts."""
    if isinstance(output, torch.Tensor):
        return output.detach().reshape(-1)
    if isinstance(output, np.ndarray):
        return torch.from_numpy(output.copy()).reshape(-1)
    if isinstance(output, Image.Image):
        return torch.from_numpy(np.array(output, dtype=np.float64)).reshape(-1)
    return torch.cat([as_tensor(item) for item in (output.values() if isinstance(output, dict) else output)])
