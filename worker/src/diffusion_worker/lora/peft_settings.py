# SPDX-License-Identifier: Apache-2.0
"""The settings of peft for an adapter: the scaling of each module, and whether the adapter is a plain LoRA at all.

They are in `adapter_config.json` of a peft folder, or diffusers writes them into a file's metadata. There,
`pipeline.save_lora_weights` puts a component's name before each field, and `model.save_lora_adapter` puts none.
The rules are those of `peft.LoraConfig` 0.21. A pattern is a regular expression for the end of a module's name, and the first
that fits counts. An adapter with an unknown field is refused, because that field may change the scaling.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.formats import is_component
from diffusion_worker.lora.located import CONFIG_FILE, shown
from diffusion_worker.lora.regular_file import open_regular

METADATA_KEY = "lora_adapter_metadata"
MAX_CONFIG_BYTES = 4 << 20
# Initialisations that change the base model itself when peft loads the adapter, and those that matter only in training.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_PLAIN_INITS = ("none", "true", "false", "gaussian", "eva", "orthogonal")
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "none")
_OTHER_KINDS = (
    "use_dora", "bias", "modules_to_save", "lora_bias", "use_qalora", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens", "layer_replication", "megatron_config", "monteclora_config", "kasa_config", "use_bdlora", "arrow_config",
    "velora_config",
)  # fmt: skip
# Fields about training, or about the modules that get factors, which the tensors themselves show.
_WITHOUT_EFFECT = (
    "peft_type", "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "init_lora_weights", "megatron_core", "loftq_config", "eva_config",
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
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    base_model_name_or_path: str | None = None

    def scaling(self, module: str, rank: int, label: str) -> float:
        """Return alpha / r (with rank-stabilised scaling alpha / sqrt(r)) of a module whose factors have this rank.

        Raises:
            RequestError: InvalidAdapter if the settings have another rank, or the module is no target.
        """
        expected = _first_fit(self.rank_pattern, module, self.r, label)
        if expected != rank:
            raise _invalid(f"{label}: module {module}: expected rank {expected} as the configuration says, found {rank}")
        if not self._targets(module, label):
            raise _invalid(f"{label}: module {module} is none of the configuration's target_modules")
        if (setting := self._excluded_by(module, label)) is not None:
            raise _invalid(
                f"{label}: module {module} is excluded by the configuration's {setting}, but the weights file has tensors for it"
            )
        alpha = _first_fit(self.alpha_pattern, module, self.lora_alpha, label)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def alpha(self) -> float | None:
        """The alpha, if all modules share one; otherwise None."""
        alphas = {self.lora_alpha, *(self.alpha_pattern or {}).values()}
        return float(self.lora_alpha) if len(alphas) == 1 else None

    def _targets(self, module: str, label: str) -> bool:
        targets = self.target_modules
        if targets in (None, [], "all-linear"):
            return True
        if isinstance(targets, str):
            return _match(targets, module, label, re.fullmatch) is not None
        return _named_in(targets, module)

    def _excluded_by(self, module: str, label: str) -> str | None:
        """Return the setting by which peft excludes a target module; None if it does not."""
        excluded = self.exclude_modules
        if isinstance(excluded, str):
            named = bool(excluded) and _match(excluded, module, label, re.fullmatch) is not None
        else:
            named = _named_in(excluded or [], module)
        if named:
            return "exclude_modules"
        layers = self.layers_to_transform
        # Like in peft, a module whose full name is among the targets is a target in any layer.
        if layers is None or layers == [] or (isinstance(self.target_modules, list) and module in self.target_modules):
            return None
        wanted = [layers] if isinstance(layers, int) else layers
        return None if self._layer_of(module, label) in wanted else "layers_to_transform"

    def _layer_of(self, module: str, label: str) -> int | None:
        """Return the number of a module's layer: the first one in its name, or the one after a name of `layers_pattern`.

        Return None if the name has no such number.
        """
        names = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        if not names or names == [""]:
            patterns = [r".*?\.[^.]*\.(?P<idx>\d+)\."]
        else:
            patterns = [rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\." for name in names]
        found = next(filter(None, (_match(pattern, module, label, re.match) for pattern in patterns)), None)
        return int(found["idx"]) if found is not None else None


def read_settings(path: Path, label: str, *, root: Path | None = None) -> PeftSettings:
    """Read and check peft's settings in the file `path`, an `adapter_config.json`; with a `root` only beneath it.

    Raises:
        RequestError: InvalidAdapter if the file cannot be read or has wrong values. UnsupportedFormat if the adapter is no plain LoRA, or
            a setting in use is unknown.
    """
    try:
        with os.fdopen(open_regular(path, label, root=root), "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _invalid(f"{label}: {CONFIG_FILE} cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise _invalid(f"{label}: {CONFIG_FILE} is over the limit of {MAX_CONFIG_BYTES} bytes")
    document = _decode(data, f"{label}: {CONFIG_FILE}")
    return _settings({"peft_type": None} | document, f"{label}: {CONFIG_FILE}")


def settings_in_metadata(metadata: Mapping[str, str], label: str, *, denoiser: str) -> dict[str, PeftSettings]:
    """Decode the peft settings in a file's metadata, where diffusers puts them, by component. Without that key the result is empty.

    A field without a component's name belongs to `denoiser`. Only denoisers have `save_lora_adapter`, which writes such fields.

    Raises:
        RequestError: InvalidAdapter for what cannot be read; UnsupportedFormat if it is not a plain LoRA, or a setting is unknown.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return {}
    label = f"{label}: {METADATA_KEY}"
    document = _decode(text.encode(), label)
    bare = [key for key in document if "." not in key]
    if bare and len(bare) < len(document):
        named = next(key for key in document if "." in key)
        raise _invalid(f"{label}: expected a component's name before every field or before none, found {shown(bare[0])} and {shown(named)}")
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
        raise _invalid(f"{label} is not JSON: {str(error)[:120]}") from None
    if not isinstance(document, dict):
        raise _invalid(f"{label} is not a JSON object")
    return document


