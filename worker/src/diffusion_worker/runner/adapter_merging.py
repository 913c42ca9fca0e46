# SPDX-License-Identifier: Apache-2.0
"""Merges the adapter that all traffic uses into the denoisers' weights, and gives those back their own contents before any other call.

What is merged is added to the weights in their slabs; their mirror, from which a model wakes as well, makes them bit by bit
what they were. When that is worth it is `merge_policy`'s to say.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from diffusion_worker.config import Compile, Offload, Quantization, WorkerConfig
from diffusion_worker.errors import ConfigError, Fault
from diffusion_worker.lora.adapter_layers import Delta
from diffusion_worker.lora.model_manager import DiffusionLoRAManager
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import LoRAUse
from diffusion_worker.runner.faults import RankFault
from diffusion_worker.runner.merge_policy import MOST_KNOWN, MergePolicy
from diffusion_worker.runner.pipeline_view import DENOISERS
from diffusion_worker.runner.stand_in import forget_copies

log = logging.getLogger(__name__)

Clock = Callable[[], float]


def why_no_merging(config: WorkerConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why nothing is merged with these options; None where it can be."""
    reasons = {
        "more ranks than one, whose clocks would not agree": config.ranks > 1,
        f"a {device.type}, where calls are not timed one by one": device.type != "cpu",
        f"weights of {str(dtype).removeprefix('torch.')}, in which a merge is not exact": dtype is not torch.float32,
        f"--quantization {config.quantization}": config.quantization is not Quantization.NONE,
        f"--offload {config.offload}": config.offload is not Offload.NONE,
        f"--compile {config.compile}": config.compile is not Compile.NONE,
    }
    return next((reason for reason, found in reasons.items() if found), None)


class AdapterMerging:
    """The adapter that is merged into the denoisers of a pipeline, if any; `merged` is its identity with its strength."""

    def __init__(
        self,
        loras: DiffusionLoRAManager,
        weights: ModelWeights,
        modules: Collection[str],
        *,
        policy: MergePolicy | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`modules` are the names of the pipeline's components, placed in `weights`; `clock` gives seconds."""
        self._loras = loras
        self._weights = weights
        # Text encoders are called too seldom.
        self._denoisers = [name for name in DENOISERS if name in modules]
        self._policy = MergePolicy() if policy is None else policy
        self._clock = clock
        self._fitting: dict[str, bool] = {}
        self._changed: list[torch.Tensor] = []
        self.merged: str | None = None

    @contextlib.contextmanager
    def rows(self, component: str, uses: Sequence[Sequence[LoRAUse]], shape: tuple[int, ...], *, plain: bool) -> Iterator[None]:
        """While a call of a component runs: the adapters of its rows, beside the weights or merged into them.

        `plain` calls are made as diffusers makes them, with nothing merged.

        Raises:
            RequestError: AdapterNotLoaded. RankFault: the weights cannot be made their own again.
        """
        own = self._loras.set_adapter_mapping(component, uses) if component not in self._denoisers else None
        with self._denoising(component, uses, shape, plain) if own is None else own:
            yield

    def restore(self) -> None:
        """Have nothing merged: the weights are bit by bit what they were; raises RankFault if they cannot be."""
        if self.merged is None:
            return
        began = self._clock()
        try:
            self._weights.refill(self._changed)
        except ConfigError as error:
            raise RankFault(Fault.DEFECT, f"the weights without an adapter cannot be read again: {error}") from error
        self._policy.restoring_took(self._clock() - began)
        self._forget()

    def released(self) -> None:
        """The weights were given back: they come from their mirrors again, where nothing is merged."""
        self._policy.forget_merged()
        self._forget()

    @contextlib.contextmanager
    def _denoising(self, component: str, uses: Sequence[Sequence[LoRAUse]], shape: tuple[int, ...], plain: bool) -> Iterator[None]:
        use = None if plain else self._used_by_all(uses)
        identity = None if use is None else self._loras.identity_of(use)
        # One that does not change this denoiser is the same to it whether it is merged or not: nothing is to be learnt.
        concerned = use is None or self._loras.identity_in(component, [use]) is not None
        wanted = self._policy.decide(identity, (component, shape)) if concerned else identity if self.merged == identity else None
        if wanted != self.merged:
            self.restore()
            if wanted is not None and use is not None:
                self._merge(wanted, use)
        began = self._clock()
        with contextlib.nullcontext() if self.merged is not None else self._loras.set_adapter_mapping(component, uses):
            yield
        if concerned:
            self._policy.took(self._clock() - began)

    def _used_by_all(self, uses: Sequence[Sequence[LoRAUse]]) -> LoRAUse | None:
        """The one adapter that every row uses alike, if it can be merged."""
        used = {tuple(use for use in row if use.scale) for row in uses}
        row = used.pop() if len(used) == 1 else ()
        return row[0] if len(row) == 1 and self._fits(row[0]) else None

    def _fits(self, use: LoRAUse) -> bool:
        """Whether all that an adapter changes in the denoisers can be added to weights of single precision."""
        identity = self._loras.identity_of(use)
        if identity is None:
            return False
        if identity not in self._fitting:
            if len(self._fitting) == MOST_KNOWN:
                self._fitting.clear()
            deltas = self._deltas(use)
            weights = [delta.weight for delta in deltas or []]
            single = all(weight.dtype is torch.float32 for weight in weights)
            self._fitting[identity] = bool(weights) and single and self._weights.holds(weights)
        return self._fitting[identity]

    def _deltas(self, use: LoRAUse) -> list[Delta] | None:
        """Of all denoisers; None where one of them cannot have the adapter merged."""
        found = [self._loras.deltas(use, component) for component in self._denoisers]
        return None if None in found else [delta for deltas in found for delta in deltas or []]

    def _merge(self, identity: str, use: LoRAUse) -> None:
        began = self._clock()
        deltas = self._deltas(use) or []
        # First, so that a merge that fails is undone by the next call.
        self.merged, self._changed = f"{identity}, in part", [delta.weight for delta in deltas]
        with torch.inference_mode(mode=False), torch.no_grad():
            for delta in deltas:
                delta.weight.add_(delta.compute(), alpha=use.scale)
        # They were made of other weights.
        forget_copies()
        self.merged = identity
        self._policy.merging_took(self._clock() - began)
        log.info("merged adapter=%s layers=%d", identity, len(deltas))

    def _forget(self) -> None:
        if self.merged is not None:
            log.info("no longer merged adapter=%s", self.merged)
            forget_copies()
        self.merged, self._changed = None, []
