# SPDX-License-Identifier: Apache-2.0
"""Model calls, the unit of batching: the rules for calls that may share one, and how they are merged and cut into rows.

The arguments decide which calls can be merged. Tensors with a row per row of the call are concatenated, time steps are expanded, and
everything else must be equal by content. A call with an argument of an unknown kind runs alone. `suspending_module` makes the calls,
`outputs` splits their results.
"""

import functools
from collections.abc import Hashable
from typing import Any

import msgspec
import torch

from diffusion_worker.runner.families import Role, model_record
from diffusion_worker.runner.model_call.contents import Contents
from diffusion_worker.runner.model_call.outputs import split, stacked, tensors_of, unstacked, with_tensors

__all__ = ["ModelCall", "Role", "answer", "execute", "group_key", "merge", "role_of", "slice_rows", "split", "tensors_of", "with_tensors"]

MERGED_METHODS = frozenset({"forward", "encode", "decode"})
# Names of a model's first argument with rows; otherwise the first tensor that is no time is used.
LEADING = ("hidden_states", "sample", "x", "z", "latents", "input_ids", "inputs_embeds", "pixel_values")
# Parts of the names of arguments without a row for each row of a call. These are positions of tokens and frames, a mask for the whole image
# (Cosmos, Anima), and a strength for each control block (Wan VACE).
TABLES = ("rotary", "rope", "indices_", "padding_mask", "control_hidden_states_scale", "img_mask")
# Tables that are read row by row where they have rows: tokens of OmniGen, positions of Ideogram 4.
ROW_TABLES = frozenset({"input_ids", "position_ids", "segment_ids"})
# Rows that switch a model over for the whole call when all of them are zero: HunyuanVideo 1.5 then makes a video without an image.
SWITCHES = frozenset({"image_embeds"})
DENOISER_MODULES = ("diffusers.models.transformers.", "diffusers.models.unets.", "diffusers.models.controlnets.")
DENOISER_WORDS = ("transformer", "unet", "controlnet", "prior")


