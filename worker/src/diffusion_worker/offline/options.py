# SPDX-License-Identifier: Apache-2.0
"""Options of a script's engine, checked like those of the command line."""

import math
import re
import sys
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import click
import msgspec

from diffusion_worker import cli
from diffusion_worker.config import CLAIMS_DIR, OnMissing, QueueLimits, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.sources.options import locate_model, lora_defaults

# Options that only a server and its operator use, and those that the engine's own arguments set.
NOT_HERE = frozenset({"api_key_path", "control_token_path", "desired_path", "max_connections", "preload_loras", "queue", "ui"})
GIVEN = frozenset({"model", "model_source", "ranks"})
MAX_BATCH_WINDOW_S = 1.0
PLACE = re.compile(r" - at `\$\.?(.*)`$")


def worker_config(
    model: str | PathLike[str], ranks: int, loras: Mapping[str, str | PathLike[str]], options: Mapping[str, object]
) -> WorkerConfig:
    """Make an engine's settings from a script's arguments, checked as by `cli.check`; raise ConfigError with the name of a wrong option."""
    allowed = set(WorkerConfig.__struct_fields__) - NOT_HERE - GIVEN
    if unknown := sorted(set(options) - allowed):
        raise ConfigError(f"{unknown[0]}: unknown option of the engine, expected one of {', '.join(sorted(allowed))}")
    place = locate_model(fspath(model), str(options.get("claims_dir", CLAIMS_DIR)))
    # A script waits for all its images, so its queue has no bounds.
    endless = QueueLimits(sys.maxsize, math.inf, sys.maxsize)
    # An evicted adapter is loaded again when it is used, because a script has no operator to do it.
    # Standbys are for losses in a life longer than a script's.
    own: dict[str, Any] = {"served_name": place.name, "lora_on_missing": OnMissing.LOAD, "queue": endless, "standby_ranks": 0}
    if isinstance(slots := options.get("max_loras"), int):
        own |= lora_defaults(slots)
    fields: dict[str, Any] = {**own, **options, "model": place.folder, "model_source": place.source, "ranks": ranks}
    try:
        config = msgspec.convert(fields, WorkerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(described(error)) from None
    _check_ranges(fields, config)
    loaded = cli.parse_loras(tuple(f"{name}={fspath(path)}" for name, path in loras.items()))
    config = msgspec.structs.replace(config, preload_loras=loaded)
    cli.check(config)
    return config


def described(error: msgspec.ValidationError) -> str:
    """Return msgspec's message in the form `field: expected …`; unchanged if it names no field."""
    text = str(error)
    place = PLACE.search(text)
    return f"{place[1]}: {PLACE.sub('', text).replace('Expected', 'expected', 1)}" if place and place[1] else text


def _check_ranges(fields: Mapping[str, Any], config: WorkerConfig) -> None:
    """Raise ConfigError for a value outside the command line's range of the option with the field's name."""
    for option in cli.serve.params:
        name = str(option.name)
        if isinstance(option.type, click.IntRange | click.FloatRange) and fields.get(name) is not None:
            try:
                option.type.convert(fields[name], option, None)
            except click.BadParameter as error:
                raise ConfigError(f"{name}: {error.message}") from None
    if not 0 <= config.batch_window_s <= MAX_BATCH_WINDOW_S:
        raise ConfigError(f"batch_window_s: expected 0 to {MAX_BATCH_WINDOW_S:g}, found {config.batch_window_s:g}")
