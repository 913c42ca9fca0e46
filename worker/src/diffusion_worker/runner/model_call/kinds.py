# SPDX-License-Identifier: Apache-2.0
"""The names and kinds of a call's arguments as text, to tell calls that can be merged from others."""

from collections.abc import Callable
from typing import Any

import torch

from diffusion_worker.runner.model_call.call import ModelCall


def numbers_of(dtype: torch.dtype) -> str:
    """Return the type of numbers of a dtype, whatever its precision: `bool`, `int`, `float` or `complex`."""
    if dtype is torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def kinds_of(call: ModelCall, numbers: Callable[[torch.dtype], str] = numbers_of) -> str:
    """Return the arguments of a call with their kinds, in the order of their names, such as `hidden_states: float[3], timestep: int[1]`.

    A tensor's kind is the word of its dtype by `numbers`, and its dimensions, not its sizes. A list's is the kinds of its items, each once.
    """

    def kind(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{numbers(value.dtype)}[{value.dim()}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {kind(item)}" for key, item in sorted(value.items(), key=lambda entry: str(entry[0]))) + "}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({', '.join(sorted(set(map(kind, value))))})"
        return type(value).__name__

    return ", ".join(f"{name}: {kind(value)}" for name, value in sorted(call.arguments.items()))
