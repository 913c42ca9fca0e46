# SPDX-License-Identifier: Apache-2.0
"""Components built from their config as `from_pretrained` builds them, with a placeholder for every tensor that is in a file.

A placeholder has the shape and the dtype that the library would give the tensor, and one element of memory. Computed buffers are real, tied
weights are tied, names are those that the library makes of the file's. Tensors that are fused on the way, or weights saved quantised, need
more than names and a dtype. They raise `NotReadable`, and `from_pretrained` loads them.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import transformers
from diffusers.models.modeling_utils import no_init_weights

from diffusion_worker.errors import ConfigError
from diffusion_worker.memory.checkpoint import Checkpoint, read_checkpoint, some_tensors
from diffusion_worker.memory.filling import read_tensor
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.memory.weight_files import StoredTensor

Stored = dict[str, StoredTensor]


class NotReadable(Exception):
    """Raised with the reason why a component's tensors are not read as they are in its files; `from_pretrained` loads it then."""


def is_known(kind: Any) -> bool:
    """Return True if a class has `from_pretrained` unchanged from diffusers' `ModelMixin` or transformers' `PreTrainedModel`.

    A class that extends neither gives False.
    """
    for base in (diffusers.ModelMixin, transformers.PreTrainedModel):
        if issubclass(kind, base):
            return bool(kind.from_pretrained.__func__ is base.from_pretrained.__func__)
    return False


def checkpoint_of(kind: Any, folder: Path) -> Checkpoint:
    """Read the headers of a component's weight files, under the names that its library uses.

    Raises ConfigError if there are none, or they contradict each other.
    """
    if issubclass(kind, transformers.PreTrainedModel):
        return read_checkpoint(folder, "model", index_first=False)
    return read_checkpoint(folder, "diffusion_pytorch_model", index_first=True)


def build_unread(
    kind: Any, folder: Path, dtype: torch.dtype, checkpoint: Checkpoint, unread: Placeholders
) -> tuple[torch.nn.Module, list[str]]:
    """Build a component with placeholders; return it with the names of tensors in its files that it does not use.

    Raises:
        ConfigError: tensors are missing, or have another shape or kind than the class wants.
        NotReadable: a tensor is not in the files as it is in the model.
    """
    build = _of_transformers if issubclass(kind, transformers.PreTrainedModel) else _of_diffusers
    module, unexpected = build(kind, folder, dtype, checkpoint, unread)
    for name, tensor in module.state_dict(keep_vars=True).items():
        stored = unread.stored_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if not isinstance(stored, StoredTensor):
            raise NotReadable(f"no file has the tensor {name} in the form that the model needs")
        _check_kind(stored, floating=tensor.is_floating_point())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise NotReadable(f"neither the files nor the class give the tensor {name} a value")
    return module, unexpected


def _of_diffusers(kind: Any, folder: Path, dtype: torch.dtype, checkpoint: Checkpoint, unread: Placeholders) -> tuple[Any, list[str]]:
    config = kind.load_config(folder, local_files_only=True)
    if config.get("quantization_config") is not None:
        raise NotReadable("the component's config.json asks for quantised weights")
    before = kind._set_default_torch_dtype(dtype)
    try:
        with no_init_weights(), accelerate.init_empty_weights():
            module = kind.from_config(config)
    finally:
        torch.set_default_dtype(before)
    found = dict(checkpoint.tensors)
    if not checkpoint.sharded:
        module._fix_state_dict_keys_on_load(found)
    own = module.state_dict(keep_vars=True)
    _check_coverage(own.keys() - found.keys(), folder)
    for name, tensor in own.items():
        _check_shape(found[name], tensor.shape)
        _check_kind(found[name], floating=tensor.is_floating_point())
    for name in own:
        _put(module, name, unread.make(found[name], _dtype_in_diffusers(kind, name, found[name].dtype, dtype)))
    module.register_to_config(_name_or_path=str(folder))
    module.eval()
    ignored = [re.compile(pattern) for pattern in kind._keys_to_ignore_on_load_unexpected or ()]
    return module, [name for name in found.keys() - own.keys() if not any(pattern.search(name) for pattern in ignored)]


