# SPDX-License-Identifier: Apache-2.0
"""Pairs of factors by the model's own modules, from the tensors of a file, by their names or through a conversion.

Every tensor must be in a pair or be the alpha of one. A file with other tensors is refused with the names of the first.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.formats import ORIGINAL_PREFIXES, Format, Part, format_of, module_path, refuse_other_kinds, take_apart
from diffusion_worker.lora.located import shown

if TYPE_CHECKING:
    from diffusion_worker.lora.conversion import Convert, Converted


# Named here, because a look-up in an enumeration takes as long as the rest of a check.
A, B, ALPHA = Part


class NeedsValues(Exception):
    """Raised when a conversion needs the values of tensors that have none."""


class AdaptedModel(NamedTuple):
    """The model for which an adapter is read: modules by component, the component of names without one, and a converter.

    For a model in another process `names` are those of its modules, by `component.path`.
    """

    components: Mapping[str, torch.nn.Module] = {}
    denoiser: str = "transformer"
    convert: "Convert | None" = None
    names: Collection[str] = ()

    def has(self, module: str) -> bool:
        """Return whether `component.path` is a module of the model; without a model, whether it has no prefix of an original model."""
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
        """Return the model's name for a module: without `text_model.` if the model's text encoder lacks this inner module.

        Some CLIP text encoders do, while names in a file have it. Any other name is returned as it is.
        """
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


class RawLoRAModule(msgspec.Struct, frozen=True, gc=False):
    """A module that an adapter's file changes, with the tensor names of its factors A and B. `alpha` is None if the file gives it none.

    `own` is the module's `component.path` in the model, if the file names modules as peft or diffusers do.
    """

    own: str
    a: str
    b: str
    rank: int
    alpha: float | None


class LoRAFactors(msgspec.Struct, frozen=True, gc=False):
    """The low-rank factors of one module, whose weight changes by `scaling * b @ a`; both are in the dtype of the file.

    A linear layer has [rank, in] as a and [out, rank] as b. A convolution has [rank, in, kh, kw] as a; its b is like a linear layer's, or
    [out, rank, 1, 1].
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def modules_of(tensors: Mapping[str, torch.Tensor], model: AdaptedModel, label: str) -> dict[str, RawLoRAModule]:
    """Group the tensors of a file by module, under the file's own names.

    Raises:
        RequestError: InvalidAdapter with the first foreign tensors, or with a factor that is missing, given twice or of another rank.
            InvalidAdapter, too, for an alpha that is not one number, or for no tensors at all. UnsupportedFormat with the kind of adapter,
            if it is another known kind.
    """
    parts: dict[str, dict[Part, str]] = {}
    unmatched = []
    for name in tensors:
        taken = take_apart(name)
        if taken is None:
            unmatched.append(name)
        elif parts.setdefault(taken.module, {}).setdefault(taken.part, name) != name:
            raise _invalid(f"{label}: tensors {name} and {parts[taken.module][taken.part]} are both for one factor of one module")
    refuse_other_kinds(unmatched, label)
    if unmatched or not parts:
        raise _invalid(f"{label}: expected tensors of a LoRA only, found {first_of(unmatched) or 'none at all'}")
    return {module: _written(module, names, tensors, model, label) for module, names in parts.items()}


def bind(
    tensors: Mapping[str, torch.Tensor],
    written: Mapping[str, RawLoRAModule],
    scaling: Callable[[str], float],
    *,
    filled: bool,
    model: AdaptedModel,
    label: str,
) -> tuple[dict[str, LoRAFactors], Format]:
    """Return the factors by `component.path` in diffusers' naming, and the format of the file.

    `scaling` returns the scaling of a module by its name in the file. If the model has none of the file's names, its converter is tried.
    It gets tensors on the meta device unless they are `filled`, and so may raise NeedsValues.
    Modules that the model lacks may remain in the result.

    Raises:
        RequestError: InvalidAdapter, or UnsupportedFormat for names that the model's pipeline cannot convert.
    """
    if not any(model.has(names.own) for names in written.values()):
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
                f"{label}: {shown(foreign)} is a name from the model's original code, which this pipeline cannot convert",
            )
        try:
            if model.convert is not None:
                given = tensors if filled else {name: tensor.to("meta") for name, tensor in tensors.items()}
                return _converted(given, written, scaling, model=model, label=label), format_of(written, converted=True)
        except RequestError:
            if foreign is not None:
                raise
    pairs: dict[str, LoRAFactors] = {}
    for module, names in written.items():
        if names.own in pairs:
            raise _invalid(f"{label}: tensor {names.a}: another tensor is for the same factor of {names.own}")
        pairs[names.own] = LoRAFactors(tensors[names.a], tensors[names.b], scaling(module))
    return pairs, format_of(written, converted=False)


