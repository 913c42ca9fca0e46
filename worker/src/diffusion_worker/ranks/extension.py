# SPDX-License-Identifier: Apache-2.0
"""`--worker-extension`: the user's class, mixed into every rank's worker."""

import importlib
import inspect
import logging

from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.diffusion_worker import DiffusionWorker

log = logging.getLogger(__name__)


def extended_worker(path: str | None) -> tuple[type[DiffusionWorker], frozenset[str]]:
    """Return the worker's class, with the extension `module:Class` mixed in, and the names of the extension's public methods.

    The extension's own attributes win; a warning names those that hide one of the worker's.

    Raises:
        ConfigError: the path names no class that can be imported.
    """
    if path is None:
        return DiffusionWorker, frozenset()
    extension = _imported(path)
    hidden = sorted(name for name in vars(extension) if not name.startswith("__") and hasattr(DiffusionWorker, name))
    if hidden:
        log.warning("--worker-extension %s hides what the worker has itself: %s", path, ", ".join(hidden))
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
