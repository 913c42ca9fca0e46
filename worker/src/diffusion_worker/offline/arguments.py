# SPDX-License-Identifier: Apache-2.0
"""Arguments of a script's engine and of its calls, checked like the options of the command line and the fields of a request."""

import math
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple

import click
import msgspec
from PIL import ImageOps
from PIL.Image import Image

from diffusion_worker import cli
from diffusion_worker.config import CLAIMS_DIR, OnMissing, QueueLimits, WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import MAX_LORA_SCALE, InputImage
from diffusion_worker.engine.state.state_document import AdapterCall, AdapterState
from diffusion_worker.errors import ConfigError, RequestError, refused
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.messages import Task
from diffusion_worker.options import ADAPTER_NAME, check, parse_loras
from diffusion_worker.server.encoding.input_images import decoded
from diffusion_worker.sources.options import locate_model, lora_defaults
from diffusion_worker.sources.parsing import parse_source
from diffusion_worker.sources.source import Source

# Options that only a server and its operator use, and those that the engine's own arguments set.
NOT_HERE = frozenset({"api_key_path", "control_token_path", "desired_path", "max_connections", "preload_loras", "queue", "ui"})
GIVEN = frozenset({"model", "model_source", "ranks"})
MAX_BATCH_WINDOW_S = 1.0
PLACE = re.compile(r" - at `\$\.?(.*)`$")

AdapterArgument = str | LoRARequest | Sequence[str | LoRARequest] | None
Scales = float | Sequence[float] | None


def worker_config(
    model: str | PathLike[str], ranks: int, loras: Mapping[str, str | PathLike[str]], options: Mapping[str, object]
) -> WorkerConfig:
    """Make an engine's settings from a script's arguments, checked by `check`; raise ConfigError with the name of a wrong option."""
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
    loaded = parse_loras(tuple(f"{name}={fspath(path)}" for name, path in loras.items()))
    config = msgspec.structs.replace(config, preload_loras=loaded)
    check(config)
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


# --- adapters ---------------------------------------------------------------------------------------------------------


class WantedAdapter(NamedTuple):
    """An adapter of one call; without a path it must have been loaded before."""

    name: str
    source: Source | None
    scale: float | None


def wanted_adapters(lora_request: AdapterArgument, lora_scale: Scales) -> list[WantedAdapter]:
    """Return the adapters of a call; an empty list if `lora_request` is None. No file is read.

    If `lora_scale` is a list, each adapter has its scale from it. Otherwise its scale is None: a single scale is checked here, and the
    engine applies it.

    Raises:
        RequestError: InvalidRequest that names the argument.
    """
    asked = list(lora_request) if isinstance(lora_request, list | tuple) else [] if lora_request is None else [lora_request]
    scales: list[float | None] = [None] * len(asked)
    if isinstance(lora_scale, Sequence):
        scales = list(lora_scale)
        if len(scales) != len(asked):
            raise refused("lora_scale", f"a number for each of the {len(asked)} adapters", f"{len(scales)} numbers")
    for scale in [*scales, *([] if isinstance(lora_scale, Sequence) else [lora_scale])]:
        if scale is not None and not (isinstance(scale, int | float) and abs(scale) <= MAX_LORA_SCALE):
            raise refused("lora_scale", f"a number from -{MAX_LORA_SCALE:g} to {MAX_LORA_SCALE:g}", repr(scale))
    return [_wanted(each, scale) for each, scale in zip(asked, scales, strict=True)]


def _wanted(asked: object, scale: float | None) -> WantedAdapter:
    if isinstance(asked, str):
        return WantedAdapter(asked, None, scale)
    if not isinstance(asked, LoRARequest):
        raise refused("lora_request", "the name of an adapter, a LoRARequest, or a list of them", type(asked).__name__)
    if not isinstance(asked.lora_name, str) or not ADAPTER_NAME.fullmatch(asked.lora_name):
        raise refused(
            "lora_request",
            "a lora_name of a-z, 0-9, '.', '_' and '-', first and last a letter or digit, at most 63 long",
            repr(asked.lora_name),
        )
    if not isinstance(asked.lora_path, str | PathLike):
        raise refused("lora_request", f"a path or source as lora_path of {asked.lora_name!r}", type(asked.lora_path).__name__)
    try:
        return WantedAdapter(asked.lora_name, parse_source(fspath(asked.lora_path)), scale)
    except ConfigError as error:
        raise refused("lora_request", "a lora_path that is a path or a source", str(error)) from None


async def load_adapters(engine: Engine, wanted: Sequence[WantedAdapter]) -> None:
    """Load the adapters that have a source, one after another.

    One that is loaded from its path is read again if its files changed. A source elsewhere is not asked again while the adapter is loaded.
    Adapters without a source are not looked up. The first failure raises its RequestError, and the rest are not loaded.
    """
    for name, source, _ in wanted:
        if source is not None and (source.path is not None or not _is_loaded(engine, name, source)):
            call = AdapterCall(operation_id=uuid.uuid4().hex, source=source, deadline_seconds=engine.config.lora_load_timeout_s)
            await engine.put_adapter(name, call)


def _is_loaded(engine: Engine, name: str, source: Source) -> bool:
    try:
        document = engine.model_document(name)
    except RequestError:
        return False
    return document is not None and document.source == source and document.state is AdapterState.LOADED


# --- images -----------------------------------------------------------------------------------------------------------


def image_fields(image: Image | Sequence[Image] | None, mask: Image | None, strength: float | None) -> dict[str, object]:
    """Return the fields of a request that starts from images: task, images, mask and strength; an empty dict without an image.

    Raises:
        RequestError: InvalidRequest, for something else than images, or a mask or a strength without an image.
    """
    if image is None:
        for field, value in (("mask", mask), ("strength", strength)):
            if value is not None:
                raise refused(field, "an image with it", "none")
        return {}
    images = [image] if isinstance(image, Image) or not isinstance(image, Sequence) else list(image)
    return {
        "task": Task.EDIT if mask is None else Task.INPAINT,
        "images": [_image(one) for one in images],
        "mask": None if mask is None else _mask(mask),
        "strength": strength,
    }


def _image(image: object) -> InputImage:
    """Convert an image to its visible form: turned by its EXIF, transparent parts on white."""
    turned = ImageOps.exif_transpose(_required("image", image))
    return decoded(turned, turned.size).image


def _mask(image: object) -> InputImage:
    """Convert a mask to levels of grey, turned by its EXIF; white is to be painted again. Raise RequestError unless it is a PIL image."""
    grey = ImageOps.exif_transpose(_required("mask", image)).convert("L")
    return InputImage(grey.tobytes(), grey.height, grey.width, 1)


def _required(field: str, image: object) -> Image:
    if not isinstance(image, Image):
        raise refused(field, "a PIL image", type(image).__name__)
    return image
