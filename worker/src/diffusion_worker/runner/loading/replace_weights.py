# SPDX-License-Identifier: Apache-2.0
"""New weights for a loaded model: named tensors replace its own, and nothing else is loaded again."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.layers import LoRALayer
from diffusion_worker.memory.module_tensors import is_quantized
from diffusion_worker.memory.weights import ModelWeights

MOST_NAMES = 3


def replace_weights(modules: Mapping[str, torch.nn.Module], weights: ModelWeights, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Overwrite the contents of tensors in place.

    A name is `component.key`, with the key of the module's state dict before layers were wrapped. Values have the full shape; a rank with a
    part cuts it out. Nothing is written before every name and shape has been checked.

    Returns:
        All names in `named`.

    Raises:
        RequestError: InvalidRequest for an unknown name, another shape, or a quantised or sharded tensor.
    """
    given = dict(named)
    own = dict(_named_tensors(modules))
    refused = [f"{name} ({why})" for name, values in given.items() if (why := _why_refused(own.get(name), values, weights)) is not None]
    if refused:
        count, total = len(refused), len(given)
        message = f"weights: {count} of {total} tensors do not fit, so none was written: {', '.join(sorted(refused)[:MOST_NAMES])}"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, details={"field": "weights"})
    for name, values in given.items():
        weights.replace(own[name], values)
    return set(given)


def _why_refused(own: torch.Tensor | None, values: torch.Tensor, weights: ModelWeights) -> str | None:
    """Return the reason why the model's `own` tensor of a name cannot get these values; None if it can."""
    if own is None:
        return "the model has no such tensor"
    if is_quantized(own):
        return "quantised, its weights cannot be replaced"
    shape = weights.whole_shape(own)
    if shape is None:
        return "sharded, its weights cannot be replaced"
    return None if shape == values.shape else f"expected the shape {tuple(shape)}, found {tuple(values.shape)}"


def read_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with their names, one by one in host memory, from a file or from every `*.safetensors` in a folder.

    Raises:
        RequestError: InvalidRequest, a file cannot be read as safetensors, or the folder has none. It may come after some tensors.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"path {str(path)!r}: expected a folder with *.safetensors files, found none in it")
    try:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"path {str(path)!r}: cannot be read as safetensors: {error}") from error


def _named_tensors(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with their names in a checkpoint, after the component's name.

    Tied tensors come under each of their names. Those of a layer wrapped for adapters have the names from before it was wrapped.
    """
    for component, module in modules.items():
        wrapped = [f"{name}." for name, part in module.named_modules() if isinstance(part, LoRALayer)]
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
            layer = next((prefix for prefix in wrapped if name.startswith(prefix)), "")
            yield f"{component}.{layer}{name.removeprefix(layer).removeprefix('base.' if layer else '')}", tensor
