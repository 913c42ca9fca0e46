# SPDX-License-Identifier: Apache-2.0
"""What peft's configuration says of an adapter: its scaling, module by module, and whether it is a plain LoRA at all.

It is `adapter_config.json` of a peft folder, or what diffusers writes into a file's metadata. There,
`pipeline.save_lora_weights` puts a component's name before each field, and `model.save_lora_adapter` puts none.
The rules are those of `peft.LoraConfig` 0.21: a pattern is a regular expression for the end of a module's name, the first that
fits counts. A field that is not known here refuses the adapter: nobody can tell if it changes the scaling.
"""

import functools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.formats import is_component
from diffusion_worker.lora.header import shown

CONFIG_FILE = "adapter_config.json"
METADATA_KEY = "lora_adapter_metadata"
MAX_CONFIG_BYTES = 4 << 20
MAX_PATTERNS = 4096
# A pattern comes with the adapter: what could take exponential or high polynomial time is refused.
_PLAIN_PATTERN = re.compile(r"[\w.^$\\()|-]*")
_QUANTIFIER = re.compile(r"[*+?{]")
_MAX_QUANTIFIERS = 2
# Initial values that change the base model itself when peft loads the adapter; and those that only begin a training.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_PLAIN_INITS = ("none", "true", "false", "gaussian", "eva", "orthogonal")
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "none")
_OTHER_KINDS = (
    "use_dora", "bias", "modules_to_save", "lora_bias", "use_qalora", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens", "layer_replication", "megatron_config", "monteclora_config", "kasa_config", "use_bdlora", "arrow_config",
    "velora_config",
)  # fmt: skip
# About training, or about which modules get factors, which the tensors themselves show.
_WITHOUT_EFFECT = (
    "peft_type", "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "init_lora_weights", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying", "runtime_config",
)  # fmt: skip

Patterns = dict[str, int | float]


