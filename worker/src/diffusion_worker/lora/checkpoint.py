# SPDX-License-Identifier: Apache-2.0
"""Reads a peft LoRA folder into plain tensors and refuses, by name, whatever it would not apply exactly.

The layout is peft's: `adapter_config.json` and `adapter_model.safetensors` with keys
`base_model.model.<module>.lora_A.weight` [rank, in] and `…lora_B.weight` [out, rank].
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import Recipe

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight$")


class LoRAFactors(msgspec.Struct, frozen=True):
    """The update of one module, `scaling * b @ a`, in the file's own dtype.

    Of a linear layer a is [rank, in] and b [out, rank]; of a convolution a is [rank, in, kh, kw] and b [out, rank, 1, 1] or
    [out, rank].
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class LoRACheckpoint(msgspec.Struct, frozen=True):
    """One adapter as read from its file. `digest` is the sha256 of the weights file; modules are named `component.path`."""

    digest: str
    size_bytes: int
    modules: dict[str, LoRAFactors]
    format: str = "peft"
    alpha: float | None = None
    base_model: str | None = None
    recipe: Recipe | None = None

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(factors.a.shape[0] for factors in self.modules.values())


def invalid(message: str) -> RequestError:
    """The refusal of an adapter; not worth a retry before the adapter changes."""
    return RequestError(ErrorCode.INVALID_ADAPTER, message)


def read_checkpoint(folder: str, *, expected_digest: str | None = None, denoiser: str = "transformer") -> LoRACheckpoint:
    """Read and check an adapter's folder; what says no component is for the `denoiser`.

    Raises:
        RequestError: InvalidAdapter (no such folder, no LoRA, a kind that is not supported) or DigestMismatch.
    """
    config = _read_config(Path(folder) / CONFIG_FILE)
    try:
        data = (Path(folder) / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise invalid(f"adapter {folder!r}: {WEIGHTS_FILE} cannot be read: {error.strerror}") from None
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    if expected_digest is not None and digest != expected_digest:
        raise RequestError(ErrorCode.DIGEST_MISMATCH, f"adapter {folder!r}: expected digest {expected_digest}, found {digest}")
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise invalid(f"adapter {folder!r}: {WEIGHTS_FILE} is no safetensors file: {error}") from None
    modules = {f"{denoiser}.{name}": factors for name, factors in _factors(folder, config, tensors).items()}
    return LoRACheckpoint(digest=digest, size_bytes=len(data), modules=modules)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise invalid(f"adapter {str(path.parent)!r}: expected a peft folder, but {CONFIG_FILE}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise invalid(f"adapter {str(path.parent)!r}: {CONFIG_FILE} cannot be read: {error}") from None
    unsupported = {
        f"peft_type {config.get('peft_type')!r}": config.get("peft_type") != "LORA",
        "use_dora": config.get("use_dora", False),
        f"bias {config.get('bias')!r}": config.get("bias", "none") not in ("none", None),
        "modules_to_save": config.get("modules_to_save"),
        "lora_bias": config.get("lora_bias", False),
    }
    if found := [name for name, present in unsupported.items() if present]:
        raise invalid(f"adapter {str(path.parent)!r}: expected a plain LoRA, found {', '.join(found)} in {CONFIG_FILE}")
    return config


def _factors(folder: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, LoRAFactors]:
    parts: dict[str, dict[str, torch.Tensor]] = {}
    strangers = []
    for key, tensor in tensors.items():
        match = _KEY.match(key)
        if match is None:
            strangers.append(key)
        else:
            parts.setdefault(match["module"], {})[match["part"]] = tensor
    if strangers or not parts:
        raise invalid(f"adapter {folder!r}: expected LoRA tensors only, found {_first(strangers) or 'none at all'}")
    return {module: _checked(folder, module, pair, _scaling(folder, config, module, pair)) for module, pair in sorted(parts.items())}


def _checked(folder: str, module: str, pair: dict[str, torch.Tensor], scaling: float) -> LoRAFactors:
    a, b = pair["A"], pair["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise invalid(f"adapter {folder!r}: {module}: A is {list(a.shape)} and B is {list(b.shape)}, their ranks do not meet")
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise invalid(f"adapter {folder!r}: {module} has values that are not finite")
    return LoRAFactors(a=a, b=b, scaling=scaling)


def _scaling(folder: str, config: dict[str, Any], module: str, pair: dict[str, torch.Tensor]) -> float:
    """alpha / r (with rank-stabilised scaling alpha / sqrt(r)) of one module, as peft's `LoraLayer` computes it."""
    if set(pair) != {"A", "B"}:
        raise invalid(f"adapter {folder!r}: {module} has lora_{''.join(pair)} only")
    rank = int(pair["A"].shape[0])
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or rank == 0:
        raise invalid(f"adapter {folder!r}: {CONFIG_FILE} has lora_alpha {alpha!r} for {module} of rank {rank}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """peft's rule: a pattern is a regular expression for the end of the module's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _first(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
