# SPDX-License-Identifier: Apache-2.0
"""The layers of a pipeline's components that adapters can change, and the layers that a name in an adapter means.

A layer is named `component.path`. Projections of one attention may be fused in the model (`to_qkv`) and separate in the
adapter (`to_q`, `to_k`, `to_v`), or the reverse. A name then means a part of a layer, or several layers.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from diffusion_worker.lora.layers import LinearPart
from diffusion_worker.lora.loads.model_table import ModelTable, PartCut, TableLayer, dtype_named, name_of

# Names of fused projections in diffusers, and of their parts in order.
FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(eq=False)
class ModelLayer:
    """A layer of the model that adapters may change, with its places there and the shapes that fit it.

    A is [rank, *inputs]. `outputs` has the rows of B for each part of a fused layer, or a single number. `places` lists each parent module
    and the layer's name in it. A layer of a table has neither a `base` nor places, and its dtype is `known_dtype`.
    Sorting by `order` puts layers of one kind side by side, over all blocks.
    """

    name: str
    base: Any
    places: list[tuple[nn.Module, str]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cut: PartCut | None
    add_up: Callable[[torch.Tensor], torch.Tensor] | None = None
    known_dtype: torch.dtype | None = None
    order: int = 0

    # A load asks for it several times a layer, and a layer keeps its dtype.
    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """`known_dtype` if set; otherwise the base's `compute_dtype`, as a 4-bit layer has one, or the dtype of its weight."""
        if self.known_dtype is not None:
            return self.known_dtype
        found: torch.dtype = getattr(self.base, "compute_dtype", None) or stored_as(self.base).dtype
        return found

    @property
    def widths(self) -> tuple[int, list[int]]:
        """The numbers of columns that this rank has of the layer: of A (inputs times kernel size), and of B for each part (outputs)."""
        shape = stored_as(self.base).shape
        inputs = int(torch.Size(shape[1:]).numel())
        return inputs, list(self.outputs) if self.cut is None else [int(shape[0])]


class Piece(NamedTuple):
    """A part of a layer that a name in an adapter means, and the rows of B that are for it (None: all)."""

    layer: ModelLayer
    part: int
    rows: slice | None


class LayerMatch(NamedTuple):
    """The pieces that a name in an adapter means, none if it is unknown, and the shapes that its factors must have.

    `inputs` is the shape of A without its rank and without sizes of 1 at the end, `outputs` the number of rows of B.
    """

    pieces: tuple[Piece, ...]
    inputs: tuple[int, ...]
    outputs: int

    def fits(self, a: torch.Size, b: torch.Size) -> bool:
        """Return whether factors of these shapes fit. A linear layer also fits as a convolution with a kernel of size 1."""
        return b[0] == self.outputs and (a[1:] == self.inputs or without_points(a[1:]) == self.inputs)

    def misfit(self, a: torch.Size, b: torch.Size) -> str:
        """Return a text with the expected shapes and these, for factors that do not fit."""
        expected, inputs = (" x ".join(map(str, shape)) for shape in (self.pieces[0].layer.inputs, a[1:]))
        outputs = b[0]
        return f"expected {expected} inputs and {self.outputs} outputs, found {inputs} and {outputs}"


