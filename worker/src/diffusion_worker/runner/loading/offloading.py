# SPDX-License-Identifier: Apache-2.0
"""Weights in host memory that are on the device only while they are computed with: by component, or by layers.

Offloading by component is the worker's own: a single copy of a component's slab loads it. Unloading costs nothing, since the weights never
left the slab. Offloading by layers is diffusers' group offloading, which loads the next block while one computes.
"""

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from diffusers.hooks import apply_group_offloading
from torch import nn

from diffusion_worker.config import Offload
from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.model_call.call import ModelCall, execute
from diffusion_worker.runner.model_call.components import DENOISERS

HOST = torch.device("cpu")


def check_device(kind: Offload, device: torch.device) -> None:
    """Raise ConfigError where offloading is asked for on a CPU."""
    if kind is not Offload.NONE and device.type == "cpu":
        raise ConfigError(f"--offload {kind}: expected a GPU, found a CPU, where weights are in host memory anyway")


def home_of(kind: Offload, device: torch.device) -> torch.device:
    """Return the CPU if offloading is on, because weights then stay in host memory between calls; otherwise return `device`."""
    return device if kind is Offload.NONE else HOST


class Offloading:
    """The modules of one pipeline, of which one at a time (`model`) or a few layers (`group`) are on the device."""

    def __init__(self, kind: Offload, device: torch.device) -> None:
        self._kind = kind
        self._device = device
        self._residences: weakref.WeakKeyDictionary[nn.Module, Residence] = weakref.WeakKeyDictionary()
        self._here: Residence | None = None

    @property
    def features(self) -> dict[str, str]:
        """The offloading in use, under the name `offload`; empty without offloading."""
        return {} if self._kind is Offload.NONE else {"offload": str(self._kind)}

    def manage(self, modules: Mapping[str, nn.Module]) -> None:
        """Set up diffusers' offloading for these modules if the kind is `group`; for other kinds do nothing, because `execute` does all."""
        for name, module in modules.items():
            if self._kind is Offload.GROUP and any(True for _ in module.parameters()):
                _group(module, self._device, denoises=name in DENOISERS)

    def execute(self, module: nn.Module, call: ModelCall) -> Any:
        """Call a module; with offloading, first move its arguments to the device, and its weights if the kind is `model`.

        These weights stay there until another module is called or `send_home`.
        """
        if self._kind is Offload.NONE:
            return execute(module, call)
        if self._kind is Offload.MODEL:
            self._bring(module)
        return execute(module, msgspec.structs.replace(call, arguments=_moved(call.arguments, self._device)))

    def send_home(self) -> None:
        """Let the component that `execute` brought to the device use its weights in host memory again; do nothing if there is none."""
        if self._here is not None:
            self._here.leave()
            self._here = None

    def _bring(self, module: nn.Module) -> None:
        # Copies in other precisions are made while requests run, so a module may be new here.
        residence = self._residences.get(module)
        if residence is None:
            self.send_home()
            residence = self._residences[module] = Residence(module)
        if residence is not self._here:
            # The last one leaves first, so that never more than one is on the device.
            self.send_home()
            residence.come(self._device)
            self._here = residence


class _Home(NamedTuple):
    tensor: torch.Tensor
    data: torch.Tensor


class Residence:
    """The location of a module's weights: at home in host memory, and for a while on the device. The constructor brings them home."""

    def __init__(self, module: nn.Module) -> None:
        homes: dict[int, _Home] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            homes.setdefault(id(tensor), _Home(tensor, tensor.data.to(HOST)))
        # Tensors in the same memory, a slab, come in one copy.
        self._blocks: dict[int, list[_Home]] = {}
        for home in homes.values():
            self._blocks.setdefault(home.data.untyped_storage().data_ptr(), []).append(home)
        self.leave()

    def come(self, device: torch.device) -> None:
        """Copy every block of weights to `device` in one piece, and make the module's tensors views of the copies.

        The copies may still run at return.
        """
        for homes in self._blocks.values():
            first = min(_begin(home.data) for home in homes)
            last = max(_begin(home.data) + _span(home.data) for home in homes)
            there = torch.empty(last - first, dtype=torch.uint8, device=device)
            there.copy_(_bytes_of(homes[0].data, first, last), non_blocking=True)
            for home in homes:
                begin = _begin(home.data) - first
                typed = there[begin : begin + _span(home.data)].view(home.data.dtype)
                home.tensor.data = typed.as_strided(home.data.shape, home.data.stride())

    def leave(self) -> None:
        """Use the weights in host memory again. Nothing is copied, because computing changes no weights."""
        for homes in self._blocks.values():
            for home in homes:
                home.tensor.data = home.data


def _begin(data: torch.Tensor) -> int:
    """Return a tensor's offset in its storage, in bytes."""
    return int(data.storage_offset()) * data.element_size()


def _span(data: torch.Tensor) -> int:
    """Measure the memory from a tensor's start to its end in bytes, with the gaps that strides leave; 0 if it is empty."""
    if data.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
    return (last + 1) * data.element_size()


def _bytes_of(data: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """View a part of the storage behind a tensor as uint8, from byte `first` to before byte `last`. Other tensors may lie in it too."""
    found: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage(), first, (last - first,))  # type: ignore[call-overload]
    return found


def _moved(value: Any, device: torch.device) -> Any:
    """Move the tensors in an argument to `device`, through nested dicts, lists and tuples.

    Objects of other kinds are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if type(value) in (list, tuple) else value


def _group(module: nn.Module, device: torch.device, *, denoises: bool) -> None:
    """Offload a denoiser block by block, with the next one loaded while one computes; other modules layer by layer.

    Those have other methods than `forward` to call, and hooks of whole blocks would not notice such calls.
    """
    apply_group_offloading(
        module,
        onload_device=device,
        offload_device=HOST,
        offload_type="block_level" if denoises else "leaf_level",
        num_blocks_per_group=1 if denoises else None,
        use_stream=denoises and device.type == "cuda",
    )
