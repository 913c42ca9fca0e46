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
    """A pipeline class in some way of use: the maker of its pipeline and requests, and how exactly its results can be compared.

    `request` maps (seed, steps, guidance) to arguments of `__call__`; the rig adds a generator and `output_type`. Seeds change values and
    no sizes. `tolerance` is how far company may move a result, in its standard deviations; above 1e-9 it needs a `reason`. So does
    `compared_in` float32, for models that fail in float64, and `shares=False`, for requests that are never merged. `doubled` holds
    arguments that double a request's rows, or None if the class has none.
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
    """Fill each all-zero parameter of the modules with small random values. Switch the modules to eval mode, without gradients."""
    for module in modules:
        module.eval().requires_grad_(False)
        for parameter in module.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)


def build_seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a builder whose pipelines are all alike: it seeds the random weights, replaces all-zero ones, and hides progress bars.

    The global random state stays as it was.
    """

    def build() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            pipeline = make()
            randomise_zeros(*(part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return build


def with_config(family: Family, **changes: Any) -> Family:
    """Return a family like this one, but with a transformer of its own weights, whose configuration has these changes.

    All other components stay.
    """

    def make() -> Any:
        pipeline = family.build()
        own = pipeline.transformer
        pipeline.register_modules(transformer=type(own).from_config(dict(own.config) | changes))
        return pipeline

    return replace(family, build=build_seeded(make))


def seeded(seed: int, *shape: int) -> torch.Tensor:
    """Draw a float32 tensor from the standard normal distribution, by a generator of its own, which leaves the global one alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    """Draw an RGB image with uniform noise in each pixel; the seed alone determines it."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def mask(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    """Draw a mask to inpaint by: white in the left quarter, half or three quarters, chosen by `seed % 3`, and black elsewhere."""
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[:, : width // 4 + seed % 3 * width // 4] = 255
    return Image.fromarray(pixels)


def tiny_vae(channels: int = 4, levels: int = 2, **config: Any) -> AutoencoderKL:
    """Build an image VAE with 8 channels in each level; every level after the first halves the sides.

    `channels` are the latents', and `config` overrides settings.
    """
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
    """Build a `tiny_vae` that needs its latents divided by 1.5 and moved by 0.1 before it decodes them."""
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
    """Flatten a pipeline's output into one dimension: a tensor, an array or an image, or lists and dicts of these."""
    if isinstance(output, torch.Tensor):
        return output.detach().reshape(-1)
    if isinstance(output, np.ndarray):
        return torch.from_numpy(output.copy()).reshape(-1)
    if isinstance(output, Image.Image):
        return torch.from_numpy(np.array(output, dtype=np.float64)).reshape(-1)
    return torch.cat([as_tensor(item) for item in (output.values() if isinstance(output, dict) else output)])
