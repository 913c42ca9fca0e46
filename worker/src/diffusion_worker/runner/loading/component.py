# SPDX-License-Identifier: Apache-2.0
"""A module of a model folder: its class, its config, its weights, and the check that they belong together.

Weights that can be read later straight to their place stay unread (`deferred_weights`); the library's `from_pretrained` loads the others.
Either way every tensor of the model must come from a file.
"""

import importlib
import logging
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import torch

from diffusion_worker.errors import ConfigError
from diffusion_worker.memory.checkpoint import Checkpoint, some_tensors
from diffusion_worker.memory.filling import read_ahead
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.runner.loading.deferred_weights import NotReadable, build_unread, checkpoint_of, is_known

logger = logging.getLogger(__name__)


def class_of(name: str, library: str, class_name: str) -> Any:
    """Import class `class_name` of component `name`.

    `library`, as a model index gives it, is a subpackage of `diffusers.pipelines` or else any package.

    Raises:
        ConfigError: the import fails or the class is missing; the message names the component.
    """
    try:
        package = getattr(diffusers.pipelines, library, None) or importlib.import_module(library)
        return getattr(package, class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"component {name}: {library}.{class_name} cannot be found: {error}") from error


def is_loadable(kind: Any) -> bool:
    """Return whether `load_component` can load the class: a torch module whose `from_pretrained` is that of its library.

    Diffusers' pipeline loads the other components.
    """
    return isinstance(kind, type) and issubclass(kind, torch.nn.Module) and is_known(kind)


def load_component(
    name: str, kind: Any, folder: Path, dtype: torch.dtype, *, unread: Placeholders | None = None, **options: Any
) -> torch.nn.Module:
    """Load a component from its folder.

    With `unread` its weights may stay in their files: the component then has placeholders, and `ModelWeights.place` reads them. With
    `options`, which go to `from_pretrained`, they are always read.

    Raises:
        ConfigError: the folder does not hold the class's files; the message names the component and the file.
    """
    _check_config(name, folder)
    try:
        checkpoint = checkpoint_of(kind, folder)
        if unread is None or unread.wanted_soon:
            read_ahead(checkpoint.tensors.values())
        if unread is not None and not options:
            try:
                module, unexpected = build_unread(kind, folder, dtype, checkpoint, unread)
                _say_unexpected(name, kind, unexpected)
                return module
            except NotReadable as reason:
                logger.info("component %s: loaded by %s.from_pretrained: %s", name, kind.__name__, reason)
        return _load_whole(name, kind, folder, dtype, checkpoint, options)
    except ConfigError as error:
        raise ConfigError(f"component {name}: {error}") from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, ImportError) as error:
        class_name = kind.__name__
        raise ConfigError(f"component {name}: {class_name} cannot be loaded from {folder}: {error}") from error


def _load_whole(name: str, kind: Any, folder: Path, dtype: torch.dtype, checkpoint: Checkpoint, options: dict[str, Any]) -> torch.nn.Module:
    given = {"dtype": dtype, "use_safetensors": True, "local_files_only": True, "variant": checkpoint.variant, "output_loading_info": True}
    module, info = kind.from_pretrained(folder, **given | options)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{folder}: no file has a value for {some_tensors(missing)}, which the model needs")
    _say_unexpected(name, kind, sorted(info["unexpected_keys"]))
    return module  # type: ignore[no-any-return]


def _say_unexpected(name: str, kind: Any, unexpected: list[str]) -> None:
    if unexpected:
        logger.warning("component %s: its files have %s that %s does not use", name, some_tensors(unexpected), kind.__name__)


def _check_config(name: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"component {name}: expected a folder {folder}, found {'a file' if folder.exists() else 'nothing there'}")
    path = folder / "config.json"
    try:
        msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"component {name}: {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"component {name}: {path} is not a JSON object: {error}") from None
