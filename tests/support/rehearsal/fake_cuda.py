# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` without a driver: while `rehearse` runs, its functions, streams and events are the rehearsal's."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from support.rehearsal.clocks import Clock, pin
from support.rehearsal.fake_tensor import CUDA, FakeCudaTensor, rehearsal
from support.rehearsal.mode import Rehearsal
from support.rehearsal.slab import FakeSlab

BYTES = 100 << 30


class FakeStream:
    """A stream of the rehearsal's device; number 0 is the default one."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self.number = rehearsal().clocks.new_stream() if number is None else number
        self.device = CUDA
        self.cuda_stream = self.number

    def synchronize(self) -> None:
        rehearsal().records.wait("Stream.synchronize")
        rehearsal().clocks.finish(self.number)

    def wait_stream(self, other: "FakeStream") -> None:
        clocks = rehearsal().clocks
        clocks.streams[self.number].learn(clocks.streams[other.number])

    def wait_event(self, event: "FakeEvent") -> None:
        rehearsal().clocks.streams[self.number].learn(event.clock)

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        event = event or FakeEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> "FakeStream":
        clocks = rehearsal().clocks
        self._before, clocks.current = clocks.current, self.number
        return self

    def __exit__(self, *error: Any) -> None:
        rehearsal().clocks.current = self._before


class FakeEvent:
    """An event of the rehearsal's device."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.clock = Clock()

    def record(self, stream: FakeStream | None = None) -> None:
        clocks = rehearsal().clocks
        number = clocks.current if stream is None else stream.number
        clocks.queue(number)
        self.clock = Clock(clocks.streams[number])

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or _current_stream()).wait_event(self)

    def synchronize(self) -> None:
        rehearsal().records.wait("Event.synchronize")
        rehearsal().clocks.host.learn(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


def _current_stream(device: Any = None) -> FakeStream:
    return FakeStream(number=rehearsal().clocks.current)


def _synchronize(device: Any = None) -> None:
    rehearsal().records.wait("torch.cuda.synchronize")
    rehearsal().clocks.finish_all()


def _replacements() -> dict[str, Any]:
    """Return the stand-ins for functions and classes of `torch.cuda`, by name."""
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": _synchronize,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "current_stream": _current_stream,
        "default_stream": lambda device=None: FakeStream(number=0),
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (BYTES, BYTES),
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "rehearsal",
        "is_bf16_supported": lambda including_emulation=True: True,
        # Numbers drawn without a generator are those of the CPU, so that images can be compared.
        "default_generators": (torch.default_generator,),
    }


def _sending(build: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `torch.tensor` or `as_tensor` for both devices: contents are made on the host and sent, which waits.

    A number that lies on the device, in a list, is waited for as well.
    """

    def sent(data: Any, *rest: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        to_device = device is not None and torch.device(device).type == "cuda"
        if isinstance(data, FakeCudaTensor):
            if build is _AS_TENSOR:
                return data.to(device=device, dtype=kwargs.get("dtype"))
            return data.detach().clone().to(device=device, dtype=kwargs.get("dtype"))
        data = tree_map(lambda item: item.item() if isinstance(item, FakeCudaTensor) else item, data)
        made = build(data, *rest, device=None if to_device else device, **kwargs)
        if to_device:
            return made.to(CUDA)
        return pin(made) if pin_memory else made

    return sent


def _pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `torch.empty` or the like: with `pin_memory=True` its tensor counts as pinned, in threads without the rehearsal's mode too."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return pin(tensor) if pin_memory else tensor

    return made


_AS_TENSOR = torch.as_tensor
_TO = torch.Tensor.to


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Do `Tensor.to`, but give a CUDA device without a number the number 0: C++ would ask the driver for it."""
    return _TO(tensor, *map(_numbered, args), **{name: _numbered(value) for name, value in kwargs.items()})


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    return _TO(tensor, CUDA, non_blocking=non_blocking)


def _numbered(value: Any) -> Any:
    return CUDA if isinstance(value, str | torch.device) and str(value) == "cuda" else value


@contextlib.contextmanager
def _replaced(target: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextlib.contextmanager
def rehearse() -> Iterator[Rehearsal]:
    """Let the CPU stand for a CUDA device until the block ends, and provide the rehearsal with its records.

    Parts of torch and the worker's slabs are replaced meanwhile.
    """
    from diffusion_worker.memory import slabs, weights

    # At the first use of a device as a context, torch keeps which functions obey one for ever: it must be the real ones.
    with torch.device("cpu"):
        torch.empty(0)
    found = Rehearsal()
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    # `module.to(dtype)` would change the C++ side of a fake tensor only.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            _replaced(torch.cuda, **_replacements()),
            _replaced(torch, tensor=_sending(torch.tensor), as_tensor=_sending(torch.as_tensor)),
            _replaced(torch, empty=_pinning(torch.empty), zeros=_pinning(torch.zeros)),
            _replaced(torch.Tensor, to=_to, cuda=_cuda),
            _replaced(slabs, DeviceSlab=FakeSlab),
            _replaced(weights, DeviceSlab=FakeSlab),
            found,
        ):
            yield found
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)