def _dtype_in_diffusers(kind: Any, name: str, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that diffusers gives a tensor: integers keep their `stored` one, other tensors get `dtype`.

    Floating tensors with a part of their name in the class's list for it get float32 instead.
    """
    if not stored.is_floating_point:
        return stored
    kept = kind._keep_in_fp32_modules or ()
    return torch.float32 if any(part in kept for part in name.split(".")) else dtype


def _put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


class _DeferredTensor:
    """An unread tensor in the form that transformers slices and converts while it loads.

    A slice is the tensor itself, and `to` makes its placeholder, by default in the file's dtype.
    """

    def __init__(self, stored: StoredTensor, unread: Placeholders) -> None:
        self._stored = stored
        self._unread = unread

    def __getitem__(self, index: Any) -> "_DeferredTensor":
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._unread.make(self._stored, dtype or self._stored.dtype)


def _of_transformers(kind: Any, folder: Path, dtype: torch.dtype, checkpoint: Checkpoint, unread: Placeholders) -> tuple[Any, list[str]]:
    config = kind.config_class.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise NotReadable("the component's config.json asks for quantised weights")
    module, info = _promise(kind, config, dtype, checkpoint.tensors, unread)
    if doubled := _stored_twice(module, unread):
        once = {name: stored for name, stored in checkpoint.tensors.items() if name not in doubled}
        module, info = _promise(kind, config, dtype, once, unread)
    for name, found, expected in info["mismatched_keys"]:
        raise ConfigError(f"{folder}: tensor {name}: expected the shape {tuple(expected)}, found {tuple(found)}")
    _check_coverage(info["missing_keys"], folder)
    if module.can_generate():
        _read_generation_config(module, folder)
    return module, sorted(info["unexpected_keys"])


def _promise(kind: Any, config: Any, dtype: torch.dtype, tensors: Stored, unread: Placeholders) -> tuple[Any, dict[str, Any]]:
    """Return the model with placeholders, and transformers' report of missing, unexpected and mismatched names."""
    promised = {name: _DeferredTensor(stored, unread) for name, stored in tensors.items()}
    asked = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    says = logging.getLogger("transformers.modeling_utils")
    # transformers would warn of what is an error here, and of tied weights as if they were different ones.
    says.disabled = True
    try:
        module, info = kind.from_pretrained(None, config=config, state_dict=promised, **asked)
    finally:
        says.disabled = False
    return module, info


def _stored_twice(module: Any, unread: Placeholders) -> set[str]:
    """Return the names in the files of weights that the model ties, and that were saved with the same contents for each use."""
    wanted = module.get_expanded_tied_weights_keys(all_submodels=True)
    twice = set()
    for name in wanted.keys() - module.all_tied_weights_keys.keys():
        one, other = (unread.stored_of(module.get_parameter(each)) for each in (name, wanted[name]))
        if (
            isinstance(one, StoredTensor)
            and isinstance(other, StoredTensor)
            and one.dtype == other.dtype
            and torch.equal(read_tensor(one), read_tensor(other))
        ):
            twice.add(one.name)
    return twice


def _read_generation_config(module: Any, folder: Path) -> None:
    nowhere = dict.fromkeys(("cache_dir", "proxies", "token", "revision", "trust_remote_code"))
    module.adjust_generation_fn(None, False, None, str(folder), local_files_only=True, force_download=False, subfolder="", **nowhere)


def _check_coverage(missing: Iterable[str], folder: Path) -> None:
    if names := sorted(missing):
        raise ConfigError(f"{folder}: no file has a value for {some_tensors(names)}, which the model needs")


def _check_shape(stored: StoredTensor, expected: torch.Size) -> None:
    if stored.shape != expected:
        raise ConfigError(f"{stored.file.path}: tensor {stored.name}: expected the shape {tuple(expected)}, found {tuple(stored.shape)}")


def _check_kind(stored: StoredTensor, *, floating: bool) -> None:
    if stored.dtype.is_floating_point != floating:
        expected = "a floating-point type" if floating else "an integer type"
        dtype = str(stored.dtype).removeprefix("torch.")
        raise ConfigError(f"{stored.file.path}: tensor {stored.name}: expected {expected}, found {dtype}")
