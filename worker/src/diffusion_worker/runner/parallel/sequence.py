# SPDX-License-Identifier: Apache-2.0
"""Sequence parallel (Ulysses): each rank has some tokens of every row, and inside an attention all tokens of some heads.

Diffusers' hooks split and gather the tokens, by diffusers' plan for a model or the one in `FAMILIES`. Diffusers' own switch is not used,
because it asks for an accelerator and takes the whole world for the group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelInput, ContextParallelOutput, ParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.messages import ModelInfo
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.parallel.joint_attention import SplitJointAttention

Arguments = dict[str, Any]
Plan = dict[str, Any]


@dataclass(frozen=True)
class SequenceFamily:
    """The counting and splitting of a model class's tokens.

    `tokens` and `text` return the lengths to split, from a call's arguments and the model's config. `pack` returns the number of
    neighbouring latents that the pipeline packs into one token. `plan` replaces diffusers' own. `pad_text` pads the text to a length that
    can be split.
    """

    tokens: Callable[[Arguments, Any], int]
    pack: Callable[[Any], int]
    text: Callable[[Arguments], int] | None = None
    plan: Plan | None = None
    pad_text: Callable[[Arguments, int], Arguments] | None = None
    # Modules that attend to the text alone. Every rank has the whole text, so they need no tokens of other ranks.
    to_text_only: str | None = None


def _length(name: str) -> Callable[[Arguments], int]:
    return lambda arguments: int(arguments[name].shape[1])


def _packed_tokens(arguments: Arguments, config: Any) -> int:
    return int(arguments["hidden_states"].shape[1])


def _patched_tokens(arguments: Arguments, config: Any) -> int:
    """Return the number of patches in latents [rows, channels, (frames,) height, width]."""
    patch = config.patch_size if isinstance(config.patch_size, list | tuple) else (config.patch_size,) * 2
    sides = arguments["hidden_states"].shape[2:]
    tokens = 1
    for side, part in zip(sides, patch, strict=True):
        tokens *= side // part
    return tokens


def _pad_qwen_text(arguments: Arguments, size: int) -> Arguments:
    """Pad the text to a multiple of `size`, because prompts have any length here.

    Padding is masked, and positions of images do not depend on the text's length.
    """
    text = arguments["encoder_hidden_states"]
    missing = -text.shape[1] % size
    if missing == 0:
        return arguments
    mask = arguments.get("encoder_hidden_states_mask")
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    return arguments | {
        "encoder_hidden_states": nn.functional.pad(text, (0, 0, 0, missing)),
        "encoder_hidden_states_mask": nn.functional.pad(mask, (0, missing)),
    }


def _tokens_in(dim: int, dims: int) -> ContextParallelInput:
    return ContextParallelInput(split_dim=dim, expected_dims=dims)


def _tokens_out_of(dim: int, dims: int) -> ContextParallelInput:
    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=True)


_GATHERED = ContextParallelOutput(gather_dim=1, expected_dims=3)

FAMILIES = {
    "FluxTransformer2DModel": SequenceFamily(_packed_tokens, lambda config: 2, text=_length("encoder_hidden_states")),
    "Flux2Transformer2DModel": SequenceFamily(_packed_tokens, lambda config: 2, text=_length("encoder_hidden_states")),
    "QwenImageTransformer2DModel": SequenceFamily(_packed_tokens, lambda config: config.patch_size, pad_text=_pad_qwen_text),
    "WanTransformer3DModel": SequenceFamily(_patched_tokens, lambda config: config.patch_size[-1]),
    "LTXVideoTransformer3DModel": SequenceFamily(
        _packed_tokens,
        lambda config: config.patch_size,
        # Diffusers' plan splits the text too, and then fails on its mask, which has all heads.
        plan={
            # With an image to start from each token has a time of its own.
            "": {"hidden_states": _tokens_in(1, 3), "timestep": _tokens_in(1, 2)},
            "rope": {0: _tokens_out_of(1, 3), 1: _tokens_out_of(1, 3)},
            "proj_out": _GATHERED,
        },
        to_text_only="attn2",
    ),
    # Diffusers has no plan for it, and no processor that supports one. The text is on every rank: it is short, and 333 tokens long.
    "SD3Transformer2DModel": SequenceFamily(
        _patched_tokens, lambda config: config.patch_size, plan={"pos_embed": {0: _tokens_out_of(1, 3)}, "proj_out": _GATHERED}
    ),
}


def check_model(name: str, model: nn.Module, size: int) -> None:
    """Raise ConfigError where the model cannot be split over `size` ranks."""
    kind = type(model).__name__
    if kind not in FAMILIES:
        raise ConfigError(f"--sequence: {kind} ({name}) is not supported, expected one of {', '.join(sorted(FAMILIES))}")
    heads = int(model.config["num_attention_heads"])  # type: ignore[index]
    if heads % size:
        raise ConfigError(f"--sequence {size}: {kind} ({name}) has {heads} attention heads, which is not a multiple of {size}")


def describe(info: ModelInfo, token_pixels: int, size: int) -> ModelInfo:
    """Add the sizes that can be made to a model's description; raise ConfigError if its default size is none of them."""
    if info.default_height and info.default_width:
        tokens = (info.default_height // token_pixels) * (info.default_width // token_pixels)
        if tokens % size:
            made = f"{info.default_width}x{info.default_height} by default, in {tokens} tokens"
            raise ConfigError(f"--sequence {size}: {info.pipeline} makes {made}, which is not a multiple of {size}")
    return msgspec.structs.replace(info, token_pixels=token_pixels, tokens_multiple=size)


class Ulysses:
    """Sequence parallelism for all models of one rank group. `mesh` has the dimensions `ring` (of size 1) and `ulysses`."""

    def __init__(self, mesh: DeviceMesh, *, rank: int, world: int, device: torch.device) -> None:
        part = mesh["ring", "ulysses"]
        self.size = mesh["ulysses"].size()
        self._group = mesh["ulysses"].get_group()
        self._config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=self.size))
        self._config.setup(rank, world, device, mesh=part)

    def apply(self, model: nn.Module) -> None:
        """Split the tokens of a model's calls from now on.

        Raises:
            ConfigError: an attention does not support split tokens, and would silently use this rank's alone.
        """
        family = FAMILIES[type(model).__name__]
        for name, module in model.named_modules():
            if hasattr(module, "processor"):
                self._connect(name, module, family)
        model._parallel_config = self._config
        apply_context_parallel(model, self._config.context_parallel_config, family.plan or model._cp_plan)

    def prepare(self, model: nn.Module) -> Callable[[ModelCall], ModelCall]:
        """Return a function that prepares a call of the model; it raises RequestError for a length that cannot be split."""
        family, config = FAMILIES[type(model).__name__], model.config

        def prepare(call: ModelCall) -> ModelCall:
            self._check_length("tokens of the image", family.tokens(call.arguments, config))
            if family.text is not None:
                self._check_length("tokens of the text", family.text(call.arguments))
            if family.pad_text is None:
                return call
            return msgspec.structs.replace(call, arguments=family.pad_text(call.arguments, self.size))

        return prepare

    def _connect(self, name: str, module: Any, family: SequenceFamily) -> None:
        if family.to_text_only is not None and name.endswith(family.to_text_only):
            return
        if type(module.processor).__name__ == "JointAttnProcessor2_0":
            module.processor = SplitJointAttention(self._group)
        if not hasattr(module.processor, "_parallel_config"):
            raise ConfigError(f"--sequence: {name} has a {type(module.processor).__name__}, which does not support several ranks")
        module.processor._parallel_config = self._config

    def _check_length(self, what: str, length: int) -> None:
        if length % self.size:
            message = f"expected a number of {what} that is a multiple of --sequence {self.size}, found {length}"
            raise RequestError(ErrorCode.INVALID_REQUEST, message)
