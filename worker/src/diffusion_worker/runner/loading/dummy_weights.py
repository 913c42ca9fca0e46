# SPDX-License-Identifier: Apache-2.0
"""The modules of a model folder with random weights: the architecture comes from the configs, no weights file is read.

They serve to try a deployment, its sizes and its speed before the weights are there. The same folder gives the same weights on
every rank and at every start.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.loading.component import class_of


def build_dummy_modules(folder: Path, classes: Mapping[str, tuple[str, str]], dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """Build every component that is a module, by name; `classes` has the library and the class of each component.

    Raises:
        ConfigError: a component's class is unknown or its config.json is missing.
    """
    modules = {}
    for name, (library, kind) in sorted(classes.items()):
        found = class_of(name, library, kind)
        if isinstance(found, type) and issubclass(found, torch.nn.Module):
            modules[name] = _build(found, name, folder / name, dtype)
    return modules


def _build(kind: Any, name: str, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"component {name}: expected {folder / 'config.json'}, found nothing there")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        if issubclass(kind, transformers.PreTrainedModel):
            module = kind._from_config(kind.config_class.from_pretrained(folder, local_files_only=True))
        else:
            module = kind.from_config(kind.load_config(folder, local_files_only=True))
        _fill_zeros(module)
    return _cast(module, dtype)


def _fill_zeros(module: torch.nn.Module) -> None:
    """Randomise parameters that are all zero. With them every output of the model would be zero, whatever the request."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert a module to a dtype, except for what its class keeps in float32 when it is loaded."""
    kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    module.to(dtype)
    for name, parameter in module.named_parameters():
        if any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(torch.float32)
    return module
