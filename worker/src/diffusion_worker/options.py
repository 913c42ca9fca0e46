# SPDX-License-Identifier: Apache-2.0
"""Options of `serve`: their conversion to a config, and the checks of a config, alone and against what it names."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import click

from diffusion_worker.compatibility import check_together, sleep_blocker
from diffusion_worker.config import (
    Compile,
    Device,
    Dtype,
    LoadFormat,
    Offload,
    OnMissing,
    Quantization,
    QueueLimits,
    RequestDefaults,
    RequestLimits,
    StartMethod,
    StepCache,
    WorkerConfig,
    read_model_index,
    split_import_path,
)
from diffusion_worker.engine.sleep.policy import read_desired
from diffusion_worker.engine.state.state_document import SleepPolicy
from diffusion_worker.errors import ConfigError
from diffusion_worker.sources.options import check_lora_bounds, check_source_paths, check_sources, locate_model, lora_defaults, shown

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
# A name as clients have it fixed, such as openai/gpt-image-1.
OTHER_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")
ADAPTER_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
EXTENSION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
ORIGIN = re.compile(r"\*|https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")

# Options that have one of a few values, and those that bound a request, with the fields they set.
KINDS = {
    "device": Device,
    "start_method": StartMethod,
    "load_format": LoadFormat,
    "compile": Compile,
    "offload": Offload,
    "quantization": Quantization,
    "step_cache": StepCache,
    "lora_on_missing": OnMissing,
}
LIMITS = {
    "max_steps": "max_steps",
    "max_pixels": "max_pixels",
    "max_images": "max_images",
    "max_prompt_characters": "max_prompt_chars",
}
QUEUE = ("max_queued", "max_queued_seconds", "max_queued_bytes")


def the_model(argument: str | None, option: str | None) -> str:
    """Return the model's source, which is given as an argument or as an option.

    Raises:
        click.UsageError: it is given twice, or not at all.
    """
    given = [source for source in (argument, option) if source is not None]
    if len(given) != 1:
        raise click.UsageError(f"expected the model once, as SOURCE or as --model, found {' and '.join(given) or 'none'}")
    return given[0]


def config_of(options: dict[str, Any]) -> WorkerConfig:
    """Convert the options of `serve` to a config. An option that needs no conversion must have its field's name.

    The options are not compared with each other, which `check` does, and nothing is fetched.

    Raises:
        ConfigError: a value is malformed. click.UsageError: the model is given twice, or not at all.
    """
    plain = dict(options)
    rendezvous_host, rendezvous_port = parse_address(plain.pop("rendezvous_address"))
    model = the_model(plain.pop("model"), plain.pop("model_option"))
    place = locate_model(model, plain["claims_dir"])
    slots, names = lora_defaults(plain["max_loras"]), plain.pop("served_names")
    converted: dict[str, Any] = {
        "model": place.folder,
        "model_source": place.source,
        "served_name": names[0] if names else place.name,
        "other_names": list(names[1:]),
        "preload_loras": parse_loras(plain.pop("loras")),
        **parse_dtypes(plain.pop("dtypes")),
        "rendezvous_host": rendezvous_host,
        "rendezvous_port": rendezvous_port,
        "batch_window_s": plain.pop("batch_window_milliseconds") / 1000,
        "warmup_sizes": [parse_size(size, "--warmup-size") for size in plain.pop("warmup_sizes")],
        "defaults": request_defaults(*map(plain.pop, ("default_steps", "default_guidance_scale", "default_size"))),
        "lora_target_modules": list(plain.pop("lora_target_modules")),
        "cors_origins": parse_origins(plain.pop("cors_origins")),
        "queue": QueueLimits(**{name: plain.pop(name) for name in QUEUE}),
        "limits": RequestLimits(**{field: plain.pop(option) for option, field in LIMITS.items()}),
    }
    converted |= {name: kind(plain.pop(name)) for name, kind in KINDS.items()}
    converted |= {name: usual if (given := plain.pop(name)) is None else given for name, usual in slots.items()}
    return WorkerConfig(**converted, **plain)


def parse_loras(options: tuple[str, ...]) -> dict[str, str]:
    """Split each `--lora NAME=SOURCE`, and return the sources by name. They stay text, which `check` parses later.

    Raises:
        ConfigError: an option lacks its source, or a name is malformed or occurs twice.
    """
    found: dict[str, str] = {}
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or not path:
            raise ConfigError(f"--lora {option!r}: expected NAME=SOURCE")
        if not ADAPTER_NAME.fullmatch(name):
            expected = "a name of a-z, 0-9, '.', '_' and '-', first and last a letter or digit, at most 63 long"
            raise ConfigError(f"--lora {option!r}: expected {expected}, found {name!r}")
        if name in found:
            raise ConfigError(f"--lora {option!r}: the name {name!r} is given twice")
        found[name] = path
    return found


def parse_dtypes(options: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields `dtype` (auto without a plain `--dtype DTYPE`) and `component_dtypes` (from each `--dtype COMPONENT=DTYPE`).

    Raises:
        ConfigError: a dtype is unknown, a component's is auto, or the same component or the plain dtype is given twice.
    """
    usual: list[Dtype] = []
    own: dict[str, Dtype] = {}
    for option in options:
        component, separator, name = option.rpartition("=")
        if separator and not component.isidentifier():
            raise ConfigError(f"--dtype {option!r}: expected COMPONENT=DTYPE, as vae=float32")
        allowed = [dtype for dtype in Dtype if not component or dtype is not Dtype.AUTO]
        if name not in allowed:
            expected = ", ".join(allowed) + ("" if component else ", or COMPONENT=DTYPE")
            raise ConfigError(f"--dtype {option!r}: expected one of {expected}, found {name!r}")
        if component in own or (usual and not component):
            raise ConfigError(f"--dtype {option!r}: the dtype of {component or 'all components'} is given twice")
        if component:
            own[component] = Dtype(name)
        else:
            usual.append(Dtype(name))
    return {"dtype": usual[0] if usual else Dtype.AUTO, "component_dtypes": own}


