# SPDX-License-Identifier: Apache-2.0
"""The model call as the batch point: stand-ins for shared modules, and how pending calls are grouped, merged and split.

What may share a call is found from the arguments (`families.md` (c)): tensors with one row per row of the call are
concatenated, time steps are expanded, everything else must be equal by content, and an argument of an unknown kind keeps
its call alone.
"""

import functools
import hashlib
import inspect
from collections.abc import Hashable
from typing import Any

import greenlet
import msgspec
import torch

MERGED_METHODS = frozenset({"forward", "decode"})
INTERCEPTED_METHODS = frozenset({"encode", "decode"})
# In the names of arguments that have no row for each row of a call: positions of tokens and frames, one mask for the whole
# picture (Cosmos, Anima), a strength for each control block (Wan VACE).
TABLES = ("rotary", "rope", "indices_", "padding_mask", "control_hidden_states_scale")
# Rows that switch a model over for the whole call when all of them are zero: HunyuanVideo 1.5 then makes a video without a picture.
SWITCHES = frozenset({"image_embeds"})


class ModelCall(msgspec.Struct, frozen=True):
    """What a request asks of a shared module. `arguments` are bound by name, in the order of the method's signature."""

    component: str
    method: str
    arguments: dict[str, Any]

    @property
    def rows(self) -> int:
        """Rows of the call: the first dimension (or length) of its first tensor (or list of tensors)."""
        value = self.arguments[_leading(self.arguments)]
        return int(value.shape[0]) if isinstance(value, torch.Tensor) else len(value)

    @property
    def denoises(self) -> bool:
        """Whether the call belongs to a step; all others (encoders, VAE) run ahead of those, so that steps stay together."""
        return any(word in self.component for word in ("transformer", "unet", "controlnet", "prior"))


