# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a shared module in a request's view of a pipeline: it looks like the module, and its calls suspend the fiber."""

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import greenlet
import torch

from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.stepping.shared_part import SharedPart, changes_of_fiber, in_fiber

# Methods that compute; all others are the module's own, and run in the fiber at once.
INTERCEPTED_METHODS = frozenset(
    {"forward", "encode", "decode", "generate", "get_image_features", "get_text_features", "get_image_tokens", "quantize", "tiled_decode"}
)
# A caller that passes one of these goes on with the keys and values of the result.
KEYS_AND_VALUES = frozenset({"use_cache", "past_key_values"})
AUTOCAST_DEVICES = ("cpu", "cuda")

_copies: weakref.WeakKeyDictionary[torch.nn.Module, dict[torch.dtype, torch.nn.Module]] = weakref.WeakKeyDictionary()


class SuspendingModule(SharedPart):
    """A stand-in for a component in a view: the engine makes its calls, while the fiber of the request waits.

    A fiber stops with a `ModelCall` and goes on with the answer. Parts of the module compute at once. All other use follows `SharedPart`.
    """

    def __init__(self, name: str, real: torch.nn.Module) -> None:
        super().__init__(name, real)
        self.__dict__.update(_name=name, _shared=real, _context="")

    def __getattr__(self, name: str) -> Any:
        if name in INTERCEPTED_METHODS and callable(method := getattr(self._real, name)):
            return self._asking(name, method)
        return super().__getattr__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._suspend("forward", *args, **kwargs)

    @contextlib.contextmanager
    def cache_context(self, name: str, **_where: Any) -> Iterator[None]:
        """Give the calls in this context a `name` for the step cache (`cond`, `uncond`), for this request only."""
        before, self.__dict__["_context"] = self._context, name
        try:
            yield
        finally:
            self.__dict__["_context"] = before

    def _reset_stateful_cache(self, **_where: Any) -> None:
        """Do nothing, though every classic pipeline calls this at its end: a step cache keeps its values by request."""

    def to(self, *args: Any, **kwargs: Any) -> "SuspendingModule":
        """Use another precision for this request only (SDXL decodes in float32): its calls go to a copy that all such requests share.

        A device, or a precision that the module has already, makes no copy. The stand-in itself is returned.
        """
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            self.__dict__["_real"] = made = _in_precision(self._shared, dtype)
            if made is not self._shared and (changes := changes_of_fiber()) is not None:
                changes.watch(self._name, made)
        return self

    def _asking(self, name: str, method: Any) -> Any:
        """Return a method that suspends the fiber, with the signature that some pipelines look at (Stable Video Diffusion)."""

        @functools.wraps(method)
        def ask(*args: Any, **kwargs: Any) -> Any:
            # A hook that a guider put around the method runs inside of the call that the engine makes.
            return self._suspend(name, *args, **kwargs) if in_fiber() else method(*args, **kwargs)

        return ask

    def _suspend(self, method: str, *args: Any, **kwargs: Any) -> Any:
        # The method is the class's, so that its signature is found once for all modules of a class.
        arguments = _bind(getattr(type(self._real), method), self._real, args, kwargs)
        parent = greenlet.getcurrent().parent
        assert parent is not None, "a stand-in is called inside a request's fiber only"
        return parent.switch(ModelCall(self._name, method, arguments, module=self._real, autocast=_autocast(), context=self._context))


def forget_copies() -> None:
    """Drop the copies in other precisions, because the weights they were made of are about to go or change."""
    _copies.clear()


def _in_precision(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    if all(tensor.dtype == dtype for tensor in module.parameters() if tensor.is_floating_point()):
        return module
    made = _copies.setdefault(module, {})
    if dtype not in made:
        made[dtype] = copy.deepcopy(module).to(dtype)
    return made[dtype]


def _bind(method: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Match a call's arguments to the method's signature; return them by name, without the module itself.

    The contents of `**kwargs` are merged in, since the engine passes everything by name. Language models get `use_cache=False`, unless the
    caller wants keys and values.
    """
    signature, rest = _signature(method)
    bound = signature.bind(module, *args, **kwargs).arguments
    arguments = dict(list(bound.items())[1:])
    if rest is not None:
        arguments.update(arguments.pop(rest, {}))
    if "use_cache" in signature.parameters and not KEYS_AND_VALUES & arguments.keys():
        # A language model as an encoder would return the keys and values of every layer, which nobody uses.
        arguments["use_cache"] = False
    return arguments


@functools.cache
def _signature(method: Any) -> tuple[inspect.Signature, str | None]:
    """Inspect a method, once for all requests; return its signature and its variable keyword parameter's name, None if it has none."""
    signature = inspect.signature(method)
    return signature, next((name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD), None)


def _autocast() -> tuple[str, torch.dtype] | None:
    for device in AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            return device, torch.get_autocast_dtype(device)
    return None
