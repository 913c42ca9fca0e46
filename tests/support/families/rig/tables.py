# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the tables of families: values that follow a seed, requests, pipelines and families.

Real: the classes of diffusers and all that they compute. Not real: weights, prompts and images, which are random.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import diffusers
import torch
from PIL import Image

from support.families.rig.family import Arguments, Family, build_seeded, flow, image, mask, seeded, shifted_vae

Request = Callable[[int, int, float], Arguments]
OfSeed = Callable[[int], Any]

# Sizes of transformers, for classes that have them and families that give no others.
SMALL = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_single_layers": 1,
    "num_refiner_layers": 1, "joint_attention_dim": 16, "text_embed_dim": 16, "caption_channels": 16,
}  # fmt: skip


def noise(*shape: int, at: int = 0) -> OfSeed:
    """Return a function of the seed that draws a normal tensor; `at` moves the seed, so that inputs of the same request differ."""
    return lambda seed: seeded(seed + at, *shape)


def valid(tokens: int, count: Callable[[int], int] | None = None, dtype: torch.dtype = torch.int64) -> OfSeed:
    """Return a maker of a prompt's mask, [1, tokens]: all tokens are valid, or the first `count(seed)`."""
    return lambda seed: (torch.arange(tokens)[None] < (count(seed) if count else tokens)).to(dtype)


def pixels(width: int = 32, height: int | None = None, *, at: int = 0) -> OfSeed:
    """Return a function of the seed that draws an image of noise. Without `height` it is square; `at` moves the seed."""
    return lambda seed: image(seed + at, width, height or width)


def film(frames: int, side: int = 32) -> OfSeed:
    """Return a function of the seed that makes a video: `frames` images of noise, all different, of `side` pixels each way."""
    return lambda seed: [image(1000 * seed + frame, side, side) for frame in range(frames)]


def painted(side: int = 32) -> OfSeed:
    """Return a function of the seed that draws a mask to inpaint a square image by, as `mask` does."""
    return lambda seed: mask(seed, side, side)


def texts(apart: int = 100, step: int = 200, **shapes: tuple[int, ...]) -> dict[str, OfSeed]:
    """Return functions of the seed that draw embeddings: for each name, and under `negative_NAME` for the negative prompt.

    Each next name has seeds `step` further than the one before, and its negative embedding has seeds `apart` further than its own.
    """
    found = {}
    for number, (name, shape) in enumerate(shapes.items()):
        found[name] = noise(*shape, at=number * step)
        found[f"negative_{name}"] = noise(*shape, at=number * step + apart)
    return found


def masks(dtype: torch.dtype = torch.int64, **lengths: int) -> dict[str, OfSeed]:
    """Return makers of token masks, [1, tokens]: for each name, and under `negative_NAME` for the negative prompt.

    Values are numbers of tokens; the seed makes the last zero to two of them invalid.
    """

    def of(length: int, at: int) -> OfSeed:
        return valid(length, lambda seed: length - (seed + at) % 3, dtype)

    return {f"{sign}{name}": of(length, at) for name, length in lengths.items() for at, sign in enumerate(("", "negative_"))}


def halfway(request: Request, **given: Any) -> Request:
    """Return the same request with more arguments, such as an image to start from.

    The added `strength` is 0.5, so half the schedule is run; it asks for twice the steps to make up for that.
    """
    return more(request, times=2, strength=0.5, **given)


def asking(side: int | None = None, *, scale: str | None = "guidance_scale", **given: Any) -> Request:
    """Return a request: a function that makes a pipeline's arguments from seed, steps and guidance.

    `side` becomes height and width, and `scale` is the name of the argument for guidance; None leaves them out.
    Values in `given` that are functions, also inside a list, are called with the seed.
    """
    size = {} if side is None else {"height": side, "width": side}

    def ask(seed: int, steps: int, guidance: float) -> Arguments:
        scales = {} if scale is None else {scale: guidance}
        return {"num_inference_steps": steps} | scales | size | {name: _of_seed(value, seed) for name, value in given.items()}

    return ask


