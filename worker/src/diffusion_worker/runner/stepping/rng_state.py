# SPDX-License-Identifier: Apache-2.0
"""The global random numbers of one request.

Some pipelines draw a few of their numbers without the generator they were given, such as SD 3's ControlNet for its control image. Some
models draw inside their calls, such as GLM-Image for its tokens and LTX in its decoder. These numbers would depend on the other requests.
So each request has a global state of its own, seeded like the request, in its fiber and in calls made for it alone. This equals
`torch.manual_seed(seed)` before diffusers' call.
"""

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch


def _global_generators() -> list[torch.Generator]:
    """List torch's default generators: for the CPU, then for the current GPU, unless CUDA is uninitialized and should stay so."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


class DrawsNumbers(Exception):
    """Raised in a call that draws from the global generators, where it serves several requests, or some rows of one."""


class OwnRandomness:
    """A context in which the global generators are this request's, and are restored at its end.

    Generators of a GPU keep a seed and an offset on the host, so reading them does not wait for the device.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: list[torch.Tensor] | None = None
        self._begun: list[torch.Tensor] = []
        self._outside: list[torch.Tensor] = []

    def __enter__(self) -> None:
        generators = _global_generators()
        if self._own is None:
            self._own = [torch.Generator(generator.device).manual_seed(self._seed).get_state() for generator in generators]
        self._begun = self._own
        self._outside = _exchange(generators, self._own)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._own = _exchange(_global_generators(), self._outside)

    @property
    def drew(self) -> bool:
        """Return whether numbers were drawn, or a seed set, while the context was entered last."""
        assert self._own is not None
        return not all(map(torch.equal, self._begun, self._own))

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Take back all draws of a block that raises, so that a second attempt draws the same numbers on every rank."""
        before = self._own
        try:
            yield
        except BaseException:
            self._own = before
            raise


def _exchange(generators: list[torch.Generator], states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Set the states and return those that were there."""
    before = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    return before
