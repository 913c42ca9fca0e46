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
from typing import Any, NamedTuple

import greenlet
import msgspec
import torch

MERGED_METHODS = frozenset({"forward", "decode"})
INTERCEPTED_METHODS = frozenset({"encode", "decode"})
# In the names of arguments that have no row for each row of a call: positions of tokens and frames, one mask for the whole
# picture (Cosmos, Anima), a strength for each control block (Wan VACE).
TABLES = ("rotary", "rope", "indices_", "padding_mask", "control_hidden_states_scale", "img_mask")
# Tables that are read row by row where they have rows: tokens and positions of OmniGen and Ideogram 4.
ROW_TABLES = frozenset({"input_ids", "position_ids", "segment_ids"})
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
        return self.layout.count

    @property
    def layout(self) -> "Layout":
        """How rows lie in the arguments."""
        value = self.arguments[_leading(self.arguments)]
        return Layout(int(value.shape[0]), False) if isinstance(value, torch.Tensor) else Layout(len(value), True)

    @property
    def denoises(self) -> bool:
        """Whether the call belongs to a step; all others (encoders, VAE) run ahead of those, so that steps stay together."""
        return any(word in self.component for word in ("transformer", "unet", "controlnet", "prior"))


class Layout(NamedTuple):
    """`count` rows; `listed` where the model takes a list with an item for each row (Z-Image), also one of lists."""

    count: int
    listed: bool


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
        if isinstance(value, torch.Tensor) or _is_tensor_list(value) or _is_list_of_tensor_lists(value):
            return name
    raise ValueError(f"a model call without a tensor argument: {', '.join(arguments)}")


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, torch.Tensor) for item in value)


def _is_list_of_tensor_lists(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_tensor_list(item) for item in value)


def group_key(call: ModelCall) -> Hashable | None:
    """Calls with the same key may share one call of the module; None: this one runs alone."""
    if call.method not in MERGED_METHODS:
        return None
    leading, layout = _leading(call.arguments), call.layout
    parts: list[Hashable] = [call.component, call.method]
    for name, value in sorted(call.arguments.items()):
        part = _key_part(name, value, layout, leading=name == leading)
        if part is None:
            return None
        parts.append((name, part))
    if layout.listed and "controlnet" in call.component:
        # What it adds to the denoiser is padded to the longest of its rows, and fits no others.
        parts.append(_structure(list(call.arguments.values()), sizes=True))
    return tuple(parts)


def _key_part(name: str, value: Any, rows: Layout, *, leading: bool) -> Hashable | None:
    role = _role(name, value, rows, leading=leading)
    if role == "items":
        # Rows of a list may differ in the length of their text, not in the size of their picture.
        return "items", frozenset(_structure(item, sizes=leading) for item in value)
    if role == "row":
        return "row", value.dtype, tuple(value.shape[1:]), name in SWITCHES and bool(value.any())
    if role == "time":
        return "time"
    if role == "nested":
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        if isinstance(value, dict) and any(isinstance(key, int) and not isinstance(item, torch.Tensor) for key, item in items):
            return None  # what each row has, by its number (OmniGen): the rows of a merged call have others
        parts = tuple((key, _key_part(f"{name}.{key}", item, rows, leading=False)) for key, item in items)
        return None if any(part is None for _, part in parts) else parts
    return _content(value)


