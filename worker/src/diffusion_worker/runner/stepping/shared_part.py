# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a module that a request shares with other requests: it allows only what cannot change their images.

Plain values and harmless methods are the module's own. Submodules, lists, dicts and sets follow the same rule. Any other use ends the
attempt: the fiber is switched away for good, because a pipeline may swallow an exception. The request is then run again while no other
advances. It may change the model in that run, and `ModuleChanges` puts everything back.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
import msgspec
import torch
from diffusers.configuration_utils import FrozenDict

from diffusion_worker.runner.stepping.guarded_values import guarded
from diffusion_worker.runner.stepping.module_changes import ModuleChanges

_READS = "returns parts of the module and changes nothing"
_COMPUTES = "computes from its arguments and from weights, and changes nothing"

# Methods that a request may call while others advance, each with the reason why it changes nothing for them. A stand-in noted those that
# pipelines call in every test family, and the source of all pipelines of diffusers was searched for calls of components.
HARMLESS: dict[str, str] = {
    **dict.fromkeys(("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "num_parameters"), _READS),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children"), _READS),
    **dict.fromkeys(("get_parameter", "get_buffer", "get_submodule"), _READS),
    **dict.fromkeys(("get_input_embeddings", "get_output_embeddings", "get_decoder", "get_encoder"), _READS),
    # Layers that a pipeline calls by itself: final_layer_norm of CLIP, wte of GPT-2, text_projection.
    "forward": _COMPUTES,
    # Tables of positions (LTX 2), masks of frames (AnyFlow FAR), codebooks (VQ Diffusion).
    **dict.fromkeys(("prepare_video_coords", "prepare_audio_coords", "build_attention_mask", "get_codebook_entry"), _COMPUTES),
    # Statistics of embeddings (Kandinsky's prior, Stable unCLIP), latents of clean frames (AnyFlow FAR).
    **dict.fromkeys(("post_process_latents", "scale", "unscale", "_encode"), _COMPUTES),
    # The safety checker of Cosmos, a model of its own.
    **dict.fromkeys(("check_text_safety", "check_video_safety"), _COMPUTES),
}

# Values of these types cannot be changed, so reading one leads to no change of the module.
_UNCHANGEABLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, FrozenDict)


class NeedsModelAlone(msgspec.Struct, frozen=True):
    """A fiber's last event beside others: `what` says which use of a shared module it attempted, such as a call of a method.

    From here the fiber can only be unwound. The request is run again by itself.
    """

    what: str


def changes_of_fiber() -> ModuleChanges | None:
    """Return the record of the running request's changes; None where none is kept: beside others, unless sharing is checked."""
    return getattr(greenlet.getcurrent(), "changes", None)


def in_fiber() -> bool:
    """Return whether a request's own code is running, and not the engine's."""
    return hasattr(greenlet.getcurrent(), "alone")


def leave_company(what: str) -> None:
    """Return if the running code may change a shared module now; otherwise end the request's attempt, and never return.

    Allowed are the engine itself, and a request with the model alone, whose modules are recorded first. `what` says what it attempted.
    """
    fiber: Any = greenlet.getcurrent()
    if not in_fiber():
        return  # the engine itself, or a hook that it calls
    if fiber.alone:
        fiber.changes.begin()
        return
    while True:
        # A request that is given up is unwound from here. Code that swallows even that is suspended here again.
        fiber.parent.switch(NeedsModelAlone(what))


