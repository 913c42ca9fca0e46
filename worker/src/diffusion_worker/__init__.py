# SPDX-License-Identifier: Apache-2.0
"""A server of one diffusion model on a group of ranks, and an engine for scripts: `from diffusion_worker import DiffusionEngine`.

Importing this package imports neither torch nor diffusers, because the server and every rank import it. A public name's module is
imported when the name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusion_worker.errors import ConfigError, ErrorCode, GroupFailed, RequestError, WorkerError
    from diffusion_worker.lora.request import LoRARequest
    from diffusion_worker.offline.engine import DiffusionEngine
    from diffusion_worker.offline.generated_image import GeneratedImage

__all__ = ["ConfigError", "DiffusionEngine", "ErrorCode", "GeneratedImage", "GroupFailed", "LoRARequest", "RequestError", "WorkerError"]

_HOMES = {
    "DiffusionEngine": "diffusion_worker.offline.engine",
    "GeneratedImage": "diffusion_worker.offline.generated_image",
    "LoRARequest": "diffusion_worker.lora.request",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines a name of `__all__`, now that the name is used, and return its value.

    Raises:
        AttributeError: no such name is public.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "diffusion_worker.errors")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
