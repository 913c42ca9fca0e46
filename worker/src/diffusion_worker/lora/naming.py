# SPDX-License-Identifier: Apache-2.0
"""From the tensors of a file to pairs of factors by the model's own modules, by their names or through a conversion.

Every tensor ends in a pair or is the alpha of one; a file of which one does not is refused with the first names.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.formats import ORIGINAL_PREFIXES, Format, Part, format_of, module_path, refuse_other_kinds, take_apart
from diffusion_worker.lora.header import shown

if TYPE_CHECKING:
    from diffusion_worker.lora.conversion import Convert, Converted


class NeedsValues(Exception):
    """Raised by a conversion that cannot be made with tensors that have no values."""


class AdaptedModel(NamedTuple):
    """The model for which an adapter is read: modules by component, the component of names without one, and a converter.

    For a model that is elsewhere `names` are those of its modules, by `component.path`.
    """

    components: Mapping[str, torch.nn.Module] = {}
    denoiser: str = "transformer"
    convert: "Convert | None" = None
    names: Collection[str] = ()

    def has(self, module: str) -> bool:
        """Whether `component.path` is a module of the model; without its components, whether it does not look like another's."""
        component, _, path = module.partition(".")
        if self.names:
            return module in self.names
        if not self.components:
            return not path.startswith(ORIGINAL_PREFIXES)
        try:
            self.components[component].get_submodule(path)
        except (KeyError, AttributeError):
            return False
        return True

    def own_name(self, module: str) -> str:
        """The name as the model has it: a CLIP text model may or may not have an inner module that all others are in."""
        if not module.startswith("text_encoder"):
            return module
        component, _, path = module.partition(".")
        if path.startswith("text_model.") and self._has_component(component) and not self._has_inner(component):
            return f"{component}.{path.removeprefix('text_model.')}"
        return module

    def _has_component(self, component: str) -> bool:
        return component in (self.names or self.components)

    def _has_inner(self, component: str) -> bool:
        return f"{component}.text_model" in self.names if self.names else hasattr(self.components[component], "text_model")


class RawLoRAModule(NamedTuple):
    """A module as the file has it: the names of its two factors, its rank, and its alpha where it has one of its own."""

    a: str
    b: str
    rank: int
    alpha: float | None


