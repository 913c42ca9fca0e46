# SPDX-License-Identifier: Apache-2.0
"""Binding of an adapter's names to the model's layers; an adapter is refused with the first names that are unknown or do not fit."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.checkpoint import LoRACheckpoint, invalid
from diffusion_worker.lora.layer_allowlist import LayerAllowlist
from diffusion_worker.lora.loads.layout import Bound, LaidOut
from diffusion_worker.lora.model_layers import ModelLayers, Piece
from diffusion_worker.lora.naming import LoRAFactors

MOST_NAMES = 3


class AdapterBinding:
    """The binding of adapters to the layers of a model, or of its table. `components` has the class of each component."""

    def __init__(self, model: ModelLayers, allowlist: LayerAllowlist, components: Mapping[str, str], *, max_rank: int) -> None:
        self._model = model
        self._allowlist = allowlist
        self._components = components
        self._max_rank = max_rank

    def bind(self, checkpoint: LoRACheckpoint, *, name: str) -> list[Bound]:
        """Return the factors for each part of a layer that the adapter changes, cut as this rank's layer is cut; `name` is for messages.

        Raises:
            RequestError: NoMatchingModules, ModulesOutsideEnvelope, InvalidAdapter with the first names that do not bind, or
                RankTooLarge.
        """
        self._require_rank(checkpoint, name)
        found: list[tuple[str, Piece, LoRAFactors]] = []
        unmatched: list[str] = []
        unknown = 0
        for module, factors in checkpoint.modules.items():
            meaning, a, b = self._model.find(module), factors.a.shape, factors.b.shape
            if meaning.pieces and meaning.fits(a, b):
                found += [(module, piece, factors) for piece in meaning.pieces]
            elif meaning.pieces:
                unmatched.append(f"{module} ({meaning.misfit(a, b)})")
            else:
                unknown += 1
                kind = self._model.kind_of(module)
                unmatched.append(f"{module} ({kind} cannot have adapters)" if kind else f"{module} (no such layer)")
        if unmatched:
            models = ", ".join(self._components.values())
            count = f"{len(unmatched)} of {len(checkpoint.modules)} modules"
            message = f"adapter {name!r}: {count} do not match {models}: {', '.join(unmatched[:MOST_NAMES])}"
            none = unknown == len(checkpoint.modules)
            raise RequestError(ErrorCode.NO_MATCHING_MODULES if none else ErrorCode.INVALID_ADAPTER, message)
        self._allowlist.require(name, found)
        _require_once(name, found)
        return [_bound(*each) for each in found]

    def _require_rank(self, checkpoint: LoRACheckpoint, name: str) -> None:
        if checkpoint.rank > self._max_rank:
            first = next(module for module, factors in checkpoint.modules.items() if factors.a.shape[0] > self._max_rank)
            limit = f"rank {checkpoint.rank} is over the limit of {self._max_rank}, first at {first}"
            raise RequestError(ErrorCode.RANK_TOO_LARGE, f"adapter {name!r}: {limit}: start the worker with a larger --max-lora-rank")


def write_checked(laid_out: LaidOut, buffer: torch.Tensor, *, name: str) -> None:
    """Write an adapter into a buffer of `layout.nbytes`.

    Raises:
        RequestError: InvalidAdapter with the first module whose values would overflow in a slot; the buffer was written all the same.
    """
    if (wrong := laid_out.write(buffer)) is not None:
        kind = str(wrong.layer.dtype).removeprefix("torch.")
        found = f"multiplied by its scaling, {wrong.scaling:g}, it has values that are too large for {kind}, the dtype of the layer"
        raise invalid(f"adapter {name!r}: module {wrong.name}: {found}")


def components_of(checkpoint: LoRACheckpoint) -> frozenset[str]:
    """Return the components that an adapter changes."""
    return frozenset(module.partition(".")[0] for module in checkpoint.modules)


def _bound(name: str, piece: Piece, factors: LoRAFactors) -> Bound:
    a, b = _flat(factors.a), _flat(factors.b)
    b = b if piece.rows is None else b[piece.rows]
    if (cut := piece.layer.cut) is not None:
        a, b = cut.of_a(a), cut.of_b(b)
    return Bound(name, piece.layer, piece.part, a, b, factors.scaling)


def _flat(factor: torch.Tensor) -> torch.Tensor:
    return factor if factor.dim() == 2 else factor.flatten(1)


def _require_once(adapter: str, found: Sequence[tuple[str, Piece, LoRAFactors]]) -> None:
    """Raise RequestError (InvalidAdapter) for an adapter with two names for one part of a layer, because its factors are unclear."""
    counts = Counter([(id(piece.layer), piece.part) for _, piece, _ in found])
    if len(counts) < len(found):
        twice = [name for name, piece, _ in found if counts[id(piece.layer), piece.part] > 1]
        raise invalid(
            f"adapter {adapter!r}: expected one module for a layer, found several: {', '.join(dict.fromkeys(twice[:MOST_NAMES]))}"
        )
