# SPDX-License-Identifier: Apache-2.0
"""Copies to the accelerator that do not wait, in the code of a pipeline and its scheduler.

A plain copy from the host waits until the accelerator has done all work before. Pipelines and schedulers make such copies in each step:
noise that a generator of the CPU drew, a few coefficients, a strength. Here they go through pinned memory, and the host goes on.
"""

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Larger tensors are copied as before: torch keeps pinned memory for good.
MOST_BYTES = 16 << 20
_MAKING = (torch.tensor, torch.as_tensor)


class AsyncCopies(TorchFunctionMode):
    """A mode in which tensors of the host go to an accelerator through pinned memory, and small systems are solved without a check.

    The check of `torch.linalg.solve` is whether the matrix is singular, and waits for the answer. Without it the result is infinite.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKING and _is_accelerator(kwargs.get("device")):
            return _made(func, args, kwargs)
        if func is torch.Tensor.to and _can_be_pinned(args[0]):
            return _sent(args, kwargs)
        if func is torch.Tensor.copy_ and args[0].is_cuda and isinstance(args[1], torch.Tensor) and _can_be_pinned(args[1]):
            return func(args[0], args[1].pin_memory(), non_blocking=True)
        if func is torch.linalg.solve and args[0].is_cuda:
            return torch.linalg.solve_ex(*args, **kwargs)[0]
        return func(*args, **kwargs)


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Do as `torch.tensor` or `torch.as_tensor` for an accelerator: make the tensor on the host, and send it through pinned memory.

    A tensor that is on an accelerator is left to the function itself.
    """
    if isinstance(args[0], torch.Tensor) and args[0].is_cuda:
        made: torch.Tensor = func(*args, **kwargs)
        return made
    here = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    return _through_pinned(here, kwargs["device"]) if _can_be_pinned(here) else torch.Tensor.to(here, kwargs["device"])


def _sent(args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Do as `Tensor.to` for a tensor of the host. The precision is changed there, as torch does."""
    rest = {name: value for name, value in kwargs.items() if name not in ("copy", "non_blocking")}
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:3], **rest)
    if not _is_accelerator(device):
        changed: torch.Tensor = torch.Tensor.to(*args, **kwargs)
        return changed
    here = args[0] if dtype is None else torch.Tensor.to(args[0], dtype)
    return _through_pinned(here if memory_format is None else here.contiguous(memory_format=memory_format), device)


def _through_pinned(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    return torch.Tensor.to(tensor.pin_memory(), device, non_blocking=True)


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Return whether to copy a tensor by pinned memory: a plain one on the host, of at most `MOST_BYTES`, that is not pinned yet.

    The owner of a pinned one may write to it once a plain copy has returned.
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.device.type == "cpu" and tensor.nbytes <= MOST_BYTES and not tensor.is_pinned()


def _is_accelerator(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def async_copies() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which copies to the accelerator do not wait; without an accelerator in use it does nothing."""
    return AsyncCopies() if torch.cuda.is_initialized() else contextlib.nullcontext()  # type: ignore[no-untyped-call]