def _structure(value: Any, *, sizes: bool) -> Hashable:
    """What one row of a list is made of: where it has tensors, of which dtype, and of which size if `sizes`."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape) if sizes else value.dim()
    return tuple(_structure(item, sizes=sizes) for item in value) if isinstance(value, list | tuple) else value


def _role(name: str, value: Any, rows: Layout, *, leading: bool) -> str:
    """`row`, `items` (a list with an item for each row), `time`, `nested` (a list or dict of tensors) or `equal`.

    The default rules of `families.md` (c) 5.
    """
    if isinstance(value, torch.Tensor):
        # One with more dimensions has a time for each token: a row like any other.
        if (name.startswith("timestep") or name == "t") and value.shape in ((), (1,), (rows.count,)):
            return "time"
        return "row" if leading or (value.dim() > 0 and value.shape[0] == rows.count and not _is_table(name)) else "equal"
    if rows.listed and isinstance(value, list) and len(value) == rows.count:
        return "items"
    if isinstance(value, dict) or _is_tensor_list(value):
        return "nested"
    return "equal"


def _is_table(name: str) -> bool:
    """Whether an argument is one for the whole call, also where its first dimension happens to be the number of rows.

    Tables of positions are read from row 0 only by some models, even where they have a row each.
    """
    if name in ROW_TABLES:
        return False
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
        name: _merge_values(name, [call.arguments[name] for call in calls], [call.layout for call in calls], leading=name == leading)
        for name in calls[0].arguments
    }
    return ModelCall(calls[0].component, calls[0].method, merged)


def _merge_values(name: str, values: list[Any], rows: list[Layout], *, leading: bool) -> Any:
    first = values[0]
    role = _role(name, first, rows[0], leading=leading)
    if role == "items":
        return [item for value in values for item in value]
    if role == "row":
        return torch.cat(values)
    if role == "time":
        # Schedulers differ in the dtype of their steps; where they agree the steps keep it.
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
        return torch.cat([value.to(dtype).reshape(-1).expand(layout.count) for value, layout in zip(values, rows, strict=True)])
    if role == "nested":
        if isinstance(first, dict):
            return {key: _merge_values(f"{name}.{key}", [value[key] for value in values], rows, leading=False) for key in first}
        return type(first)(_merge_values(name, list(items), rows, leading=False) for items in zip(*values, strict=True))
    return first


def slice_rows(call: ModelCall, start: int, stop: int) -> ModelCall:
    """Some rows of a call."""
    rows, leading = call.layout, _leading(call.arguments)
    return ModelCall(
        call.component,
        call.method,
        {name: _slice_value(name, value, rows, slice(start, stop), leading=name == leading) for name, value in call.arguments.items()},
    )


def _slice_value(name: str, value: Any, rows: Layout, part: slice, *, leading: bool) -> Any:
    role = _role(name, value, rows, leading=leading)
    if role in ("row", "items") or (role == "time" and value.dim() > 0 and value.shape[0] == rows.count):
        return value[part]
    if role == "nested":
        if isinstance(value, dict):
            return {key: _slice_value(f"{name}.{key}", item, rows, part, leading=False) for key, item in value.items()}
        return type(value)(_slice_value(name, item, rows, part, leading=False) for item in value)
    return value


def execute(module: torch.nn.Module, call: ModelCall) -> Any:
    """Call the module. Rows that it returns as items of lists come stacked, so that they can be split and gathered."""
    method = module if call.method == "forward" else getattr(module, call.method)
    output = method(**call.arguments)
    return _stacked(output) if call.layout.listed else output


class _Items(list[torch.Tensor]):
    """In the place of a list with an item for each row: one tensor with those rows."""


def _stacked(output: Any) -> Any:
    if isinstance(output, list) and _is_tensor_list(output):
        return _Items([torch.stack(output)])
    if isinstance(output, dict):
        return _like(output, {key: _stacked(value) for key, value in output.items()})
    return type(output)(map(_stacked, output)) if isinstance(output, list | tuple) else output


def _like(output: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """A dict of the same kind: diffusers' BaseOutput and transformers' ModelOutput take their items by name."""
    return items if type(output) is dict else type(output)(**items)


def answer(call: ModelCall, part: Any) -> Any:
    """What the pipeline is given for its call: its part of what `execute` returned, with lists where the module returned lists."""
    return _unstacked(part) if call.layout.listed else part


def _unstacked(output: Any) -> Any:
    if isinstance(output, _Items):
        return list(output[0])
    if isinstance(output, dict):
        return _like(output, {key: _unstacked(value) for key, value in output.items()})
    return type(output)(map(_unstacked, output)) if isinstance(output, list | tuple) else output


def split(output: Any, rows: list[int]) -> list[Any]:
    """The parts of a merged call's output, one per call.

    Raises:
        TypeError: the output holds something that is not laid out by rows.
    """
    if len(rows) == 1:
        return [output]
    if isinstance(output, torch.Tensor):
        return list(torch.split(output, rows))
    if isinstance(output, dict):
        columns = {key: split(value, rows) for key, value in output.items()}
        return [_like(output, {key: column[index] for key, column in columns.items()}) for index in range(len(rows))]
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
        return _like(output, {key: with_tensors(value, tensors) for key, value in output.items()})
    if isinstance(output, list | tuple):
        return type(output)(with_tensors(item, tensors) for item in output)
    return output
