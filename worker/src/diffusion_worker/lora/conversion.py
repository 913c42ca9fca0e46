# SPDX-License-Identifier: Apache-2.0
"""Conversion of an original model's names of modules to diffusers', by diffusers' own functions; no other file here knows diffusers.

Those functions silently drop tensors that they do not know, and change values. So every tensor carries its name through all
operations, and a conversion is accepted only if each tensor arrives with all of its values.
"""

import functools
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.loaders.lora_pipeline import SD3LoraLoaderMixin, StableDiffusionXLLoraLoaderMixin
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from diffusers.utils import logging

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.loads.model_table import ConverterTable
from diffusion_worker.lora.located import shown
from diffusion_worker.lora.naming import NeedsValues
from diffusion_worker.lora.whole_checkpoint import convert_sd3

# diffusers loops over blocks up to the largest number in a name, so such numbers are refused.
_LARGE_NUMBER = re.compile(r"\d{4,}")


class Converted(NamedTuple):
    """A tensor under diffusers' name, and the names of those that it was made of."""

    tensor: torch.Tensor
    sources: frozenset[str]


Convert = Callable[[Mapping[str, torch.Tensor], str], dict[str, Converted]]


def converter_of(pipeline: Any) -> Convert | None:
    """Return the converter of files for a pipeline; None if its class loads no adapters.

    The converter takes the tensors and a label for messages, and may change the tensors.

    Raises:
        RequestError: InvalidAdapter, by the converter, if diffusers does not know the names or would drop some.
    """
    table = converter_table(pipeline)
    return None if table is None else _converter(type(pipeline), table)


def converter_of_table(table: ConverterTable | None) -> Convert | None:
    """Return the converter of files for a pipeline that another process has; None without a table."""
    if table is None:
        return None
    module, _, name = table.pipeline.partition(":")
    return _converter(functools.reduce(getattr, name.split("."), importlib.import_module(module)), table)


def converter_table(pipeline: Any) -> ConverterTable | None:
    """Describe a pipeline to a converter, as plain data; None if its class loads no adapters."""
    kind = next((each for each in type(pipeline).__mro__ if "lora_state_dict" in vars(each)), None)
    if kind is None:
        return None
    own = type(pipeline) if type(pipeline).__module__.startswith("diffusers.") else kind
    where = f"{own.__module__}:{own.__qualname__}"
    if isinstance(pipeline, SD3LoraLoaderMixin):
        config = pipeline.transformer.config
        return ConverterTable(where, blocks=config.num_layers, dual=tuple(config.dual_attention_layers))
    # The original U-Net numbers its blocks consecutively; the configuration has the limits of diffusers' blocks.
    unet = getattr(pipeline, "unet", None)
    return ConverterTable(where, unet_config=None if unet is None else dict(unet.config))


def _converter(kind: Any, table: ConverterTable) -> Convert:
    load = kind.lora_state_dict
    if table.blocks is not None:
        load = functools.partial(_load_sd3, load, blocks=table.blocks, dual=table.dual)
    elif table.unet_config is not None:
        load = functools.partial(load, unet_config=FrozenDict(table.unet_config))

    def convert(tensors: Mapping[str, torch.Tensor], label: str) -> dict[str, Converted]:
        if large := [name for name in tensors if _LARGE_NUMBER.search(name)]:
            raise _invalid(f"{label}: expected numbers below 1000 in the names of tensors, found {shown(large[0])}")
        results = _converted(load, tensors, label)
        found = {name: Converted(value.as_subclass(torch.Tensor), value.sources) for name, value in results.items()}
        _check_complete(tensors, found.values(), label)
        return found

    return convert


