# SPDX-License-Identifier: Apache-2.0
"""The worker's command line, from the spec.

The spec says `CamelCase` where the command line says `kebab-case`. Options at a default that the worker shares are left out (tests/contract
holds both together). A pinned image may be older than the operator and know fewer options.
"""

import re
from decimal import Decimal
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import ApiKeySecret, Cache, Compile, DeploymentSpec, Lora, Model
from diffusion_operator.api.names import (
    API_KEY_DIR,
    CACHE_DIR,
    CLAIMS_DIR,
    CONTROL_DIR,
    CONTROL_PORT,
    DATA_PORT,
    DESIRED_DIR,
    DESIRED_KEY,
    SECRETS_DIR,
    STATE_DIR,
    TOKEN_KEY,
)
from diffusion_operator.api.source import ModelSource

_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}
_FORM = re.compile(r"([0-9]+(?:[.][0-9]+)?)([A-Za-z]*)")

STOP_MARGIN_S = 15
"""From the end of a worker's drain to the end of its ranks."""
WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")
OTHER_WORDS: dict[str, str] = {Compile.DISABLED: "none"}


def worker_arguments(deployment: DiffusionDeployment) -> list[str]:
    """Build the worker's command line, from `serve` on. Equal specs give equal lists."""
    spec = deployment.spec
    usual = _tuning(DeploymentSpec(model=Model(source=spec.model.source)))
    options: dict[str, Any] = {
        "model": _model(spec.model.source),
        "served-name": deployment.served_names,
        "dtype": _dtypes(spec.model),
        "ranks": spec.parallelism.ranks_per_replica,
        "host": "0.0.0.0",
        "port": DATA_PORT,
        "control-port": CONTROL_PORT,
        "control-token-file": f"{CONTROL_DIR}/{TOKEN_KEY}",
        **_api_key(spec.service.api_key_secret),
        "desired": f"{DESIRED_DIR}/{DESIRED_KEY}",
        "max-batch-size": spec.engine.max_batch_size,
        **{name: value for name, value in _tuning(spec).items() if value != usual[name]},
        **_lora_options(spec.lora),
        "cache-dir": CACHE_DIR,
        **_cache_limit(spec.model.cache),
        "secrets-dir": SECRETS_DIR,
        "claims-dir": CLAIMS_DIR,
        "state-dir": STATE_DIR,
        "startup-timeout-seconds": spec.startup.timeout_seconds,
        "drain-timeout-seconds": spec.drain.timeout_seconds,
    }
    return ["serve", *(argument for name, value in options.items() for argument in _argument(name, value))]


def option_word(value: str) -> str:
    """Convert a value of the spec's enums to the command line's form: `MaxAutotune` to `max-autotune`, and `Disabled` to `none`."""
    return OTHER_WORDS.get(value) or WORD_START.sub("-", value).lower()


def _argument(name: str, value: Any) -> list[str]:
    """Format an option: a flag has no value, and a list repeats the option."""
    if value is True:
        return [f"--{name}"]
    return [f"--{name}={one}" for one in (value if isinstance(value, tuple) else (value,))]


def _tuning(spec: DeploymentSpec) -> dict[str, Any]:
    """Return the options that are passed only if they differ from their default."""
    engine, parallelism, warmup = spec.engine, spec.parallelism, spec.startup.warmup
    defaults, limits = spec.requests.defaults, spec.requests.limits
    return {
        "pipeline": "auto" if spec.model.pipeline == "Auto" else spec.model.pipeline,
        "load-format": option_word(engine.load_format),
        "compile": option_word(engine.compile),
        "offload": option_word(engine.offload),
        "quantization": option_word(engine.quantization),
        "step-cache": option_word(engine.step_cache),
        "exact": engine.exact,
        "vae-tiling": engine.vae_tiling,
        "batch-window-milliseconds": engine.batch_window_milliseconds,
        "prompt-cache-size": engine.prompt_cache_size,
        "tensor": parallelism.tensor,
        "sequence": parallelism.sequence,
        "shard": parallelism.shard,
        "warmup-steps": warmup.steps if warmup.enabled else 0,
        "warmup-size": warmup.sizes if warmup.enabled else (),
        "default-steps": defaults.steps,
        "default-guidance-scale": defaults.guidance_scale,
        "default-size": defaults.size,
        "max-steps": limits.max_steps,
        "max-pixels": limits.max_pixels,
        "max-images": limits.max_images,
    }


def _dtypes(model: Model) -> tuple[str, ...]:
    """Return the model's type, and that of each component with one of its own."""
    own = (f"{name}={option_word(dtype)}" for name, dtype in sorted(model.component_dtypes.items()))
    return option_word(model.dtype), *own


def _model(source: ModelSource) -> str:
    """Return the model's folder, or its source as JSON with names of Secrets and no secret values."""
    return source.path if source.path is not None else msgspec.json.encode(source).decode()


def _api_key(secret: ApiKeySecret | None) -> dict[str, str]:
    return {} if secret is None else {"api-key-file": f"{API_KEY_DIR}/{secret.key}"}


def _cache_limit(cache: Cache) -> dict[str, int]:
    """Return the option for the size of the cache, nine tenths of the folder's limit; empty without a limit.

    So it is below the kubelet's eviction, and a tenth is left for the current fetch.
    """
    limit = cache.empty_dir.size_limit if cache.empty_dir is not None else None
    return {} if limit is None else {"cache-size-bytes": max(1, quantity_bytes(limit) * 9 // 10)}


def _lora_options(lora: Lora) -> dict[str, Any]:
    return {
        "max-loras": lora.slots,
        "max-cached-loras": lora.cached,
        "max-lora-rank": lora.max_rank,
        "max-loras-per-request": lora.per_request,
        "lora-target-module": lora.target_modules,
        "lora-on-missing": option_word(lora.on_missing),
        "lora-load-timeout-seconds": lora.load_timeout_seconds,
    }


def quantity_bytes(given: int | str) -> int:
    """Convert a Kubernetes quantity to bytes, and round down to an integer.

    It may be a whole or decimal number, with or without suffix: `5Gi`, `1500M`, `0.5Ti`. Raises ValueError for any other form.
    """
    found = _FORM.fullmatch(str(given))
    if found is None or found[2] not in _FACTORS:
        raise ValueError(f"expected a quantity as in 5Gi, found {given!r}")
    return int(Decimal(found[1]) * _FACTORS[found[2]])
