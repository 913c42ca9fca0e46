# SPDX-License-Identifier: Apache-2.0
"""Sources on the command line and in scripts, checked before anything is fetched or started."""

import os
import tempfile
import uuid
from pathlib import Path

import msgspec

from diffusion_worker.config import WorkerConfig, served_name_of
from diffusion_worker.errors import ConfigError, RequestError
from diffusion_worker.lora.located import WEIGHTS
from diffusion_worker.sources.in_place import claim_path
from diffusion_worker.sources.parsing import is_remote, parse_source
from diffusion_worker.sources.source import Source
from diffusion_worker.sources.transport_rules import require_scheme

# Defaults that follow from the number of slots, so that a worker with slots needs no further option.
USUAL_CACHED = 16
USUAL_PER_REQUEST = 4


class ModelPlace(msgspec.Struct, frozen=True):
    """A model's present or future path, its source if it is not here yet, and its name."""

    folder: str
    source: str | None
    name: str


def locate_model(text: str, claims_dir: str) -> ModelPlace:
    """Return the place of the model that `--model` names; raise ConfigError for an http address or no source.

    Neither a path nor a claim is looked up. The folder of a remote model is a new name below the temporary folder, where nothing is yet.
    """
    try:
        source = parse_source(text)
        check_names(source)
        if source.http is not None:
            raise ConfigError("an http address is not supported for a model, because it gives one file and a model is a folder")
        if source.path is not None:
            return ModelPlace(source.path, None, served_name_of(source.path))
        if source.pvc is not None:
            folder = str(claim_path(source.pvc, claims_dir)[1])
            return ModelPlace(folder, None, served_name_of(folder))
    except RequestError as error:
        raise ConfigError(f"--model: {error.code}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from None
    # A link is made there after the fetch, so the ranks can get its path before.
    folder = str(Path(tempfile.gettempdir()) / f"diffusion-model-{uuid.uuid4().hex}")
    return ModelPlace(folder, text, _name_of(source))


def lora_defaults(max_loras: int) -> dict[str, int]:
    """Return the defaults of `max_cached_loras` and `max_loras_per_request` for a number of slots, `max_loras`."""
    return {
        "max_cached_loras": max(USUAL_CACHED, max_loras),
        "max_loras_per_request": min(USUAL_PER_REQUEST, max_loras or USUAL_PER_REQUEST),
    }


def check_sources(config: WorkerConfig) -> None:
    """Check form and scheme of the sources of the model and the adapters; raise ConfigError with the option's name."""
    if config.model_source is not None:
        _check_schemes(parse_source(config.model_source), "--model", config)
    for name, text in config.preload_loras.items():
        option = f"--lora {name}={shown(text)}"
        try:
            source = parse_source(text)
            check_names(source)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None
        _check_schemes(source, option, config)


def check_source_paths(config: WorkerConfig) -> None:
    """Check that the cache folder can be written to, and that adapters' paths are there; raise ConfigError with the option's name.

    Nothing remote and no claim of an adapter is looked up.
    """
    if config.cache_dir is not None and not (Path(config.cache_dir).is_dir() and os.access(config.cache_dir, os.W_OK)):
        raise ConfigError(f"--cache-dir: expected a folder that can be written to, found {config.cache_dir!r}")
    for name, text in config.preload_loras.items():
        path = parse_source(text).path
        if path is not None:
            _check_path(Path(path), f"--lora {name}={shown(text)}")


def check_lora_bounds(config: WorkerConfig) -> None:
    """Check that `--max-cached-loras` is at least `--max-loras`, `--max-loras-per-request` at most that, and that every `--lora` has room.

    Raises:
        ConfigError: two options contradict each other; it has both names and values.
    """
    if config.max_cached_loras < config.max_loras:
        raise ConfigError(f"--max-cached-loras: expected at least --max-loras {config.max_loras}, found {config.max_cached_loras}")
    if config.max_loras and config.max_loras_per_request > config.max_loras:
        raise ConfigError(f"--max-loras-per-request: expected at most --max-loras {config.max_loras}, found {config.max_loras_per_request}")
    count = len(config.preload_loras)
    if count and not config.max_loras:
        raise ConfigError(f"--lora: found {count} adapters, but --max-loras is 0, which allows none")
    if count > config.max_cached_loras:
        raise ConfigError(f"--lora: found {count} adapters, but --max-cached-loras is {config.max_cached_loras}")


def check_names(source: Source) -> None:
    """Check the names of claims, Secrets and their keys, which become parts of paths; raises ConfigError."""
    hub, s3, pvc = source.hugging_face, source.s3, source.pvc
    names = {"pvc.claimName": pvc.claim_name if pvc else None}
    if hub is not None and hub.token_secret_ref is not None:
        names |= {"huggingFace.tokenSecretRef.name": hub.token_secret_ref.name, "huggingFace.tokenSecretRef.key": hub.token_secret_ref.key}
    if s3 is not None and s3.credentials_secret_ref is not None:
        names["s3.credentialsSecretRef.name"] = s3.credentials_secret_ref.name
    for field, name in names.items():
        if name is not None and (not name or "/" in name or name in (".", "..")):
            raise ConfigError(f"{field}: expected a name without slashes, found {name!r}")


def shown(text: str) -> str:
    """Return a source's text up to its first question mark, so that no signature appears in messages."""
    return text.partition("?")[0]


def _check_schemes(source: Source, option: str, config: WorkerConfig) -> None:
    endpoint = source.s3.endpoint if source.s3 is not None else None
    address = source.http.url if source.http is not None else endpoint
    if address is None:
        return
    try:
        require_scheme(address.partition("://")[0].lower(), allow_http=config.allow_http_sources)
    except RequestError as error:
        raise ConfigError(f"{option}: {error.message}; --allow-http-sources allows http") from None


def _check_path(path: Path, option: str) -> None:
    if not path.exists():
        raise ConfigError(f"{option}: expected an adapter's folder or *{WEIGHTS} file, found nothing there")
    if path.is_file() and path.suffix != WEIGHTS:
        raise ConfigError(f"{option}: expected an adapter's folder or *{WEIGHTS} file, found a file {path.name!r}")


def _name_of(source: Source) -> str:
    """Derive a served name from a remote model's source: a repository without its owner, or the last folder of an S3 URI."""
    assert is_remote(source)
    address = source.hugging_face.repo if source.hugging_face is not None else source.s3.uri if source.s3 is not None else ""
    return address.rstrip("/").rpartition("/")[2]