def more(request: Request, *, times: int = 1, without: tuple[str, ...] = (), **given: Any) -> Request:
    """Return the same request with the arguments `given` added or replaced, and those named in `without` left out.

    Values that are functions are called with the seed. `times` multiplies the steps, for a strength that runs only part of them.
    """

    def ask(seed: int, steps: int, guidance: float) -> Arguments:
        arguments = request(seed, times * steps, guidance) | {name: _of_seed(value, seed) for name, value in given.items()}
        return {name: value for name, value in arguments.items() if name not in without}

    return ask


def _of_seed(value: Any, seed: int) -> Any:
    if isinstance(value, list):
        return [_of_seed(item, seed) for item in value]
    return value(seed) if callable(value) else value


def assemble(kind: Any, **parts: Any) -> Any:
    """Build a pipeline of a class, or of diffusers' class of that name; required components that are not given are None.

    A part that is a function or a class is called to make the part, for each pipeline again.
    """
    found = getattr(diffusers, kind) if isinstance(kind, str) else kind
    needed = [name for name, parameter in inspect.signature(found).parameters.items() if parameter.default is parameter.empty]
    made = {name: given() if isinstance(given, FunctionType | partial | type) else given for name, given in parts.items()}
    return found(**dict.fromkeys(needed) | made)


def part(name: str, **config: Any) -> Callable[..., Any]:
    """Return a maker of objects of diffusers' class of that name, imported at its first call; the maker takes settings too."""
    return lambda **others: getattr(diffusers, name)(**config | others)


def small(name: str, **config: Any) -> Callable[[], Any]:
    """Return a maker of transformers with those sizes in `SMALL` that the class has, and with these settings."""

    def make() -> Any:
        has = inspect.signature(getattr(diffusers, name)).parameters
        return part(name, **{size: value for size, value in SMALL.items() if size in has} | config)()

    return make


def on(model: str, *, vae: Callable[[], Any] = shifted_vae, scheduler: Callable[[], Any] = flow, **config: Any) -> partial[Any]:
    """Return a builder of pipelines with a small transformer of class `model`, a VAE and a scheduler.

    Call it with the pipeline's class; keyword arguments add components or replace these three.
    """
    return partial(assemble, transformer=small(model, **config), vae=vae, scheduler=scheduler)


def of_two_prompts(request: Request, *, images: bool = False) -> Arguments:
    """Return a request's tensors with their rows twice, as arguments that ask for two results in one call.

    With `images` its images and videos are there twice too; other arguments are left out.
    It is for pipelines that take two results only as two prompts, and repeat no embeddings themselves.
    """
    arguments = request(1, 2, 1.0)
    twice = {name: value.repeat(2, *(1,) * (value.dim() - 1)) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return twice | ({name: [value, value] for name, value in arguments.items() if _is_image(value)} if images else {})


def _is_image(value: Any) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, list) and isinstance(value[0], Image.Image))


def entry(
    name: str, family: str, make: Callable[..., Any], request: Request, *, repeats: bool = True, images: bool = False, **others: Any
) -> Family:
    """Define a row of a table: `make` gets the class, which is `name` without a variant in brackets, and builds the pipeline.

    `others` are further fields of `Family`; pixels are compared unless they say otherwise. `doubled` asks for two images of one prompt. If
    `repeats` is False, the class would not repeat embeddings, so it gets two prompts instead, and with `images` each image or video twice.
    A `reason` without a `tolerance` means that requests are never merged.
    """
    doubled = {"num_images_per_prompt": 2} if repeats else of_two_prompts(request, images=images)
    defaults = {"output_type": "pt", "doubled": doubled, "shares": "tolerance" in others or not others.get("reason")}
    return Family(name, family, build_seeded(lambda: make(name.partition(" (")[0])), request, **defaults | others)
