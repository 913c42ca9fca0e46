# SPDX-License-Identifier: Apache-2.0
"""The global random numbers of one request.

Some pipelines draw a few of their numbers without the generator they were given (SD 3's ControlNet, where it encodes the control image).
Between the fibers of a process these numbers would depend on the other requests. So each fiber has a global state of its own, seeded like
the request. For a request alone, this equals `torch.manual_seed(seed)` before diffusers' call.
"""

from types import TracebackType

import torch


def _global_generators() -> list[torch.Generator]:
    """List torch's default generators: for the CPU, then for the current GPU, unless CUDA is uninitialized and should stay so."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


class OwnRandomness:
    """A context in which the global generators are this request's. They are restored at its end, which costs two microseconds in all."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: list[torch.Tensor] | None = None
        self._outside: list[torch.Tensor] = []

    def __enter__(self) -> None:
        generators = _global_generators()
        if self._own is None:
            self._own = [torch.Generator(generator.device).manual_seed(self._seed).get_state() for generator in generators]
        self._outside = _exchange(generators, self._own)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._own = _exchange(_global_generators(), self._outside)


def _exchange(generators: list[torch.Generator], states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Set the states and return those that were there."""
    before = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    return before