class StandIn:
    """Looks like a module; a call suspends the calling fiber with a `ModelCall` and returns what the fiber is resumed with."""

    def __init__(self, name: str, real: torch.nn.Module) -> None:
        self.__dict__.update(_name=name, _real=real)

    # Pipelines ask isinstance() of their components.
    __class__ = property(lambda self: type(self.__dict__["_real"]))

    def __getattr__(self, name: str) -> Any:
        if name in INTERCEPTED_METHODS and hasattr(self._real, name):
            return lambda *args, **kwargs: self._suspend(name, args, kwargs)
        return getattr(self._real, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._suspend("forward", args, kwargs)

    def _suspend(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = ModelCall(self._name, method, _bind(getattr(self._real, method), args, kwargs))
        parent = greenlet.getcurrent().parent
        assert parent is not None, "a stand-in is called inside a request's fiber only"
        return parent.switch(call)


def _bind(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name. A `**kwargs` of the method is flattened: nested, its contents would not reach the module."""
    signature = inspect.signature(method)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def _leading(arguments: dict[str, Any]) -> str:
    """The argument that says how many rows there are."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) or _is_tensor_list(value):
            return name
    raise ValueError(f"a model call without a tensor argument: {', '.join(arguments)}")


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, torch.Tensor) for item in value)


def group_key(call: ModelCall) -> Hashable | None:
    """Calls with the same key may share one call of the module; None: this one runs alone."""
    if call.method not in MERGED_METHODS:
        return None
    leading, rows = _leading(call.arguments), call.rows
    parts: list[Hashable] = [call.component, call.method]
    for name, value in sorted(call.arguments.items()):
        part = _key_part(name, value, rows, leading=name == leading)
        if part is None:
            return None
        parts.append((name, part))
    return tuple(parts)


def _key_part(name: str, value: Any, rows: int, *, leading: bool) -> Hashable | None:
    role = _role(name, value, rows, leading=leading)
    if role == "row":
        return "row", value.dtype, tuple(value.shape[1:]), name in SWITCHES and bool(value.any())
    if role == "time":
        return "time"
    if role == "nested":
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = tuple((key, _key_part(f"{name}.{key}", item, rows, leading=False)) for key, item in items)
        return None if any(part is None for _, part in parts) else parts
    return _content(value)


def _role(name: str, value: Any, rows: int, *, leading: bool) -> str:
    """`row`, `time`, `nested` (a list or dict of tensors) or `equal`: the default rules of `families.md` (c) 5."""
    if isinstance(value, torch.Tensor):
        # One with more dimensions has a time for each token: a row like any other.
        if (name.startswith("timestep") or name == "t") and value.shape in ((), (1,), (rows,)):
            return "time"
        return "row" if leading or (value.dim() > 0 and value.shape[0] == rows and not _is_table(name)) else "equal"
    if isinstance(value, dict) or _is_tensor_list(value):
        return "nested"
    return "equal"


def _is_table(name: str) -> bool:
    """Whether an argument is one for the whole call, also where its first dimension happens to be the number of rows.

    Tables of positions are read from row 0 only by some models, even where they have a row each.
    """
    return (name.endswith("_ids") and not name.endswith("time_ids")) or any(word in name for word in TABLES)


def _content(value: Any) -> Hashable | None:
    """A value by content; None for an object that cannot be compared."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple(value.shape), value.dtype, hashlib.sha256(data).digest()
    if value is None or isinstance(value, str | bytes | bool | int | float | torch.dtype | torch.device):
        return type(value).__name__, value
    if isinstance(value, list | tuple):
        items = tuple(_content(item) for item in value)
        return None if any(item is None for item in items) else items
    return None


def merge(calls: list[ModelCall]) -> ModelCall:
    """One call for several with the same key. A lone call is passed on as it is, so that it stays bit-equal."""
    if len(calls) == 1:
        return calls[0]
    leading = _leading(calls[0].arguments)
    merged = {
        name: _merge_values(name, [call.arguments[name] for call in calls], [call.rows for call in calls], leading=name == leading)
        for name in calls[0].arguments
    }
    return ModelCall(calls[0].component, calls[0].method, merged)


def _merge_values(name: str, values: list[Any], rows: list[int], *, leading: bool) -> Any:
    first = values[0]
    role = _role(name, first, rows[0], leading=leading)
    if role == "row":
        return torch.cat(values)
    if role == "time":
        # Schedulers differ in the dtype of their steps; where they agree the steps keep it.
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
        return torch.cat([value.to(dtype).reshape(-1).expand(count) for value, count in zip(values, rows, strict=True)])
    if role == "nested":
        if isinstance(first, dict):
            return {key: _merge_values(f"{name}.{key}", [value[key] for value in values], rows, leading=False) for key in first}
        return type(first)(_merge_values(name, list(items), rows, leading=False) for items in zip(*values, strict=True))
    return first


def slice_rows(call: ModelCall, start: int, stop: int) -> ModelCall:
    """Some rows of a call."""
    rows, leading = call.rows, _leading(call.arguments)
    return ModelCall(
        call.component,
        call.method,
        {name: _slice_value(name, value, rows, slice(start, stop), leading=name == leading) for name, value in call.arguments.items()},
    )


def _slice_value(name: str, value: Any, rows: int, part: slice, *, leading: bool) -> Any:
    role = _role(name, value, rows, leading=leading)
    if role == "row" or (role == "time" and value.dim() > 0 and value.shape[0] == rows):
        return value[part]
    if role == "nested":
        if isinstance(value, dict):
            return {key: _slice_value(f"{name}.{key}", item, rows, part, leading=False) for key, item in value.items()}
        return type(value)(_slice_value(name, item, rows, part, leading=False) for item in value)
    return value


def split(output: Any, rows: list[int]) -> list[Any]:
    """The parts of a merged call's output, one per call.

    Raises:
        TypeError: the output holds something that is not laid out by rows.
    """
    if len(rows) == 1:
        return [output]
    if isinstance(output, torch.Tensor):
        return list(torch.split(output, rows))
    if isinstance(output, dict):  # diffusers' BaseOutput and transformers' ModelOutput are ordered dicts
        columns = {key: split(value, rows) for key, value in output.items()}
        return [type(output)(**{key: column[index] for key, column in columns.items()}) for index in range(len(rows))]
    if isinstance(output, list | tuple):
        return [type(output)(parts) for parts in zip(*(split(item, rows) for item in output), strict=True)]
    if output is None:
        return [None] * len(rows)
    raise TypeError(f"a module returned {type(output).__name__}, which cannot be split by rows")


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def with_tensors(output: Any, tensors: list[torch.Tensor]) -> Any:
    """The same output with other tensors in place of its own; consumes the list."""
    if isinstance(output, torch.Tensor):
        return tensors.pop(0)
    if isinstance(output, dict):
        return type(output)(**{key: with_tensors(value, tensors) for key, value in output.items()})
    if isinstance(output, list | tuple):
        return type(output)(with_tensors(item, tensors) for item in output)
    return output
