# SPDX-License-Identifier: Apache-2.0
"""The prompt cache: results of text encoders, by their arguments.

A result is stored under the encoder, the contents of all its arguments, and the active adapter. A hit therefore equals the encoder's own
answer. A result made in a call with other requests' rows differs in its last bits. It is returned only to requests that share their calls
with others too.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from diffusion_worker.messages import PromptCacheStats
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.contents import content
from diffusion_worker.runner.model_call.outputs import is_plain, tensors_of, with_tensors

# A large encoder's layers for one prompt are some 20 MB; more than this is better used for requests.
MAX_BYTES = 1 << 30
REMEMBERED_METHODS = frozenset({"forward", "get_text_features"})
# Sampled text has to be made again for each request.
BYPASSED_METHODS = frozenset({"generate"})


class _Kept(NamedTuple):
    output: Any
    size: int
    alone: bool


class PromptCache:
    """A cache of at most `entries` results and `max_bytes` bytes, from which the least recently used go first."""

    def __init__(self, entries: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._entries = entries
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._hits = self._misses = self._bypassed = 0
        self._told: PromptCacheStats | None = None

    def key(self, call: ModelCall, adapter: str | None = None) -> Hashable | None:
        """Return the key of a call of a text encoder, by its arguments' contents and `adapter`, the active adapter's digest.

        The result is None for other calls, and for one that cannot be compared or samples text. The latter two are counted as bypassed.
        """
        if call.denoises or not _is_text(call):
            return None
        parts = content(call.arguments) if call.method in REMEMBERED_METHODS else None
        if parts is None:
            self._bypassed += 1
            return None
        return call.component, id(call.module), call.method, call.autocast, adapter, parts

    def get(self, key: Hashable, *, alone: bool) -> Any | None:
        """Return a copy of a result, which the caller may change, and count a hit; return None, and count nothing, if there is none.

        With `alone`, results of calls that several requests shared do not count as there.
        """
        kept = self._kept.get(key)
        if kept is None or (alone and not kept.alone):
            return None
        self._hits += 1
        self._kept.move_to_end(key)
        return _copy(kept.output)

    def put(self, key: Hashable, output: Any, *, alone: bool) -> None:
        """Store clones of the tensors in `output`, count a miss, and evict old entries until both limits hold.

        With `alone` the encoder ran for this request only. An output over `max_bytes`, or with something else than tensors in it, is not
        stored and counts as bypassed.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(output))
        if not is_plain(output) or size > self._max_bytes:
            self._bypassed += 1
            return
        self._misses += 1
        self._kept.pop(key, None)
        self._kept[key] = _Kept(_copy(output), size, alone)
        while len(self._kept) > self._entries or self.nbytes > self._max_bytes:
            self._kept.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """The bytes that the cache keeps."""
        return sum(kept.size for kept in self._kept.values())

    def clear(self) -> None:
        """Drop all cached results, but keep the counts of hits, misses and bypassed calls."""
        self._kept.clear()

    def reset(self) -> None:
        """Forget all results, and set the counts to 0."""
        self.clear()
        self._hits = self._misses = self._bypassed = 0

    def stats(self) -> PromptCacheStats:
        """Return the entries kept and allowed, and the numbers of calls answered from the cache, made, and not kept."""
        return PromptCacheStats(len(self._kept), self._entries, self._hits, self._misses, self._bypassed)

    def news(self) -> PromptCacheStats | None:
        """Return the current counts, or None if they equal those that the last call with a result returned."""
        now = self.stats()
        if now == self._told:
            return None
        self._told = now
        return now


def _is_text(call: ModelCall) -> bool:
    """Return whether this is a call of a text encoder: a known method, with a tensor argument whose name ends in `input_ids`."""
    if call.method not in REMEMBERED_METHODS | BYPASSED_METHODS:
        return False
    return any(name.endswith("input_ids") and isinstance(value, torch.Tensor) for name, value in call.arguments.items())


def _copy(output: Any) -> Any:
    return with_tensors(output, [tensor.clone() for tensor in tensors_of(output)])