def first_of(names: list[str], count: int = 3) -> str:
    """Return the first `count` names for a message, and the number of the others; an empty text without names."""
    return ", ".join(shown(name) for name in names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _written(module: str, names: Mapping[Part, str], tensors: Mapping[str, torch.Tensor], model: AdaptedModel, label: str) -> RawLoRAModule:
    if A not in names or B not in names:
        only = next(iter(names.values()))
        missing = "lora_A, lora_B" if names.keys() == {ALPHA} else f"lora_{'B' if A in names else 'A'}"
        raise _invalid(f"{label}: tensor {only}: its module {module} has no {missing}")
    rank = _rank(names[A], tensors[names[A]], tensors[names[B]], label)
    alpha = None
    if ALPHA in names:
        value = tensors[names[ALPHA]]
        if value.numel() != 1:
            raise _invalid(f"{label}: tensor {names[ALPHA]}: expected one number, found shape {list(value.shape)}")
        alpha = float(value)
    own = model.own_name(module_path(module, denoiser=model.denoiser))
    return RawLoRAModule(own, names[A], names[B], rank, alpha)


def _rank(name: str, a: torch.Tensor, b: torch.Tensor, label: str) -> int:
    """Return the rank at which two factors meet; B of a convolution is 1 x 1 or a matrix. Raises RequestError (InvalidAdapter)."""
    # Each shape is read once: asking a tensor takes longer than all checks of the answer.
    left, right = a.shape, b.shape
    fits = len(left) >= 2 and len(right) in (2, len(left)) and left[0] == right[1] and (len(right) == 2 or set(right[2:]) == {1})
    if not fits or 0 in left or 0 in right:
        raise _invalid(
            f"{label}: tensor {name}: expected shapes with one rank, [rank, in] and [out, rank], found A {list(left)} and B {list(right)}"
        )
    return left[0]


def _converted(
    tensors: Mapping[str, torch.Tensor],
    written: Mapping[str, RawLoRAModule],
    scaling: Callable[[str], float],
    *,
    model: AdaptedModel,
    label: str,
) -> dict[str, LoRAFactors]:
    """Return the factors as diffusers names and splits them, each pair with its scaling in the file.

    diffusers never applies a scaling, which would round: the alphas that it gets scale nothing.
    """
    assert model.convert is not None
    factors = {name: tensors[name] for module in written.values() for name in (module.a, module.b)}
    neutral = {f"{module}.alpha": torch.tensor(float(names.rank)) for module, names in written.items()}
    try:
        # Some functions of diffusers refuse alphas, and some recognise a file only by them: try without alphas, then with them.
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
) -> dict[str, LoRAFactors]:
    """Pair the converted tensors, each pair with the scaling of its module in the file; raises RequestError (InvalidAdapter)."""
    module_of = {name: module for module, names in written.items() for name in (names.a, names.b)}
    pairs: dict[str, LoRAFactors] = {}
    for module, names in modules_of({name: converted.tensor for name, converted in found.items()}, model, label).items():
        sources = (found[names.a].sources | found[names.b].sources) & module_of.keys()
        scalings = {scaling(module_of[source]) for source in sources}
        if len(scalings) != 1 or names.own in pairs:
            raise _invalid(f"{label}: tensor {min(sources, default=module)}: diffusers makes of it a module of several scalings or factors")
        pairs[names.own] = LoRAFactors(found[names.a].tensor, found[names.b].tensor, scalings.pop())
    return pairs


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