class SharedPart:
    """A stand-in for a shared module or a part of one, which `isinstance` takes for the real class.

    Reads, calls and harmless methods pass through; any other method, assignment or deletion requires the model alone.
    """

    def __init__(self, path: str, real: torch.nn.Module) -> None:
        # All parts of a stand-in share this, by the id of the real module, so that a part is the same each time.
        self.__dict__.update(_path=path, _real=real, _parts={})

    # Pipelines ask isinstance() of their components.
    __class__ = property(lambda self: type(self.__dict__["_real"]))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not (isinstance(value, types.MethodType) and value.__self__ is self._real):
            return self._seen(f"{self._path}.{name}", value)
        call = self._harmless if name in HARMLESS else self._unknown
        # The method keeps its own signature, which some pipelines look at (Stable Video Diffusion).
        return functools.wraps(value)(functools.partial(call, name, value))

    def __setattr__(self, name: str, value: Any) -> None:
        leave_company(f"sets {self._path}.{name}")
        setattr(self._real, name, _unwrapped(value))

    def __delattr__(self, name: str) -> None:
        leave_company(f"deletes {self._path}.{name}")
        delattr(self._real, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real(*args, **kwargs)

    def __bool__(self) -> bool:
        return bool(self._real)

    def to(self, *args: Any, **kwargs: Any) -> "SharedPart":
        """Do nothing if every parameter and buffer has that device and precision; otherwise require the model alone, and convert it.

        The stand-in is returned in both cases, as `Module.to` returns its module.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if any(_differs(tensor, device, dtype) for tensor in (*self._real.parameters(), *self._real.buffers())):
            leave_company(f"calls {self._path}.to()")
            self._real.to(*args, **kwargs)
        return self

    def float(self) -> "SharedPart":
        """Convert the module to float32 by `to`."""
        return self.to(torch.float32)

    def half(self) -> "SharedPart":
        """Convert the module to float16 by `to`."""
        return self.to(torch.float16)

    def eval(self) -> "SharedPart":
        """Set evaluation mode, which is harmless: the engine serves modules in it."""
        return self.train(False)

    def train(self, mode: bool = True) -> "SharedPart":
        """Set the mode of all parts, which needs the model alone unless they have it already."""
        if any(module.training != mode for module in self._real.modules()):
            leave_company(f"calls {self._path}.train({mode})")
            self._real.train(mode)
        return self

    def _harmless(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._seen(f"{self._path}.{name}()", method(*args, **kwargs), own=False)

    def _unknown(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leave_company(f"calls {self._path}.{name}()")
        return method(*map(_unwrapped, args), **{key: _unwrapped(value) for key, value in kwargs.items()})

    def _seen(self, path: str, value: Any, *, own: bool = True) -> Any:
        """Return a value of the module with stand-ins in place of modules and, if they are its `own`, of lists, dicts and sets.

        A request that has the model alone gets everything as it is, because its changes are put back.
        """
        fiber: Any = greenlet.getcurrent()
        if not in_fiber():
            return self._with_parts(path, value)
        if fiber.alone:
            if not isinstance(value, _UNCHANGEABLE):
                fiber.changes.begin()
            return value
        made = self._with_parts(path, value)
        return guarded(path, made, self._seen, leave_company) if own else made

    def _with_parts(self, path: str, value: Any) -> Any:
        """Return the value with stand-ins in place of modules, also in tuples and where a generator yields them."""
        if isinstance(value, torch.nn.Module):
            return self._part(path, value)
        if type(value) is tuple and _has_modules(value):
            return tuple(self._seen(f"{path}[{place}]", item) for place, item in enumerate(value))
        if isinstance(value, types.GeneratorType):
            return (self._seen(path, item) for item in value)
        return value

    def _part(self, path: str, module: torch.nn.Module) -> "SharedPart":
        if id(module) not in self._parts:
            part = (SharedParts if hasattr(type(module), "__getitem__") else SharedPart)(path, module)
            part.__dict__["_parts"] = self._parts
            self._parts[id(module)] = part
        found: SharedPart = self._parts[id(module)]
        return found


class SharedParts(SharedPart):
    """A stand-in for an indexable module, such as a `ModuleList`, with stand-ins as items; to set or delete one needs the model alone."""

    def __len__(self) -> int:
        return len(self._real)

    def __iter__(self) -> Iterator[Any]:
        return (self._seen(f"{self._path}[{place}]", item) for place, item in enumerate(self._real))

    def __getitem__(self, place: Any) -> Any:
        return self._seen(f"{self._path}[{place}]", self._real[place])

    def __contains__(self, item: Any) -> bool:
        return _unwrapped(item) in self._real

    def __setitem__(self, place: Any, value: Any) -> None:
        leave_company(f"sets {self._path}[{place}]")
        self._real[place] = _unwrapped(value)

    def __delitem__(self, place: Any) -> None:
        leave_company(f"deletes {self._path}[{place}]")
        del self._real[place]


def _has_modules(values: Any) -> bool:
    return any(isinstance(item, torch.nn.Module) or (type(item) is tuple and _has_modules(item)) for item in values)


def _unwrapped(value: Any) -> Any:
    return value.__dict__["_real"] if issubclass(type(value), SharedPart) else value


def _differs(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    other_dtype = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
    return other_dtype or (device is not None and tensor.device != device)
