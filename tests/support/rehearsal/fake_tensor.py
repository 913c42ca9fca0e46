# SPDX-License-Identifier: Apache-2.0
"""A fake CUDA tensor: it says `cuda:0`, holds a tensor of the CPU, and computes with that.

The C++ side of it is on `meta`, because indexing would ask the driver for a device of its own. So operations that C++ answers by itself are
replaced here: those that make tensors of lists and numbers would make them on `meta`, without contents.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from support.rehearsal.mode import Rehearsal

CUDA = torch.device("cuda", 0)
_TO_NUMPY = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."

# The rehearsals that run now; the last one computes.
running: list["Rehearsal"] = []


def rehearsal() -> "Rehearsal":
    """Return the rehearsal that runs now. Without one raise RuntimeError, because fake tensors mean nothing outside."""
    if not running:
        raise RuntimeError("a fake CUDA tensor is used outside of a rehearsal")
    return running[-1]


class FakeCudaTensor(torch.Tensor):
    """A tensor of the rehearsal's device. `inner` has its contents."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "FakeCudaTensor":
        assert type(inner) is not FakeCudaTensor
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            *(cls, inner.size()),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("meta"),
            requires_grad=False,
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return rehearsal().dispatch(func, args, kwargs or {})

    # mypy sees the attributes of torch.Tensor as variables.
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        become(self, value)

    def __repr__(self, **_: Any) -> str:
        return f"FakeCudaTensor({tuple(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        made: torch.Tensor = self.clone()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=False)
        memo[id(self)] = made
        return made

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory is never reused while a tensor is there."""

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(_TO_NUMPY)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(_TO_NUMPY)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or CUDA)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this tensor if device, dtype and memory format stay and no copy is asked for, and otherwise a converted one."""
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        same_device = device is None or device.type == "cuda"
        if same_device and dtype in (None, self.dtype) and memory_format is None and not kwargs.get("copy"):
            return self
        return super().to(*args, **kwargs)

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def __getitem__(self, key: Any) -> torch.Tensor:
        return super().__getitem__(_lists_sent(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        rehearsal().set_item(self, _lists_sent(key), value)


def become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let the object `tensor`, fake or not, show the memory of `value` in place. It stays a Parameter if it was, and keeps its other
    attributes."""
    with torch.inference_mode(tensor.is_inference()):
        made = FakeCudaTensor(value.inner) if isinstance(value, FakeCudaTensor) else value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=False)
    kept = {name: item for name, item in vars(tensor).items() if name != "inner"}
    torch.utils.swap_tensors(tensor, made)
    vars(tensor).update(kept)


def inner_of(value: Any) -> Any:
    """Return the contents of a fake tensor, and any other value unchanged."""
    return value.inner if isinstance(value, FakeCudaTensor) else value


def _lists_sent(key: Any) -> Any:
    """Replace lists and arrays in an index by tensors of the device: a wait, because they come from memory that is not pinned."""
    if isinstance(key, list | np.ndarray):
        return torch.tensor(key, device=CUDA)
    return tuple(map(_lists_sent, key)) if isinstance(key, tuple) else key
