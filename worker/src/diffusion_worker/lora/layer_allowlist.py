# SPDX-License-Identifier: Apache-2.0
"""The layers that a deployment allows adapters to change; without such a list they may change any layer."""

from collections.abc import Sequence

from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.model_layers import ModelLayer, ModelLayers, Piece
from diffusion_worker.lora.naming import LoRAFactors

OPTION = "--lora-target-module"
ALL = "all"
MOST_NAMES = 3


class LayerAllowlist:
    """The layers that adapters may change: those that `targets` name, or all layers without targets.

    A target is a layer's full name, the last parts of its name (`attn.to_q`), or `all`.
    """

    def __init__(self, targets: Sequence[str], model: ModelLayers) -> None:
        """Find the layers of the targets; raises ConfigError for a target that names no layer that can be wrapped."""
        self.targets = tuple(targets)
        self.layers = list(dict.fromkeys(layer for target in self.targets for layer in _matching(target, model)))
        self._inside = set(self.layers)

    def allows(self, layer: ModelLayer) -> bool:
        """Return whether adapters may change a layer."""
        return not self.targets or layer in self._inside

    def require(self, adapter: str, found: Sequence[tuple[str, Piece, LoRAFactors]]) -> None:
        """Raise RequestError (ModulesOutsideEnvelope) if an adapter changes a layer that is not allowed."""
        outside = [name for name, piece, _ in found if not self.allows(piece.layer)]
        if outside:
            names = ", ".join(outside[:MOST_NAMES])
            raise RequestError(
                ErrorCode.MODULES_OUTSIDE_ENVELOPE,
                f"adapter {adapter!r}: expected layers of {OPTION} or spec.lora.targetModules ({', '.join(self.targets)}), "
                f"found {len(outside)} others: {names}; add these to the list, or use another adapter",
            )


def _matching(target: str, model: ModelLayers) -> list[ModelLayer]:
    layers = [piece.layer for name in model.names() if _matches(name, target) for piece in model.find(name).pieces]
    if layers:
        return layers
    kinds = sorted({model.kind_of(name) or "" for name in model.names_of_other_modules() if _matches(name, target)})
    if kinds:
        raise ConfigError(f"{OPTION} {target}: expected layers that adapters can change, found {', '.join(kinds)}")
    raise ConfigError(f"{OPTION} {target}: the model has no layer whose name is this or ends with it")


def _matches(name: str, target: str) -> bool:
    return target == ALL or name == target or name.endswith(f".{target}")
