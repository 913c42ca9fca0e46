# SPDX-License-Identifier: Apache-2.0
"""The autocast and gradient state of one request. Fibers share their thread, and one may stop inside a context of its own."""

from types import TracebackType
from typing import NamedTuple

import torch

DEVICES = ("cpu", "cuda")


class _State(NamedTuple):
    gradients: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]


def _now() -> _State:
    autocast = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)
    return _State(torch.is_grad_enabled(), autocast)


def _set(state: _State) -> None:
    torch._C._set_grad_enabled(state.gradients)
    for device, (enabled, dtype) in zip(DEVICES, state.autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


class OwnPrecision:
    """A context with torch's autocast and gradient settings as the request left them last, at first those outside.

    At its end the settings outside return.
    """

    def __init__(self) -> None:
        self._own: _State | None = None
        self._outside: _State | None = None

    def __enter__(self) -> None:
        self._outside = _now()
        if self._own is not None:
            _set(self._own)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        now = _now()
        assert self._outside is not None
        self._own = None if now == self._outside else now
        if self._own is not None:
            _set(self._outside)