def _load_sd3(load: Any, tensors: dict[str, Any], *, blocks: int, dual: tuple[int, ...]) -> dict[str, Any]:
    """Load an adapter for Stable Diffusion 3 under diffusers' names; `load` is used if its names are diffusers' already.

    Diffusers converts no adapters for this model. The names of text encoders are those of SDXL.
    """
    encoders = {name: tensor for name, tensor in tensors.items() if name.startswith("lora_te")}
    denoiser = {name: tensor for name, tensor in tensors.items() if name not in encoders}
    if not encoders and not any("joint_blocks" in name for name in denoiser):
        return load(tensors)  # type: ignore[no-any-return]
    found = convert_sd3(denoiser, convert_sd3_transformer_checkpoint_to_diffusers, blocks=blocks, dual=dual, source_of=_only_source)
    return found | (StableDiffusionXLLoraLoaderMixin.lora_state_dict(encoders)[0] if encoders else {})


def _only_source(tensor: torch.Tensor) -> str | None:
    return next(iter(tensor.sources), None) if isinstance(tensor, _Traced) else None


class _Traced(torch.Tensor):
    """A tensor with the names of all tensors that it was made of; `touched` has those of a conversion's last operation."""

    sources: frozenset[str]
    touched: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) == 2 and isinstance(args[0], _Traced) and _is_one(args[1]):
            return args[0]
        given = [value for value in _flat((args, (kwargs or {}).values())) if isinstance(value, _Traced) and hasattr(value, "sources")]
        sources = frozenset[str]().union(*(value.sources for value in given))
        for value in given:
            value.touched[:] = sorted(sources)
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        for value in _flat(result):
            if isinstance(value, _Traced) and given:
                value.sources, value.touched = sources, given[0].touched
        return result


# Alphas given to diffusers scale nothing: a product with 1 is skipped, so that no tensor is copied.
_PRODUCTS = {torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__imul__}


def _is_one(value: Any) -> bool:
    single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1 and not isinstance(value, _Traced))
    return single and bool(value == 1)


def _traced(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, _Traced], list[str]]:
    """Return the tensors as traced ones, and the list that will hold the names of the last operation's tensors."""
    touched: list[str] = []
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.as_subclass(_Traced)
        found[name].sources, found[name].touched = frozenset([name]), touched
    return found, touched


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | type({}.values())):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _converted(load: Callable[[dict[str, Any]], Any], tensors: Mapping[str, torch.Tensor], label: str) -> dict[str, _Traced]:
    """Convert tensors by `load`, a function of diffusers, and return by name the results that were made of them.

    Raises:
        RequestError: InvalidAdapter for an error of any kind in `load`. NeedsValues: the error is due to tensors without values.
    """
    traced, touched = _traced(tensors)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # dropped tensors are found and reported here
    try:
        result = load(dict(traced))
    except Exception as error:
        if any(tensor.is_meta for tensor in tensors.values()) and (isinstance(error, NotImplementedError) or "meta" in str(error)):
            raise NeedsValues from None
        what = f"{type(error).__name__}: {ascii(str(error))[:200]}"
        at = ", ".join(shown(name) for name in touched[:3] or list(tensors)[:1])
        raise _invalid(f"{label}: diffusers cannot convert its tensors, and failed at {at}: {what}") from None
    finally:
        logging.set_verbosity(verbosity)
    state = result[0] if isinstance(result, tuple) else result
    return {name: value for name, value in state.items() if isinstance(value, _Traced)}


def _check_complete(tensors: Mapping[str, torch.Tensor], results: Collection[Converted], label: str) -> None:
    """Raise RequestError (InvalidAdapter) unless every factor arrived in a result, with all of its values.

    Zeros may be dropped: a factor of fused projections has blocks of them. Alphas are not checked. Raises NeedsValues if values must be
    compared and there are none.
    """
    arrived: dict[str, list[torch.Tensor]] = {}
    for result in results:
        for name in result.sources:
            arrived.setdefault(name, []).append(result.tensor)
    factors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    lost = [name for name, tensor in factors.items() if not _all_there(tensor, arrived.get(name, []))]
    if lost:
        first = ", ".join(shown(name) for name in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise _invalid(f"{label}: {len(lost)} of {len(factors)} tensors have no place in the model: {first}")


def _all_there(tensor: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    if not parts or sum(part.numel() for part in parts) >= tensor.numel():
        return bool(parts)
    if tensor.is_meta:
        raise NeedsValues
    return sum(int(part.count_nonzero()) for part in parts) == int(tensor.count_nonzero())


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