def parse_origins(options: tuple[str, ...]) -> list[str]:
    """Return the origins of every `--cors-origin` in lower case, as browsers send them.

    Raises:
        ConfigError: an origin is neither `*` nor an address of http or https without a path.
    """
    for option in options:
        if not ORIGIN.fullmatch(option.lower()):
            raise ConfigError(f"--cors-origin: expected an origin without a path, as https://app.example:8443, or *, found {option!r}")
    return [option.lower() for option in options]


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `--rendezvous-address`, 0 to 65535; raise ConfigError for an IPv6 address, a missing part or another port."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or ":" in host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--rendezvous-address: expected HOST:PORT with a port of 0 to 65535, found {address!r}")
    return host, int(port)


def parse_size(size: str, option: str) -> tuple[int, int]:
    """Return the two numbers of `WIDTHxHEIGHT`, width first; raises ConfigError for any other text, and begins it with `option`."""
    found = SIZE.fullmatch(size)
    if found is None:
        raise ConfigError(f"{option}: expected WIDTHxHEIGHT in pixels, found {size!r}")
    return int(found[1]), int(found[2])


def request_defaults(steps: int | None, guidance_scale: float | None, size: str | None) -> RequestDefaults:
    """Return the defaults for values that a request leaves out; raises ConfigError if the size is malformed."""
    width, height = parse_size(size, "--default-size") if size else (None, None)
    return RequestDefaults(steps=steps, guidance_scale=guidance_scale, width=width, height=height)


def check(config: WorkerConfig) -> None:
    """Check the options, and then the places that they name; raise ConfigError as `check_options` and `check_places` do."""
    check_options(config)
    check_places(config)


def check_options(config: WorkerConfig) -> None:
    """Check the options, each alone and against the others, without a look at what they name.

    Raises:
        ConfigError: the first option that is wrong, by name, or that excludes another.
    """
    _check_pipeline(config)
    if not NAME.fullmatch(config.served_name):
        expected = "letters, digits, '.', '_' and '-', first and last a letter or digit, at most 63"
        raise ConfigError(f"--served-name: expected {expected}, found {config.served_name!r}")
    for name in config.other_names:
        if not OTHER_NAME.fullmatch(name):
            expected = "letters, digits, '.', '_', '-' and '/', first and last a letter or digit, at most 128"
            raise ConfigError(f"--served-name: expected {expected}, found {name!r}")
    for name in (name for name in config.served_names if name in config.preload_loras):
        text = shown(config.preload_loras[name])
        raise ConfigError(f"--lora {name}={text}: the name is a served name of the model: choose another name, or another --served-name")
    for component in (name for name, dtype in config.component_dtypes.items() if dtype is Dtype.AUTO):
        raise ConfigError(f"component_dtypes: {component}: expected one of float32, float16, bfloat16, found auto")
    check_sources(config)
    check_lora_bounds(config)
    check_together(config)
    check_ranks(config)
    check_requests(config)


