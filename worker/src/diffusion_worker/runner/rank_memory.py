# SPDX-License-Identifier: Apache-2.0
"""Memory that one rank holds for its model, by tag: given back on sleep, restored on wake.

A tag is never half awake: a wake that fails gives back what it had restored.
"""

from collections.abc import Sequence

import msgspec
import torch

from diffusion_worker.errors import ConfigError, ErrorCode, Fault, RequestError
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.memory.device_memory import available_bytes
from diffusion_worker.memory.heap import give_back_heap
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import MemoryReport, MemoryTag, SleepLevel
from diffusion_worker.runner.model_call.faults import classify
from diffusion_worker.runner.model_call.prompt_cache import PromptCache
from diffusion_worker.runner.stepping.suspending_module import forget_copies


class RankMemory:
    """Weights in slabs, the slots of adapters, and caches. Memory of the tags in `asleep` is given back, at the depth of `level`."""

    def __init__(self, device: torch.device, *, ranks: int, prompts: PromptCache | None) -> None:
        """Start without a model. `ranks` restore their memory at the same time, and on a CPU they share the machine's."""
        self._device = device
        self._sharing = ranks if device.type == "cpu" else 1
        self._prompts = prompts
        self._weights = ModelWeights(device)
        self._loras: DiffusionLoRAManager | None = None
        self.asleep: list[MemoryTag] = []
        self.level: SleepLevel | None = None

    def begin(self, *, asleep: bool) -> None:
        """Reset the record for a model just adopted. If `asleep`, every tag counts as given back at the level Discard, ready for a wake."""
        self.asleep = list(MemoryTag) if asleep else []
        self.level = SleepLevel.DISCARD if asleep else None

    def serve(self, weights: ModelWeights, loras: DiffusionLoRAManager) -> None:
        """Use these weights and adapters as the model's from now on."""
        self._weights, self._loras = weights, loras

    def require_awake(self, work: str) -> None:
        """Refuse work unless every tag is in memory; the message begins with `work`.

        Raises:
            RequestError: Asleep, with the tags that are missing.
        """
        if self.asleep:
            freed = ", ".join(self.asleep)
            raise RequestError(ErrorCode.ASLEEP, f"{work}: expected a model that is awake, found {freed} freed by a sleep; wake it first")

    def release(self, level: SleepLevel) -> None:
        """Give back the memory of weights, adapter slots and caches; return at once if all of it sleeps at this level or deeper.

        No request may run. `Discard` also drops what `HostMemory` keeps for a wake. Weights that sleep at `Discard` stay at that level.

        Raises:
            RequestError: InvalidRequest, some weights cannot sleep; InsufficientMemory. Nothing was given back then.
        """
        deeper = level is SleepLevel.DISCARD and self.level is not SleepLevel.DISCARD
        if set(self.asleep) == set(MemoryTag) and not deeper:
            return
        slept_at = self.level if MemoryTag.WEIGHTS in self.asleep else None
        level = SleepLevel.DISCARD if SleepLevel.DISCARD in (level, slept_at) else level
        # The weights come first, because only they can be refused.
        self._weights.release(level)
        self.level = level
        for tag in (MemoryTag.ADAPTERS, MemoryTag.CACHES):
            self._give_back(tag, forget=level is SleepLevel.DISCARD)
        self.asleep = list(MemoryTag)
        give_back_heap(self._device)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Restore the memory of these tags; tags that are awake stay as they are.

        Raises:
            RequestError: InsufficientMemory; EngineFailed, a weights file has changed. All of these tags sleep as before then.
        """
        wanted = [tag for tag in self.asleep if tag in tags]
        needed = sum(map(self._missing_bytes, wanted))
        self._require_room(needed)
        try:
            for tag in wanted:
                self._bring(tag)
        except Exception as error:
            for tag in wanted:
                self._give_back(tag, forget=False)
            give_back_heap(self._device)
            if classify(error) is Fault.OUT_OF_MEMORY:
                free = available_bytes(self._device)
                raise _insufficient(needed, free, "when an allocation failed") from error
            if isinstance(error, ConfigError):
                raise RequestError(ErrorCode.ENGINE_FAILED, f"the weights cannot be restored: {error}") from error
            raise
        self.asleep = [tag for tag in self.asleep if tag not in wanted]
        if not self.asleep:
            self.level = None

    def report(self) -> MemoryReport:
        """Report the bytes of weights, adapters and the prompt cache by place, and the tags that are asleep with their level."""
        found, loras = self._weights.report(), self._loras
        return msgspec.structs.replace(
            found,
            adapter_slots_bytes=0 if loras is None else loras.layers.nbytes,
            adapter_slots_resident_bytes=0 if loras is None else loras.layers.resident_bytes,
            adapter_host_bytes=0 if loras is None else loras.host_bytes,
            cache_bytes=0 if self._prompts is None else self._prompts.nbytes,
            asleep=self.asleep,
            level=self.level,
        )

    def _missing_bytes(self, tag: MemoryTag) -> int:
        """Return the bytes that restoring a tag takes at once. Slots on a CPU take memory only when they are written to."""
        if tag is MemoryTag.WEIGHTS:
            return self._weights.missing_bytes
        if tag is MemoryTag.ADAPTERS and self._device.type != "cpu" and self._loras is not None:
            return self._loras.layers.nbytes
        return 0

    def _require_room(self, needed: int) -> None:
        if needed == 0:
            return
        free = available_bytes(self._device)
        if needed * self._sharing > free:
            raise _insufficient(needed, free, f"for {self._sharing} ranks together" if self._sharing > 1 else f"on {self._device}")

    def _give_back(self, tag: MemoryTag, *, forget: bool) -> None:
        """Give back the memory of a tag; `forget` also drops the adapters' copies in host memory."""
        if tag is MemoryTag.WEIGHTS:
            self._weights.release(self.level or SleepLevel.HOST_MEMORY)
        elif tag is MemoryTag.ADAPTERS and self._loras is not None:
            self._loras.release(forget=forget)
        elif tag is MemoryTag.CACHES:
            forget_copies()
            if self._prompts is not None:
                self._prompts.clear()

    def _bring(self, tag: MemoryTag) -> None:
        """Refill a tag that was given back: weights, or slots of adapters. For caches there is nothing to do; later steps fill them."""
        if tag is MemoryTag.WEIGHTS:
            self._weights.restore()
        elif tag is MemoryTag.ADAPTERS and self._loras is not None:
            self._loras.restore()


def _insufficient(needed: int, free: int, where: str) -> RequestError:
    message = f"waking needs {needed} bytes of memory a rank, found {free} bytes free {where}"
    return RequestError(ErrorCode.INSUFFICIENT_MEMORY, message, details={"neededBytes": needed, "foundBytes": free})
