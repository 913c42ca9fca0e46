# SPDX-License-Identifier: Apache-2.0
"""Sequence parallel (Ulysses): each rank has some tokens of every row, and inside an attention all tokens of some heads.

Diffusers' hooks split and gather the tokens, by diffusers' plan for a model or the one in its record. Diffusers' own switch is not used,
because it asks for an accelerator and takes the whole world for the group.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelInput, ContextParallelOutput, ParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.messages import ModelInfo
from diffusion_worker.runner.families import SequencePlan, TokenCount, model_record, models
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.parallel.joint_attention import SplitJointAttention

Arguments = dict[str, Any]
Plan = dict[str, Any]


def _tokens(plan: SequencePlan, arguments: Arguments, config: Any) -> int:
    """Return the number of tokens of an image: given, or patches in latents [rows, channels, (frames,) height, width]."""
    states = arguments["hidden_states"]
    if plan.tokens is TokenCount.PACKED:
        return int(states.shape[1])
    patch = config.patch_size if isinstance(config.patch_size, list | tuple) else (config.patch_size,) * 2
    return math.prod(side // part for side, part in zip(states.shape[2:], patch, strict=True))


def packed_latents(model: Any) -> int:
    """Return the number of neighbouring latents, along a side, in one token of a model that has a plan."""
    plan = plan_of(model)
    patch = model.config.patch_size if plan.pack is None else plan.pack
    return int(patch[-1] if isinstance(patch, list | tuple) else patch)


def _pad_text(arguments: Arguments, size: int) -> Arguments:
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


def plan_of(model: nn.Module) -> SequencePlan:
    """Return the plan of a model that `check_model` accepts."""
    plan = model_record(type(model)).sequence
    assert plan is not None, f"{type(model).__name__} has no plan"
    return plan


def _diffusers_plan(plan: SequencePlan, model: Any) -> Plan:
    """Return a plan in the form of diffusers, or diffusers' own for the model."""
    if not plan.splits:
        return model._cp_plan  # type: ignore[no-any-return]
    made: Plan = {}
    for split in plan.splits:
        of_output = isinstance(split.tensor, int)
        made.setdefault(split.module, {})[split.tensor] = ContextParallelInput(
            split_dim=split.dim, expected_dims=split.dims, split_output=of_output
        )
    return made | {plan.gathered: ContextParallelOutput(gather_dim=1, expected_dims=3)}


def check_model(component: str, model: nn.Module, size: int) -> None:
    """Raise ConfigError if the record of the model's class has no plan, or `size` does not divide the number of attention heads."""
    model_class = type(model).__name__
    if model_record(type(model)).sequence is None:
        known = ", ".join(record.name for record in models() if record.sequence is not None)
        raise ConfigError(f"--sequence: {model_class} ({component}) is not supported, expected one of {known}")
    heads = int(model.config["num_attention_heads"])  # type: ignore[index]
    if heads % size:
        raise ConfigError(f"--sequence {size}: {model_class} ({component}) has {heads} attention heads, which is not a multiple of {size}")


def describe(info: ModelInfo, token_pixels: int, size: int) -> ModelInfo:
    """Return a model's description with the token's size added, and the number that must divide an image's tokens.

    Raises ConfigError if the tokens of the default size are no multiple of `size`.
    """
    if info.default_height and info.default_width:
        tokens = (info.default_height // token_pixels) * (info.default_width // token_pixels)
        if tokens % size:
            made = f"{info.default_width}x{info.default_height} by default, in {tokens} tokens"
            raise ConfigError(f"--sequence {size}: {info.pipeline} makes {made}, which is not a multiple of {size}")
    return msgspec.structs.replace(info, token_pixels=token_pixels, tokens_multiple=size)


class Ulysses:
    """The context-parallel settings that a rank's models share.

    The degree is the size of `ulysses` in `mesh`; `ring`, which diffusers expects too, is 1.
    """

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
        plan = plan_of(model)
        for name, module in model.named_modules():
            if hasattr(module, "processor"):
                self._connect(name, module, plan)
        model._parallel_config = self._config
        apply_context_parallel(model, self._config.context_parallel_config, _diffusers_plan(plan, model))

    def prepare(self, model: nn.Module) -> Callable[[ModelCall], ModelCall]:
        """Return a function that checks a call of the model before its tokens are split, and pads its text if the model's plan says so.

        The function raises RequestError (InvalidRequest) for a number of tokens that is no multiple of the ranks.
        """
        plan, config = plan_of(model), model.config

        def prepare(call: ModelCall) -> ModelCall:
            self._check_length("the image", _tokens(plan, call.arguments, config))
            if plan.text is not None:
                self._check_length("the text", int(call.arguments[plan.text].shape[1]))
            if not plan.pads_text:
                return call
            return msgspec.structs.replace(call, arguments=_pad_text(call.arguments, self.size))

        return prepare

    def _connect(self, layer: str, module: Any, plan: SequencePlan) -> None:
        if plan.text_attention is not None and layer.endswith(plan.text_attention):
            return
        if type(module.processor).__name__ == plan.joint_processor:
            module.processor = SplitJointAttention(self._group)
        if not hasattr(module.processor, "_parallel_config"):
            processor = type(module.processor).__name__
            raise ConfigError(f"--sequence: the attention processor of {layer}, {processor}, does not support several ranks")
        module.processor._parallel_config = self._config

    def _check_length(self, part: str, tokens: int) -> None:
        if tokens % self.size:
            message = f"{part}: expected a number of tokens that is a multiple of --sequence {self.size}, found {tokens}"
            raise RequestError(ErrorCode.INVALID_REQUEST, message)