class ModelLayers:
    """All layers of the components that adapters can change, by name; a layer with two names is one."""

    def __init__(self, components: Mapping[str, nn.Module], part_of: Callable[[str], LinearPart | None]) -> None:
        self._kinds: dict[str, str] = {}
        self._layers: dict[str, ModelLayer] = {}
        self._found: dict[str, LayerMatch] = {}
        modules: dict[str, nn.Module] = {}
        seen: dict[int, ModelLayer] = {}
        for component, model in components.items():
            for path, module in model.named_modules(remove_duplicate=False):
                name = f"{component}.{path}" if path else component
                modules[name] = module
                self._kinds[name] = type(module).__name__
                if path and can_be_wrapped(module):
                    parent = modules[name.rpartition(".")[0]]
                    layer = seen.get(id(module))
                    if layer is None:
                        layer = seen[id(module)] = _layer(name, module, parent, part_of(name))
                    layer.places.append((parent, path.rpartition(".")[2]))
                    self._layers[name] = layer
        _put_in_order(self._layers.values())

    @classmethod
    def of_table(cls, table: ModelTable) -> "ModelLayers":
        """Return the layers of a model that another process has, from its table."""
        found = cls({}, lambda name: None)
        found._kinds = table.modules
        for entry in table.layers:
            layer = ModelLayer(entry.names[0], None, [], entry.inputs, entry.outputs, entry.cut, known_dtype=dtype_named(entry.dtype))
            found._layers.update(dict.fromkeys(entry.names, layer))
        # In the order of the modules, because the first of a layer's names is its own.
        found._layers = {name: found._layers[name] for name in table.modules if name in found._layers}
        _put_in_order(found._layers.values())
        return found

    def table(self) -> tuple[dict[str, str], list[TableLayer]]:
        """Return the class of each module, and all layers, for a process that has no model."""
        names: dict[int, list[str]] = {}
        for name, layer in self._layers.items():
            names.setdefault(id(layer), []).append(name)
        layers = {id(layer): layer for layer in self._layers.values()}.values()
        return self._kinds, [TableLayer(names[id(layer)], layer.inputs, layer.outputs, name_of(layer.dtype), layer.cut) for layer in layers]

    def __iter__(self) -> Iterator[tuple[str, ModelLayer]]:
        """Iterate over pairs of a name and its layer. Separate projections beside a fused layer that replaces them are left out."""
        return ((name, layer) for name, layer in self._layers.items() if self._fused_for(name) is None)

    def names(self) -> Iterator[str]:
        """Yield the names of all modules that can be wrapped, and of the parts of fused projections."""
        for name, layer in self._layers.items():
            yield name
            path, _, leaf = name.rpartition(".")
            if len(layer.outputs) > 1:
                yield from (f"{path}.{part}" for part in FUSED[leaf])

    def names_of_other_modules(self) -> Iterator[str]:
        """Iterate over modules of the model that cannot have adapters, such as norms."""
        return (name for name in self._kinds if name not in self._layers)

    def own(self, name: str) -> ModelLayer:
        """Return the layer with exactly this name; raises KeyError."""
        return self._layers[name]

    @property
    def any(self) -> bool:
        """Return whether the components have any layer that adapters can change."""
        return bool(self._layers)

    def find(self, name: str) -> LayerMatch:
        """Return the match for a name in an adapter: a layer, a part of a fused layer, or several layers.

        The match has no pieces if the name is unknown.
        """
        found = self._found.get(name)
        if found is None:
            pieces = tuple(self._look_up(name))
            inputs = without_points(pieces[0].layer.inputs) if pieces else ()
            found = LayerMatch(pieces, inputs, sum(piece.layer.outputs[piece.part] for piece in pieces))
            # Unknown names are not cached: adapters may bring any number of them.
            if pieces:
                self._found[name] = found
        return found

    def kind_of(self, name: str) -> str | None:
        """Return the name of a module's class; None if there is no such module."""
        return self._kinds.get(name)

    def _look_up(self, name: str) -> list[Piece]:
        fused = self._fused_for(name)
        if fused is not None:
            return [fused]
        layer = self._layers.get(name)
        if layer is not None:
            return [Piece(layer, 0, None)] if len(layer.outputs) == 1 else [*_pieces([(layer, n) for n in range(len(layer.outputs))])]
        path, _, leaf = name.rpartition(".")
        separate = [self._layers.get(f"{path}.{part}") for part in FUSED.get(leaf, ())]
        found = [layer for layer in separate if layer is not None and len(layer.outputs) == 1]
        alike = len({layer.inputs for layer in found}) == 1 and len(found) == len(separate)
        return [*_pieces([(layer, 0) for layer in found])] if alike else []

    def _fused_for(self, name: str) -> Piece | None:
        """Return the part of a fused layer that replaces the layer of this name; None if there is none."""
        path, _, leaf = name.rpartition(".")
        for fused, parts in FUSED.items():
            layer = self._layers.get(f"{path}.{fused}") if leaf in parts else None
            if layer is not None and len(layer.outputs) == len(parts):
                return Piece(layer, parts.index(leaf), None)
        return None