class ModelCall(msgspec.Struct, frozen=True):
    """A request's call of a shared module. `arguments` are bound by name, in the order of the method's signature.

    `autocast` is the caller's device and precision by torch.autocast, None without. `whole` keeps the call's rows together: no other
    request's are added, and they are not spread over the ranks. `context` is the name that the pipeline gives this call for step caches
    (`cond`, `uncond`), empty without one.
    """

    component: str
    method: str
    arguments: dict[str, Any]
    module: Any = None
    autocast: tuple[str, torch.dtype] | None = None
    whole: bool = False
    context: str = ""

    @property
    def rows(self) -> int:
        """Rows of the call: the first dimension (or length) of its leading tensor (or list of tensors); 1 without any."""
        value = self._led_by()
        return 1 if value is None else int(value.shape[0]) if isinstance(value, torch.Tensor) else len(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of its leading tensor; `(rows,)` if that is a list, `()` if no argument has rows."""
        value = self._led_by()
        return () if value is None else tuple(value.shape) if isinstance(value, torch.Tensor) else (len(value),)

    @property
    def listed(self) -> bool:
        """Return whether the leading argument is a list or tuple with an item for each row, in place of a tensor."""
        return isinstance(self._led_by(), list | tuple)

    def _led_by(self) -> Any:
        try:
            return self.arguments[_leading(self.arguments)]
        except ValueError:
            return None

    @property
    def divisible(self) -> bool:
        """Return whether the rows may be spread over several calls.

        With a ControlNet, rows in a list may not: its output is padded to the longest of them.
        """
        given = (name for name, value in self.arguments.items() if value is not None)
        return not (self.listed and any("controlnet" in name for name in (self.component, *given)))

    @property
    def denoises(self) -> bool:
        """Return whether a denoiser or ControlNet is called, by the package of its class or a word in the component's name.

        Other models run before these in a tick.
        """
        if type(self.module).__module__.startswith(DENOISER_MODULES):
            return True
        return any(word in self.component for word in DENOISER_WORDS)


def _is_time(name: str) -> bool:
    return name.startswith("timestep") or name == "t"


def _leading(arguments: dict[str, Any]) -> str:
    """Return the name of the argument that determines the number of rows; raise ValueError where none has rows."""
    for name in LEADING:
        if _has_rows(arguments.get(name)):
            return name
    for name, value in arguments.items():
        if not _is_time(name) and _has_rows(value):
            return name
    raise ValueError(f"expected a tensor with rows among the arguments of a model call, found only {', '.join(arguments)}")


def _has_rows(value: Any) -> bool:
    return value.dim() > 0 if isinstance(value, torch.Tensor) else _is_tensor_list(value) or _is_list_of_tensor_lists(value)


def _is_list_of_tensor_lists(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_tensor_list(item) for item in value)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, torch.Tensor) for item in value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, torch.Tensor) or _holds_tensors(item) for item in value)
    return isinstance(value, dict)


class _Layout:
    """The roles of a call's arguments, by its leading argument and the model's record. ValueError is raised if no argument has rows."""

    def __init__(self, call: ModelCall) -> None:
        self.record = model_record(type(call.module))
        self.leading = _leading(call.arguments)
        self.rows = call.rows
        self.listed = call.listed

    def role(self, path: str, value: Any) -> Role:
        """Return the role of an argument, or of an item in it, which the model's record decides first.

        A tensor's role follows from its name and its rows. Lists are items if the rows are a list's, other containers of tensors are
        nested, and everything else must be equal.
        """
        if (known := self.record.role(path)) is not None:
            return known
        if isinstance(value, torch.Tensor):
            return self._tensor_role(path, value)
        if self.listed and isinstance(value, list) and len(value) == self.rows:
            return Role.ITEM
        return Role.NESTED if _holds_tensors(value) else Role.EQUAL

    def _tensor_role(self, path: str, value: torch.Tensor) -> Role:
        # A tensor with more dimensions has a time for each token, and is a row like any other.
        if _is_time(path) and value.shape in ((), (1,), (self.rows,)):
            return Role.TIME
        if path == self.leading:
            return Role.ROW
        return Role.ROW if value.dim() > 0 and value.shape[0] == self.rows and not _is_table(path) else Role.EQUAL


def _is_table(name: str) -> bool:
    """Return whether an argument belongs to the whole call, even if its first dimension happens to equal the number of rows.

    Tables of positions are read from row 0 only by some models, even where they have a row each.
    """
    if name in ROW_TABLES:
        return False
    return (name.endswith("_ids") and not name.endswith("time_ids")) or any(word in name for word in TABLES)


def role_of(call: ModelCall, name: str) -> Role:
    """Return the role of an argument, given by name, in its call; raise ValueError if no argument of the call has rows."""
    return _Layout(call).role(name, call.arguments[name])


def group_key(call: ModelCall, contents: Contents | None = None) -> Hashable | None:
    """Return a key that is equal for calls of the same module that `merge` accepts together; None for a call that runs alone.

    It consists of the method, precision, shapes of rows, and contents of all arguments without rows. `contents` keeps hashes of these
    between the calls of a request; without it they are computed each time.
    """
    if call.whole or call.method not in MERGED_METHODS:
        return None
    try:
        layout = _Layout(call)
    except ValueError:
        return None
    known = contents if contents is not None else Contents()
    parts: list[Hashable] = [call.component, id(call.module), call.method, call.autocast]
    for name, value in sorted(call.arguments.items()):
        part = _key_part(name, value, layout, known)
        if part is None:
            return None
        parts.append((name, part))
    if layout.listed and "controlnet" in call.component:
        # A ControlNet's addition to the denoiser is padded to the longest row, and fits no other length.
        parts.append(_structure(list(call.arguments.values()), sizes=True))
    return tuple(parts)


def _structure(value: Any, *, sizes: bool) -> Hashable:
    """Return a value's structure as a key: the nesting of lists, each tensor's dtype and number of dimensions, and all other values.

    With `sizes`, a tensor's shape replaces its number of dimensions.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape) if sizes else value.dim()
    return tuple(_structure(item, sizes=sizes) for item in value) if isinstance(value, list | tuple) else value


def _key_part(path: str, value: Any, layout: _Layout, known: Contents) -> Hashable | None:
    role = layout.role(path, value)
    if role is Role.ROW:
        return role, value.dtype, value.shape[0] // layout.rows, tuple(value.shape[1:]), path in SWITCHES and known.has_any(path, value)
    if role is Role.COLUMN:
        return role, value.dtype, value.shape[0], tuple(value.shape[2:])
    if role is Role.ITEM:
        # Rows of a list may differ in the length of their text, not in the size of their image.
        return role, frozenset(_structure(item, sizes=path == layout.leading) for item in value)
    if role is Role.TIME:
        return role
    if role is Role.NESTED:
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        if isinstance(value, dict) and any(isinstance(key, int) and not isinstance(item, torch.Tensor) for key, item in items):
            return None  # row data is keyed by row number (OmniGen), and a merged call numbers its rows differently
        parts = tuple((key, _key_part(f"{path}.{key}", item, layout, known)) for key, item in items)
        return None if any(part is None for _, part in parts) else (type(value).__name__, parts)
    return known.of(path, value)


def merge(calls: list[ModelCall]) -> ModelCall:
    """Merge calls with the same key into one. A single call is returned unchanged, so that its result stays bit-equal.

    Raises:
        ValueError: the calls cannot be merged; the message names the argument.
    """
    if len(calls) == 1:
        return calls[0]
    layout, rows = _Layout(calls[0]), [call.rows for call in calls]
    merged = {name: _merge_values(name, [call.arguments[name] for call in calls], rows, layout) for name in calls[0].arguments}
    return msgspec.structs.replace(calls[0], arguments=merged)


def _merge_values(path: str, values: list[Any], rows: list[int], layout: _Layout) -> Any:
    first = values[0]
    role = layout.role(path, first)
    if role is Role.ROW:
        return _concatenate(path, values)
    if role is Role.COLUMN:
        return torch.cat(values, dim=1)
    if role is Role.ITEM:
        return [item for value in values for item in value]
    if role is Role.TIME:
        # Schedulers differ in the dtype of their time steps. If all agree, their dtype is kept.
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
        return torch.cat([value.to(dtype).reshape(-1).expand(count) for value, count in zip(values, rows, strict=True)])
    if role is Role.NESTED:
        if isinstance(first, dict):
            return {key: _merge_values(f"{path}.{key}", [value[key] for value in values], rows, layout) for key in first}
        columns = zip(*values, strict=True)
        return type(first)(_merge_values(f"{path}.{index}", list(items), rows, layout) for index, items in enumerate(columns))
    return first


def _concatenate(argument: str, values: list[torch.Tensor]) -> torch.Tensor:
    shapes = {(value.dtype, tuple(value.shape[1:])) for value in values}
    if len(shapes) > 1:
        found = " and ".join(sorted(map(str, shapes)))
        raise ValueError(f"{argument}: expected rows of one precision and one shape in a call, found {found}")
    return torch.cat(values)


def slice_rows(call: ModelCall, start: int, stop: int) -> ModelCall:
    """Return the call with only rows `start` to before `stop`: every argument is cut by its role, and those without rows stay whole."""
    layout, part = _Layout(call), slice(start, stop)
    arguments = {name: _slice_value(name, value, layout, part) for name, value in call.arguments.items()}
    return msgspec.structs.replace(call, arguments=arguments)


def _slice_value(path: str, value: Any, layout: _Layout, part: slice) -> Any:
    role = layout.role(path, value)
    if role is Role.ROW:
        each = value.shape[0] // layout.rows
        return value[part.start * each : part.stop * each]
    if role is Role.ITEM or (role is Role.TIME and value.dim() > 0 and value.shape[0] == layout.rows):
        return value[part]
    if role is Role.COLUMN:
        return value[:, part]
    if role is Role.NESTED:
        if isinstance(value, dict):
            return {key: _slice_value(f"{path}.{key}", item, layout, part) for key, item in value.items()}
        return type(value)(_slice_value(f"{path}.{index}", item, layout, part) for index, item in enumerate(value))
    return value


def execute(module: torch.nn.Module, call: ModelCall) -> Any:
    """Call the module and return its output.

    Lists with an item for each row are stacked to one tensor, so that they can be split and gathered.
    """
    method = module if call.method == "forward" else getattr(module, call.method)
    if call.autocast is None:
        output = method(**call.arguments)
    else:
        device, dtype = call.autocast
        with torch.autocast(device, dtype):
            output = method(**call.arguments)
    return stacked(output) if call.method in MERGED_METHODS and call.listed else output


def answer(call: ModelCall, part: Any) -> Any:
    """Return a part of `execute`'s output as the pipeline expects it, with lists where the module returned lists."""
    return unstacked(part) if call.method in MERGED_METHODS and call.listed else part