class PeftSettings(msgspec.Struct, frozen=True):
    """The fields that decide how a LoRA is applied."""

    r: int = 8
    lora_alpha: int | float = 8
    use_rslora: bool = False
    rank_pattern: Patterns | None = None
    alpha_pattern: Patterns | None = None
    target_modules: list[str] | str | None = None
    base_model_name_or_path: str | None = None

    def scaling(self, module: str, rank: int, label: str) -> float:
        """alpha / r (with rank-stabilised scaling alpha / sqrt(r)) of a module whose factors have this rank.

        Raises:
            RequestError: InvalidAdapter where the rank is another than here, or the module is no target.
        """
        expected = _first_fit(self.rank_pattern, module, self.r)
        if expected != rank:
            raise _invalid(f"{label}: {module}: expected rank {expected} as the configuration says, found {rank}")
        if not self._targets(module):
            raise _invalid(f"{label}: {module} is none of the configuration's target_modules")
        alpha = _first_fit(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def alpha(self) -> float | None:
        """The alpha where there is one for all modules."""
        alphas = {self.lora_alpha, *(self.alpha_pattern or {}).values()}
        return float(self.lora_alpha) if len(alphas) == 1 else None

    def _targets(self, module: str) -> bool:
        targets = self.target_modules
        if not targets or targets == "all-linear":
            return True
        if isinstance(targets, str):
            return re.fullmatch(targets, module) is not None
        return any(module == target or module.endswith(f".{target}") for target in targets)


def read_settings(path: Path, label: str) -> PeftSettings:
    """Read `adapter_config.json`.

    Raises:
        RequestError: InvalidAdapter, or UnsupportedFormat for what is no plain LoRA.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _invalid(f"{label}: expected a peft folder, but {CONFIG_FILE}: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise _invalid(f"{label}: {CONFIG_FILE} is over the limit of {MAX_CONFIG_BYTES} bytes")
    document = _decode(data, f"{label}: {CONFIG_FILE}")
    return _settings({"peft_type": None} | document, f"{label}: {CONFIG_FILE}")


def settings_in_metadata(metadata: Mapping[str, str], label: str, *, denoiser: str) -> dict[str, PeftSettings]:
    """By component, what diffusers wrote beside the tensors; empty where it wrote nothing.

    Fields without a component's name are the denoiser's: `save_lora_adapter` writes the adapter of a single model, and only
    denoisers have that method.

    Raises:
        RequestError: InvalidAdapter, or UnsupportedFormat for what is no plain LoRA, or is not understood.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return {}
    label = f"{label}: {METADATA_KEY}"
    document = _decode(text.encode(), label)
    bare = [key for key in document if "." not in key]
    if bare and len(bare) < len(document):
        named = next(key for key in document if "." in key)
        raise _invalid(f"{label}: expected all fields with a component's name or none, found {shown(bare[0])} and {shown(named)}")
    by_component: dict[str, dict[str, Any]] = {}
    for key, value in document.items():
        component, _, field = key.rpartition(".")
        if component and not is_component(component, denoiser=denoiser):
            raise _invalid(f"{label}: {shown(key)}: expected a component's name before the field, as {denoiser}.{shown(field)}")
        by_component.setdefault(component or denoiser, {})[field] = value
    return {component: _settings(fields, f"{label}: {shown(component)}") for component, fields in by_component.items()}


def _decode(data: bytes, label: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{label} cannot be read: {str(error)[:120]}") from None
    if not isinstance(document, dict):
        raise _invalid(f"{label} is no JSON object")
    return document


def _settings(document: dict[str, Any], label: str) -> PeftSettings:
    """What peft would not apply by these factors alone is refused by name."""
    found = [f"{field} {ascii(document[field])[:80]}" for field in _OTHER_KINDS if document.get(field) not in _NEUTRAL]
    if document.get("peft_type", "LORA") != "LORA":
        found.insert(0, f"peft_type {ascii(document['peft_type'])[:80]}")
    if str(document.get("init_lora_weights")).lower().startswith(_BASE_CHANGING):
        found.append(f"init_lora_weights {ascii(document['init_lora_weights'])[:80]}, which changes the base model")
    if found:
        raise RequestError(ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected a plain LoRA, found {', '.join(found)}")
    _require_understood(document, label)
    try:
        settings = msgspec.convert(document, PeftSettings)
    except msgspec.ValidationError as error:
        raise _invalid(f"{label} is wrong: {error}") from None
    # A comparison: a whole number may be too large to be a float at all.
    if not all(abs(alpha) <= sys.float_info.max for alpha in (settings.lora_alpha, *(settings.alpha_pattern or {}).values())):
        raise _invalid(f"{label}: lora_alpha is not finite")
    targets = [settings.target_modules] if isinstance(settings.target_modules, str) else []
    _check_patterns([*(settings.rank_pattern or {}), *(settings.alpha_pattern or {}), *targets], label)
    return settings


def _require_understood(document: dict[str, Any], label: str) -> None:
    """Refuse fields of a later peft that are in use: only peft itself would know how they change the factors' effect."""
    known = {*PeftSettings.__struct_fields__, *_OTHER_KINDS, *_WITHOUT_EFFECT}
    unknown = [f"{shown(field)} {ascii(value)[:80]}" for field, value in document.items() if field not in known and value not in _NEUTRAL]
    if str(document.get("init_lora_weights")).lower() not in _PLAIN_INITS:
        unknown.append(f"init_lora_weights {ascii(document['init_lora_weights'])[:80]}")
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise RequestError(ErrorCode.UNSUPPORTED_FORMAT, f"{label}: settings that are not understood: {', '.join(unknown[:3])}{more}")


def _check_patterns(patterns: Sequence[str], label: str) -> None:
    if len(patterns) > MAX_PATTERNS:
        raise _invalid(f"{label}: {len(patterns)} patterns are over the limit of {MAX_PATTERNS}")
    for pattern in patterns:
        simple = _PLAIN_PATTERN.fullmatch(pattern) or (
            len(_QUANTIFIER.findall(pattern)) <= _MAX_QUANTIFIERS and not re.search(r"\)[*+?{]", pattern)
        )
        if not simple or len(pattern) > 512:
            raise _invalid(f"{label}: the pattern {ascii(pattern)[:120]} is too costly to match")
        try:
            _compiled(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise _invalid(f"{label}: {ascii(pattern)[:120]} is no pattern: {error}") from None


@functools.lru_cache(maxsize=MAX_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _first_fit(patterns: Patterns | None, module: str, default: int | float) -> int | float:
    return next((value for pattern, value in (patterns or {}).items() if _compiled(pattern).match(module)), default)


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