def can_be_wrapped(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a convolution without groups whose forward is torch's own.

    The output layer of torch's `nn.MultiheadAttention` is none, because it is never called.
    """
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False  # `nn.MultiheadAttention` reads its weight and never calls it
    if isinstance(module, nn.Linear):
        return True
    plain = any(type(module).forward is kind.forward for kind in CONVOLUTIONS)
    return plain and isinstance(module, CONVOLUTIONS) and module.groups == 1


def without_points(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop trailing sizes of 1 from a shape, so that a convolution with a kernel of size 1 compares equal to a linear layer.

    The first size stays.
    """
    last = max((number for number, size in enumerate(shape) if size != 1), default=0)
    return tuple(shape[: last + 1])


def stored_as(module: Any) -> Any:
    """Return the object that has the shape and dtype of a layer's weight: a 4-bit weight's quantization state, or the weight."""
    return getattr(module.weight, "quant_state", module.weight)


def _put_in_order(layers: Iterable[ModelLayer]) -> None:
    """Set the `order` of all layers of a model, by kind and then by block.

    An adapter changes some kinds of layers, so few copies then write it into a slot.
    """
    for number, layer in enumerate(sorted(layers, key=_kind_and_blocks)):
        layer.order = number


def _kind_and_blocks(layer: ModelLayer) -> tuple[str, list[int]]:
    return re.sub(r"\d+", "#", layer.name), [int(number) for number in re.findall(r"\d+", layer.name)]


def _layer(name: str, module: Any, parent: nn.Module, part: LinearPart | None) -> ModelLayer:
    mine = (None, None) if part is None else (part.cut, part.add_up)
    if isinstance(module, nn.Linear):
        leaf = name.rpartition(".")[2]
        outputs = _sizes(parent, leaf, int(module.out_features)) if leaf in FUSED and part is None else (int(module.out_features),)
        return ModelLayer(name, module, [], (int(module.in_features),), outputs, *mine)
    return ModelLayer(name, module, [], (int(module.in_channels), *module.kernel_size), (int(module.out_channels),), *mine)


def _sizes(parent: Any, leaf: str, total: int) -> tuple[int, ...]:
    """Return the outputs of each part of a fused projection.

    They are those of the separate layers beside it, else those that the attention's dimensions give, else equal shares. A total that
    cannot be shared equally is returned alone.
    """
    parts = FUSED[leaf]
    separate = [getattr(parent, part, None) for part in parts]
    if all(isinstance(layer, nn.Linear) for layer in separate):
        sizes = tuple(int(layer.out_features) for layer in separate if layer is not None)
        if sum(sizes) == total:
            return sizes
    query, key = getattr(parent, "inner_dim", None), getattr(parent, "inner_kv_dim", None)
    if len(parts) == 3 and isinstance(query, int) and isinstance(key, int) and query + 2 * key == total:
        return query, key, key
    return (total // len(parts),) * len(parts) if total % len(parts) == 0 else (total,)


def _pieces(parts: Sequence[tuple[ModelLayer, int]]) -> Iterator[Piece]:
    """Yield a piece for each (layer, number of a part). They share an A, and have consecutive rows of B in this order."""
    start = 0
    for layer, number in parts:
        stop = start + layer.outputs[number]
        yield Piece(layer, number, slice(start, stop))
        start = stop
