# SPDX-License-Identifier: Apache-2.0
"""Everything that the modules of a pipeline have, to be compared before and after each request."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from diffusion_worker.lora.layers import LoRALayer

# Models keep this of their own calls. VAEs of diffusers begin each call by forgetting it. Models of transformers put hooks on at
# the first call, by which they return hidden states.
KEPT_BY_CALLS = {
    *("_feat_map", "_conv_idx", "_conv_num", "_enc_feat_map", "_enc_conv_idx", "_enc_conv_num"),
    "_output_capturing_hooks_installed",
    # Tables of positions, made at the first call of a size.
    *("_freqs_cache", "inv_freq"),
}
CAPTURING = "output_capturing_hook"
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, tuple)


def attributes_of(modules: dict[str, torch.nn.Module]) -> dict[str, Any]:
    """List by path: plain values as they are, everything else by its identity, and what is in dicts, lists and sets one by one."""
    found: dict[str, Any] = {}
    for name, module in modules.items():
        for path, part in module.named_modules(prefix=name):
            found |= {f"{path}.{key}": value for key, value in _flat(vars(part).items())}
    return found


def changes_of(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what is other than before, but for what calls keep and the layers that the engine gave to adapters."""
    wrapped = [path for path, value in now.items() if isinstance(value, LoRALayer)]
    places = tuple(path.replace("._modules.", ".") for path in wrapped)
    return [
        f"{path}: {_shown(before, path)} became {_shown(now, path)}"
        for path in sorted(before.keys() | now.keys())
        if not (_same(before, now, path) or path in wrapped or path.startswith(places) or KEPT_BY_CALLS & set(path.split(".")))
    ]


def _flat(items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[str, Any]]:
    for key, value in items:
        if type(value) in (dict, OrderedDict):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items() if getattr(item, "__name__", "") != CAPTURING)
        elif type(value) in (list, set):
            yield key, tuple(value)
        else:
            yield key, value


def _same(before: dict[str, Any], now: dict[str, Any], path: str) -> bool:
    if (path in before) != (path in now):
        return False
    one, other = before[path], now[path]
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(a is b or (isinstance(a, PLAIN) and a == b) for a, b in zip(one, other, strict=True))
    return isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other)


def _shown(values: dict[str, Any], path: str) -> str:
    return repr(values[path])[:80] if path in values else "nothing"
