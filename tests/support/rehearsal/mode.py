# SPDX-License-Identifier: Apache-2.0
"""The rehearsal: a dispatch mode that computes on the CPU what the code asks of a CUDA device, and records what would wait for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from support.rehearsal.clocks import Clocks, is_pinned, pin
from support.rehearsal.fake_tensor import CUDA, FakeCudaTensor, inner_of, running
from support.rehearsal.operations import INDEXING, Cost, cost_of_indices, takes_number, waits
from support.rehearsal.records import Records

CPU = torch.device("cpu")
# C++ asks for `meta` where a fake tensor is beside.
THERE = ("cuda", "meta")
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"

BeforeOperation = Callable[[str], None]


class Rehearsal(TorchDispatchMode):
    """A device made of the CPU. `before` is called with the name of each operation on it, and may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.records = Records()
        self.clocks = Clocks(self.records)
        self.before: BeforeOperation = lambda name: None

    def __enter__(self) -> "Rehearsal":
        running.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        running.pop()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import its compiler, which takes seconds; nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation: on the host where none of its tensors and devices is the rehearsal's, otherwise as the device would."""
        flat = tree_flatten((args, kwargs))[0]
        tensors = [item for item in flat if isinstance(item, torch.Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, FakeCudaTensor)]
        if not there and not any(isinstance(item, torch.device) and item.type in THERE for item in flat):
            return self._on_host(func, args, kwargs, tensors)
        # In inference mode, and on tensors made in it, operations arrive whole (`.item()`, `linear`). Their parts tell what they need.
        whole = torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in there)
        if whole and func._can_decompose():
            with self:
                parts = func.decompose(*tree_map(_numbered, args), **tree_map(_numbered, kwargs))
            if parts is not NotImplemented:
                return parts
        return self._on_device(func, args, kwargs, tensors, there)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        name = func._schema.name
        if name == "aten::is_pinned":
            return is_pinned(args[0])
        if name in ("aten::pin_memory", "aten::_pin_memory"):
            return pin(args[0].clone())
        pinned = kwargs.pop("pin_memory", False)
        for tensor in tensors:
            if is_pinned(tensor) and not func.is_view:
                self.clocks.host_reads(tensor)
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and is_pinned(args[0]):
            self.clocks.host_writes(args[0])
        made = func(*args, **kwargs)
        return pin(made) if pinned else made

    def _on_device(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], there: list[FakeCudaTensor]) -> Any:
        name = func._schema.name
        target = kwargs.get("device")
        on_device = bool(there) if target is None else target.type in THERE
        if target is not None:
            kwargs = kwargs | {"device": CPU}
        pinned = kwargs.pop("pin_memory", False) and not on_device
        self.before(name)
        self.records.operations += 1
        self._count(func, args, kwargs, tensors, there, on_device)
        if func.is_view:
            made = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
            # Views of what was made outside of inference mode are no inference tensors either, and C++ relies on that.
            with torch.inference_mode(there[0].is_inference() if there else torch.is_inference_mode_enabled()):
                return _wrap(made, there, on_device)
        made = self._queue(func, args, kwargs, there)
        if name == "aten::_local_scalar_dense":
            return made
        wrapped = _wrap(made, there, on_device)
        return pin(wrapped) if pinned else wrapped

    def _queue(self, func: Any, args: Any, kwargs: dict[str, Any], there: list[FakeCudaTensor]) -> Any:
        """Compute on the CPU, as a piece of work of the current stream, and return the CPU's result.

        Raises:
            NotImplementedError: the operation changed the shape of a tensor in place.
        """
        moment = self.clocks.queue()
        for tensor in there:
            self.clocks.device_reads(tensor)
        made = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, torch.Tensor):
                tensor.untyped_storage().written_at = moment
        for tensor in there:
            if tensor.inner.shape != tensor.shape:
                raise NotImplementedError(f"{func}: a fake tensor cannot change its shape in place")
        return made

    def _count(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], there: list[FakeCudaTensor], on_device: bool
    ) -> None:
        """Record the waits and copies of an operation; raise RuntimeError where CUDA would, for tensors of two devices."""
        name = func._schema.name
        host = [tensor for tensor in tensors if not isinstance(tensor, FakeCudaTensor)]
        if name in ("aten::copy_", "aten::_copy_from"):
            source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], args[1])
            if isinstance(source, FakeCudaTensor) != isinstance(target, FakeCudaTensor):
                self.copied(source, target, non_blocking=bool((args[2] if len(args) > 2 else False) or kwargs.get("non_blocking")))
        elif name == "aten::_to_copy":
            if bool(there) != on_device:
                self.copied(args[0], None, non_blocking=bool(kwargs.get("non_blocking")), pinned=bool(kwargs.get("pin_memory")))
        elif name in INDEXING:
            self._count_indexing(args)
        else:
            self._check_devices(func, host, there, kwargs, on_device)
        if there and waits(name, kwargs, func._overloadname):
            self.wait(name)

    def _check_devices(
        self, func: Any, host: list[torch.Tensor], there: list[FakeCudaTensor], kwargs: dict[str, Any], on_device: bool
    ) -> None:
        generator = kwargs.get("generator")
        if generator is not None and on_device and generator.device.type == "cpu":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if there and any(tensor.dim() > 0 or not takes_number(func) for tensor in host):
            raise RuntimeError(f"{TWO_DEVICES} ({func})")

    def _count_indexing(self, args: Any) -> None:
        target, indices, *rest = args
        given = [(index, isinstance(index, FakeCudaTensor)) for index in indices if index is not None]
        if not isinstance(target, FakeCudaTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        value = (rest[0], isinstance(rest[0], FakeCudaTensor)) if rest and isinstance(rest[0], torch.Tensor) else None
        if value is not None and not value[1] and value[0].dim() > 0:
            raise RuntimeError(f"{TWO_DEVICES} (index_put)")
        self.charge(cost_of_indices(given, value))

    def charge(self, cost: Cost) -> None:
        """Record the waits and copies of `cost`. With a wait, the host knows all work of the current stream to be done."""
        for operation in cost.copies:
            self.records.copy(operation)
        for operation in cost.waits:
            self.wait(operation)

    def wait(self, operation: str) -> None:
        """Record a wait of the host for the current stream. The host then knows all work of that stream to be done."""
        self.records.wait(operation)
        self.clocks.finish()

    def copied(self, source: torch.Tensor, target: torch.Tensor | None, *, non_blocking: bool, pinned: bool = False) -> None:
        """Record a copy between host and device, and its wait unless it is asynchronous.

        Only a `non_blocking` copy is asynchronous, and only to the device or to pinned memory. Memory that is not pinned is staged.
        """
        to_device = not isinstance(source, FakeCudaTensor)
        here = source if to_device else target
        pinned = pinned or (here is not None and is_pinned(here))
        self.records.copy("a copy to the device" if to_device else "a copy to the host")
        if not non_blocking or not (to_device or pinned):
            self.wait("a blocking copy to the device" if to_device else "a copy to the host")
        elif pinned and here is not None:
            storage, moment = here.untyped_storage(), self.clocks.queue()
            if to_device:
                storage.read_at = moment
            else:
                storage.written_at = moment

    def set_item(self, tensor: FakeCudaTensor, key: Any, value: Any) -> None:
        """Do `tensor[key] = value` in place, and record its waits and copies. RuntimeError where CUDA raises it, for tensors of two
        devices."""
        self.before("aten::index_put_")
        keys = key if isinstance(key, tuple) else (key,)
        indices = [(each, isinstance(each, FakeCudaTensor)) for each in keys if isinstance(each, torch.Tensor)]
        # A single integer on the device selects, and is waited for.
        for index, there in indices:
            if index.dim() == 0 and not index.dtype.is_floating_point and index.dtype is not torch.bool and there:
                self.wait("an index of a single number")
        indices = [(index, there) for index, there in indices if index.dim() > 0 or index.dtype is torch.bool]
        there = isinstance(value, FakeCudaTensor)
        given = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        if indices:
            if not there and given.dim() > 0:
                raise RuntimeError(f"{TWO_DEVICES} (index_put)")
            self.charge(cost_of_indices(indices, (given, there)))
        elif not there and (given.dim() > 0 or tensor.inner[tree_map(inner_of, key)].dim() == 0):
            self.copied(given, None, non_blocking=False)
        self.clocks.queue()
        if there:
            self.clocks.device_reads(value)
        tensor.inner[tree_map(inner_of, key)] = inner_of(value)
        self.clocks.device_writes(tensor)


def _wrap(made: Any, there: list[FakeCudaTensor], on_device: bool) -> Any:
    """Return results as fake tensors if `on_device`, otherwise unchanged; for an operation in place, return the fake tensor that was
    given."""
    given = {id(tensor.inner): tensor for tensor in there}

    def wrap(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or isinstance(item, FakeCudaTensor):
            return item
        if id(item) in given:
            return given[id(item)]
        return FakeCudaTensor(item) if on_device else item

    return tree_map(wrap, made)


def _numbered(value: Any) -> Any:
    """Return `cuda:0` for any CUDA device, because torch would ask the driver for the current one; return other values unchanged."""
    return CUDA if isinstance(value, torch.device) and value.type == "cuda" else value
