# SPDX-License-Identifier: Apache-2.0
"""The memory that a model needs on its device, by the headers of its files: weights, slots of adapters, and the decoding of an image.

Weights stay in their files, but for components that only their library can load. The decoder runs on torch's meta device, which computes
shapes and nothing else, while the bytes of all tensors that live at once are counted. Workspaces of kernels and the device's own memory are
not in it.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.lora.slot_bank import aligned
from diffusion_worker.memory.module_tensors import weights_bytes
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.runner.loading.adapter_layers import adapted_components
from diffusion_worker.runner.loading.component_dtypes import dtype_of
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.pipelines.description import describe, latent_pixels
from diffusion_worker.runner.pipelines.view import modules_of

# The number of channels of a latent, by the names in the configurations of VAEs.
CHANNELS = ("latent_channels", "z_dim")


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes of a model on a device of one rank, in `dtype`, for images of `width` by `height` pixels.

    `weights` has the components. `slots` is what adapters take if they change every layer. `decode` is the peak of decoding one image (of
    a video, its default number of frames), None where the decoder does not run without weights.
    """

    dtype: str
    width: int
    height: int
    weights: dict[str, int]
    slots: int
    decode: int | None


def estimate(config: WorkerConfig, size: tuple[int, int] | None) -> MemoryEstimate:
    """Estimate the memory of the configured model for images of this size, width first, or of the model's default size.

    Raises:
        ConfigError: the model cannot be loaded, or cannot make the size; without a size, it has no default.
    """
    dtype = dtype_of(config.dtype, torch.device("cuda"))
    pipeline = load_pipeline(config, dtype, unread=Placeholders(wanted_soon=False))
    modules = modules_of(pipeline)
    weights = {name: weights_bytes(module) for name, module in modules.items()}
    info = describe(pipeline, dtype, sum(weights.values()))
    width, height = size or (info.default_width or 0, info.default_height or 0)
    if not width or not height or width % info.size_multiple or height % info.size_multiple:
        found = f"{width}x{height}" if size else "none, and the model has no default"
        raise ConfigError(f"--size: expected WIDTHxHEIGHT in multiples of {info.size_multiple} pixels, found {found}")
    slots = config.max_loras * config.max_lora_rank * slot_columns(modules) * dtype.itemsize
    frames = 1 if info.kind == "image" or not info.default_frames else (info.default_frames - 1) // info.frame_multiple + 1
    return MemoryEstimate(info.dtype, width, height, weights, slots, decode_bytes(pipeline, width, height, frames))


def slot_columns(modules: Mapping[str, nn.Module]) -> int:
    """Return the numbers that one rank of one slot takes if adapters change every linear layer and convolution that they may change."""
    parts = [part for module in adapted_components(modules).values() for part in module.modules()]
    weights = [part.weight for part in parts if isinstance(part, nn.Linear | nn.Conv2d)]
    widths = [width for weight in weights for width in (weight[0].numel(), len(weight))]
    return sum(map(aligned, widths))


def decode_bytes(pipeline: Any, width: int, height: int, frames: int) -> int | None:
    """Return the most bytes that live at once while latents of one image are decoded; None where that fails without weights.

    The model is moved to the meta device, and cannot be used after this.
    """
    vae: Any = modules_of(pipeline).get("vae")
    config = getattr(vae, "config", {})
    channels = next((config[name] for name in CHANNELS if name in config), None)
    if channels is None:
        return None
    latent = latent_pixels(pipeline)
    vae.to("meta")
    still = (1, channels, height // latent, width // latent)
    for shape in (still, (*still[:2], frames, *still[2:])):
        try:
            with torch.inference_mode(), counted() as live:
                vae.decode(torch.empty(shape, dtype=next(vae.parameters()).dtype, device="meta"))
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            continue
        return live.peak
    return None


@contextmanager
def counted() -> Iterator["LiveBytes"]:
    """Count the bytes of tensors that are made in the block."""
    with FusedAttention(), LiveBytes() as live:
        yield live


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all tensors that were made while it is entered and still live, and their `peak`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the memory of its results; views have that of another tensor."""
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        # The object stays the same as long as the memory lives.
        key, size = id(storage), storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class FusedAttention(TorchFunctionMode):
    """Attention as a GPU's fused kernels make it: without the matrix of all pairs of tokens, which the meta device would have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return an empty result for an attention; call any other function."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        return given["query"].new_empty(*given["query"].shape[:-1], given["value"].shape[-1])