def check_places(config: WorkerConfig) -> None:
    """Check the local files, folders and packages that the options name, without a fetch; make the state folder if it is missing.

    They are a local model's index, a pipeline's package, adapters' paths, the cache, state and profile folders, and the file of
    `--desired`. A package must be found, but is not imported: a search for its module would run the package's code.

    Raises:
        ConfigError: the first option that names a place that is missing or cannot be used.
    """
    if config.model_source is None:
        try:
            read_model_index(config.model)
        except ConfigError as error:
            raise ConfigError(f"--model: {error}") from None
    if config.load_format is LoadFormat.CUSTOM_PIPELINE:
        package = split_import_path(config.pipeline, "--pipeline")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"--pipeline {config.pipeline!r}: there is no module {package!r}")
    check_source_paths(config)
    _check_folders(config)
    policy = read_desired(config.desired_path).sleep.policy
    if policy is not SleepPolicy.ALWAYS_AWAKE and (option := sleep_blocker(config)):
        raise ConfigError(f"{option}: not supported with the sleep policy {policy} of the file {config.desired_path!r}")


def check_requests(config: WorkerConfig) -> None:
    """Raise ConfigError, with the option's name, if the default steps, the default size or a warm-up size is over the limit of requests."""
    defaults, limits = config.defaults, config.limits
    if defaults.steps is not None and defaults.steps > limits.max_steps:
        raise ConfigError(f"--default-steps: expected at most --max-steps {limits.max_steps}, found {defaults.steps}")
    sizes = [("--warmup-size", size) for size in config.warmup_sizes]
    if defaults.width and defaults.height:
        sizes.append(("--default-size", (defaults.width, defaults.height)))
    for option, (width, height) in sizes:
        if width * height > limits.max_pixels:
            raise ConfigError(f"{option}: expected at most --max-pixels {limits.max_pixels}, found {width}x{height}")


def _check_pipeline(config: WorkerConfig) -> None:
    """Check that `--pipeline` is an import path for the format custom-pipeline, and otherwise a class name or `auto`; raises ConfigError.

    A class of diffusers is not looked up: any identifier passes.
    """
    if config.load_format is LoadFormat.CUSTOM_PIPELINE:
        if config.pipeline == "auto":
            raise ConfigError("--load-format custom-pipeline: expected --pipeline with an import path, module:Class, found none")
        split_import_path(config.pipeline, "--pipeline")
    elif not config.pipeline.isidentifier():
        raise ConfigError(
            f"--pipeline {config.pipeline!r}: expected a class of diffusers; an import path needs --load-format custom-pipeline"
        )


def check_ranks(config: WorkerConfig) -> None:
    """Raise ConfigError for standby ranks with forkserver, or a malformed `--worker-extension`."""
    if config.standby_ranks and config.start_method is StartMethod.FORKSERVER:
        raise ConfigError(
            f"--standby-ranks: expected 0 with --start-method forkserver, which starts ranks fast anyway, found {config.standby_ranks}"
        )
    if config.worker_extension is not None and not EXTENSION.fullmatch(config.worker_extension):
        raise ConfigError(f"--worker-extension: expected MODULE:CLASS, found {config.worker_extension!r}")


def _check_folders(config: WorkerConfig) -> None:
    """Raise ConfigError for a state or profile folder that cannot be used.

    A missing state folder is made; the profile folder must exist. Both must be writable.
    """
    if config.state_dir is not None:
        try:
            Path(config.state_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--state-dir: expected a folder, or a place for one, found {config.state_dir!r}: {error.strerror}") from None
        if not os.access(config.state_dir, os.W_OK):
            raise ConfigError(f"--state-dir: expected a folder that can be written to, found {config.state_dir!r}")
    if config.profile_dir is not None and not (Path(config.profile_dir).is_dir() and os.access(config.profile_dir, os.W_OK)):
        raise ConfigError(f"--profile-dir: expected a folder that can be written to, found {config.profile_dir!r}")