class Factors(NamedTuple):
    """A pair of factors and what their product is multiplied with."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def modules_of(tensors: Mapping[str, torch.Tensor], label: str) -> dict[str, RawLoRAModule]:
    """The modules of a file under the names that it gives them.

    Raises:
        RequestError: InvalidAdapter with the first tensor that is no part of a LoRA, or does not fit its other factor;
            UnsupportedFormat with the kind of adapter, where it is another that is known.
    """
    parts: dict[str, dict[Part, str]] = {}
    unmatched = []
    for name in tensors:
        taken = take_apart(name)
        if taken is None:
            unmatched.append(name)
        elif parts.setdefault(taken.module, {}).setdefault(taken.part, name) != name:
            raise _invalid(f"{label}: {name}: its module has another such tensor, {parts[taken.module][taken.part]}")
    refuse_other_kinds(unmatched, label)
    if unmatched or not parts:
        raise _invalid(f"{label}: expected LoRA tensors only, found {first_of(unmatched) or 'none at all'}")
    return {module: _written(module, names, tensors, label) for module, names in parts.items()}


def bind(
    tensors: Mapping[str, torch.Tensor],
    written: Mapping[str, RawLoRAModule],
    scaling: Callable[[str], float],
    *,
    model: AdaptedModel,
    label: str,
) -> tuple[dict[str, Factors], Format]:
    """The factors by `component.path`, in the naming of diffusers; `scaling` is asked for a module as the file has it.

    Raises:
        RequestError: InvalidAdapter, or UnsupportedFormat for names that the model's pipeline cannot convert.
    """
    own = {module: model.own_name(module_path(module, denoiser=model.denoiser)) for module in written}
    if not any(model.has(module) for module in own.values()):
        foreign = next(
            (
                module
                for module in written
                if module_path(module, denoiser="").startswith(tuple(f".{prefix}" for prefix in ORIGINAL_PREFIXES))
            ),
            None,
        )
        if model.convert is None and foreign is not None:
            raise RequestError(
                ErrorCode.UNSUPPORTED_FORMAT,
                f"{label}: {shown(foreign)} is named as in an original model, which this pipeline cannot convert",
            )
        try:
            if model.convert is not None:
                return _converted(tensors, written, scaling, model=model, label=label), format_of(written, converted=True)
        except RequestError:
            if foreign is not None:
                raise
    pairs: dict[str, Factors] = {}
    for module, names in written.items():
        if own[module] in pairs:
            raise _invalid(f"{label}: {names.a}: its module {own[module]} has other factors too")
        pairs[own[module]] = Factors(tensors[names.a], tensors[names.b], scaling(module))
    return pairs, format_of(written, converted=False)


def first_of(names: list[str], count: int = 3) -> str:
    """The first names, as they stand in a message."""
    return ", ".join(shown(name) for name in names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _written(module: str, names: Mapping[Part, str], tensors: Mapping[str, torch.Tensor], label: str) -> RawLoRAModule:
    if Part.A not in names or Part.B not in names:
        only = next(iter(names.values()))
        missing = "lora_A, lora_B" if names.keys() == {Part.ALPHA} else f"lora_{'B' if Part.A in names else 'A'}"
        raise _invalid(f"{label}: {only}: {module} has no {missing}")
    rank = _rank(names[Part.A], tensors[names[Part.A]], tensors[names[Part.B]], label)
    alpha = None
    if Part.ALPHA in names:
        value = tensors[names[Part.ALPHA]]
        if value.numel() != 1:
            raise _invalid(f"{label}: {names[Part.ALPHA]}: expected one number, found shape {list(value.shape)}")
        alpha = float(value)
    return RawLoRAModule(names[Part.A], names[Part.B], rank, alpha)


def _rank(name: str, a: torch.Tensor, b: torch.Tensor, label: str) -> int:
    """The rank where two factors meet; of a convolution the second one is one of 1 x 1, or plain."""
    # Looked at once: asking a tensor takes longer than all that is done with the answer.
    left, right = a.shape, b.shape
    fits = len(left) >= 2 and len(right) in (2, len(left)) and left[0] == right[1] and right[2:].count(1) == len(right) - 2
    if not fits or 0 in left or 0 in right:
        raise _invalid(f"{label}: {name}: A is {list(left)} and B is {list(right)}, their ranks do not meet")
    return left[0]


def _converted(
    tensors: Mapping[str, torch.Tensor],
    written: Mapping[str, RawLoRAModule],
    scaling: Callable[[str], float],
    *,
    model: AdaptedModel,
    label: str,
) -> dict[str, Factors]:
    """The factors as diffusers names and splits them; scaling is applied here, exactly, and alphas that scale nothing are given."""
    assert model.convert is not None
    factors = {name: tensors[name] for module in written.values() for name in (module.a, module.b)}
    neutral = {f"{module}.alpha": torch.tensor(float(names.rank)) for module, names in written.items()}
    try:
        # Some of its functions do not know alphas where others write them; some know a file only by them.
        pairs = _pairs(model.convert(factors, label), written, scaling, model=model, label=label)
        if any(model.has(module) for module in pairs):
            return pairs
    except RequestError as first:
        try:
            return _pairs(model.convert(factors | neutral, label), written, scaling, model=model, label=label)
        except RequestError:
            raise first from None
    return _pairs(model.convert(factors | neutral, label), written, scaling, model=model, label=label)


def _pairs(
    found: Mapping[str, "Converted"],
    written: Mapping[str, RawLoRAModule],
    scaling: Callable[[str], float],
    *,
    model: AdaptedModel,
    label: str,
) -> dict[str, Factors]:
    """Converted tensors as pairs, each with the scaling of the module of the file that it came from."""
    module_of = {name: module for module, names in written.items() for name in (names.a, names.b)}
    pairs: dict[str, Factors] = {}
    for module, names in modules_of({name: converted.tensor for name, converted in found.items()}, label).items():
        sources = (found[names.a].sources | found[names.b].sources) & module_of.keys()
        scalings = {scaling(module_of[source]) for source in sources}
        own = model.own_name(module_path(module, denoiser=model.denoiser))
        if len(scalings) != 1 or own in pairs:
            raise _invalid(f"{label}: {min(sources, default=module)}: diffusers makes one module of several")
        pairs[own] = Factors(found[names.a].tensor, found[names.b].tensor, scalings.pop())
    return pairs


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