def _settings(document: dict[str, Any], label: str) -> PeftSettings:
    """Convert the fields of a peft configuration to settings.

    Raises:
        RequestError: UnsupportedFormat for fields that need more than the factors, or unknown ones in use; InvalidAdapter for wrong values.
    """
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
        raise _invalid(f"{label} has a wrong value: {error}") from None
    # Compared, because `math.isfinite` fails for a whole number that is too large for a float.
    if not all(abs(alpha) <= sys.float_info.max for alpha in (settings.lora_alpha, *(settings.alpha_pattern or {}).values())):
        raise _invalid(f"{label}: an alpha, in lora_alpha or alpha_pattern, is not finite")
    _check_layers(settings, label)
    return settings


def _check_layers(settings: PeftSettings, label: str) -> None:
    """Raise RequestError (InvalidAdapter) for combinations that `peft.LoraConfig` refuses, because their target modules are ambiguous."""
    layers = settings.layers_to_transform not in (None, [])
    if layers and isinstance(settings.target_modules, str):
        raise _invalid(f"{label}: expected a list as target_modules, as layers_to_transform is set, found {shown(settings.target_modules)}")
    if settings.layers_pattern and not layers:
        raise _invalid(f"{label}: expected layers_to_transform, as layers_pattern is set, found none")


def _require_understood(document: dict[str, Any], label: str) -> None:
    """Raise RequestError (UnsupportedFormat) for unknown fields with a value, and for an unknown `init_lora_weights`.

    A later peft may write such fields, and only that peft would know how they change the factors' effect.
    """
    known = {*PeftSettings.__struct_fields__, *_OTHER_KINDS, *_WITHOUT_EFFECT}
    unknown = [f"{shown(field)} {ascii(value)[:80]}" for field, value in document.items() if field not in known and value not in _NEUTRAL]
    if str(document.get("init_lora_weights")).lower() not in _PLAIN_INITS:
        unknown.append(f"init_lora_weights {ascii(document['init_lora_weights'])[:80]}")
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise RequestError(
            ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected settings that this worker knows, found {', '.join(unknown[:3])}{more}"
        )


def _first_fit(patterns: Patterns | None, module: str, default: int | float, label: str) -> int | float:
    """Return the value of the first pattern that fits the end of a name, as peft's `get_pattern_key` does; else `default`."""
    return next((value for pattern, value in (patterns or {}).items() if _match(rf"(.*\.)?({pattern})$", module, label, re.match)), default)


def _named_in(names: Sequence[str], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _match(pattern: str, module: str, label: str, match: Callable[[str, str], re.Match[str] | None]) -> re.Match[str] | None:
    """Return the match of a pattern by `match`, a function of Python's `re`, as in peft; None if it does not match.

    Time is not bounded here; the process of a load bounds the time of all patterns (`pattern_time`).

    Raises:
        RequestError: InvalidAdapter for a pattern that is no regular expression.
    """
    try:
        return match(pattern, module)
    except (re.error, OverflowError, RecursionError) as error:
        raise _invalid(f"{label}: the pattern {ascii(pattern)[:120]} is not a regular expression: {error}") from None


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
