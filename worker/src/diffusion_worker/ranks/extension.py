# SPDX-License-Identifier: Apache-2.0
"""`--worker-extension`: the user's class, mixed into every rank's worker."""

import importlib
import inspect
import logging

from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.diffusion_worker import DiffusionWorker

log = logging.getLogger(__name__)


def extended_worker(path: str | None) -> tuple[type[DiffusionWorker], frozenset[str]]:
    """Import the class at `path` (`module:Class`) and derive a worker class from it and `DiffusionWorker`, in this order.

    Also return the names of its public methods, which the server may call. A warning lists attributes that override the worker's. Without a
    path the result is the plain worker and no names.

    Raises:
        ConfigError: the path is not of that form, cannot be imported, or names something else than a class.
    """
    if path is None:
        return DiffusionWorker, frozenset()
    extension = _imported(path)
    hidden = sorted(name for name in vars(extension) if not name.startswith("__") and hasattr(DiffusionWorker, name))
    if hidden:
        log.warning("--worker-extension %s replaces attributes of the worker's own class: %s", path, ", ".join(hidden))
    mixed = type(f"DiffusionWorkerWith{extension.__name__}", (extension, DiffusionWorker), {})
    methods = frozenset(name for name, _ in inspect.getmembers(extension, inspect.isfunction) if not name.startswith("_"))
    return mixed, methods


def _imported(path: str) -> type:
    module, separator, name = path.partition(":")
    if not separator or not module or not name:
        raise ConfigError(f"--worker-extension {path!r}: expected MODULE:CLASS")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--worker-extension {path!r}: cannot be imported: {error}") from error
    if not inspect.isclass(found):
        raise ConfigError(f"--worker-extension {path!r}: expected a class, found {type(found).__name__}")
    return found
