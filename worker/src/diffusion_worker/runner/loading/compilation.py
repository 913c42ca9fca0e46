# SPDX-License-Identifier: Apache-2.0
"""Compilation of a pipeline's denoisers by regions: each kind of repeated block once, and all blocks of that kind share the code.

Loading adapters compiles nothing again: their slots are part of the layers before anything is compiled
(`DiffusionLoRAManager.make_static`). If a part cannot be compiled, everything runs uncompiled; the log says so once, and `features` too.
"""

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from diffusion_worker.config import Compile
from diffusion_worker.runner.model_call.components import DENOISERS
from diffusion_worker.runner.parallel.sharding import blocks_of

log = logging.getLogger(__name__)


# Modes without CUDA graphs, whose outputs lie where the next block of the same kind writes its own.
MODES = {Compile.DEFAULT: None, Compile.MAX_AUTOTUNE: "max-autotune-no-cudagraphs"}
# The most versions of a function. Blocks of a class differ in their parts, and each is compiled for one row and for more, with and without
# adapters. Torch's own limit is 8.
MOST_VERSIONS = 64
REASON_CHARS = 200


class Compilation:
    """The compiled regions of a pipeline's denoisers; with `Compile.NONE` there are none, and nothing is changed.

    The constructor only replaces the regions' calls, and sets limits for the whole process. Torch compiles a region when it is first
    called.
    """

    def __init__(self, kind: Compile, modules: Mapping[str, nn.Module]) -> None:
        self.regions: list[nn.Module] = []
        self._kind = kind
        self._reason: str | None = None
        self._eager = False
        self._whole = False
        if kind is not Compile.NONE:
            for name in DENOISERS:
                if name in modules:
                    self._add(modules[name])
            _configure()

    @property
    def features(self) -> dict[str, str]:
        """The outcome under the name `compile`: mode and regions, or the reason why all runs uncompiled; empty for `Compile.NONE`."""
        if self._kind is Compile.NONE:
            return {}
        if self._reason is not None:
            return {"compile": f"none: compilation failed: {self._reason}"}
        return {"compile": f"{self._kind} ({'whole' if self._whole else f'regional, {len(self.regions)} blocks'})"}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Run the regions uncompiled in this context, for calls that must be bit-equal to diffusers', or while the model may change."""
        before, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = before

    def _add(self, module: nn.Module) -> None:
        found = regions_of(module)
        self._whole = self._whole or found == [module]
        self.regions += found
        for region in found:
            # `Module.compile` sets this attribute as well. It is no part of a copy of the module.
            region._compiled_call_impl = self._call_of(region)

    def _call_of(self, region: nn.Module) -> Callable[..., Any]:
        plain: Callable[..., Any] = region._call_impl
        compiled = torch.compile(plain, fullgraph=True, mode=MODES[self._kind])

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._eager or self._reason is not None:
                return plain(*args, **kwargs)
            _let_rows_vary(itertools.chain(args, kwargs.values()))
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                failure = error
            # A request at fault fails here too, with an error for its sender.
            output = plain(*args, **kwargs)
            self._give_up(region, failure)
            return output

        return call

    def _give_up(self, region: nn.Module, error: Exception) -> None:
        """Run all regions uncompiled from now on, keep the reason for `features`, and log a warning.

        Compiling in vain at each call would be slow.
        """
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        self._reason = f"{type(error).__name__}: {first_line}"[:REASON_CHARS]
        log.warning("--compile %s: %s cannot be compiled, the model runs uncompiled: %s", self._kind, type(region).__name__, self._reason)
        log.debug("the reason it cannot be compiled", exc_info=error)


def regions_of(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a denoiser to compile: the blocks that its class names for this in diffusers, if it has any.

    Otherwise they are the entries of its module lists whose class occurs more than once, or else the denoiser itself.
    """
    named = set(getattr(module, "_repeated_blocks", None) or ())
    if found := [part for part in module.modules() if type(part).__name__ in named]:
        return found
    blocks = list(blocks_of(module))
    kinds = Counter(map(type, blocks))
    return [block for block in blocks if kinds[type(block)] > 1] or [module]


def _let_rows_vary(arguments: Iterable[Any]) -> None:
    """Tell torch.compile that the number of rows is dynamic, because requests join and leave between ticks.

    Rows are the first dimension of the first tensor, and of those tensors with the same size there. A single row is not marked, because it
    is compiled separately. Image sizes stay static, since they are the same in every tick and static sizes compile to faster code.
    """
    tensors = [value for value in arguments if isinstance(value, torch.Tensor) and value.dim() > 0]
    rows = tensors[0].shape[0] if tensors else 1
    if rows > 1:  # a single row is always compiled separately
        for tensor in tensors:
            if tensor.shape[0] == rows:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _configure() -> None:
    """Let Dynamo keep `MOST_VERSIONS` versions of a function and, without a GPU, Inductor use a single thread.

    This holds for the whole process.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit = MOST_VERSIONS
    if not torch.cuda.is_available():
        # The C++ compiler starts a process for each kernel anyway; more threads would each import torch again.
        inductor.compile_threads = 1
