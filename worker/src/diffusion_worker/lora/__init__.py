# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on a rank: their files, layers with slots for them, and the managers of both.

Importing this package imports no torch, because code that only names an adapter (`LoRARequest`) needs none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
    from diffusion_worker.lora.model_manager import LoRAModel, LoRAModelManager, LRUCacheLoRAModelManager
    from diffusion_worker.lora.request import LoRARequest

__all__ = ["DiffusionLoRAManager", "LRUCacheLoRAModelManager", "LoRAModel", "LoRAModelManager", "LoRARequest"]

_HOMES = {"DiffusionLoRAManager": "diffusion_manager", "LoRARequest": "request"}


def __getattr__(name: str) -> Any:
    """Import a public name's module, which may import torch, only when the name is used; return the name's value.

    Raises:
        AttributeError: no such name is public.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'model_manager')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
