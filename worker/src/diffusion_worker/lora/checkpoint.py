# SPDX-License-Identifier: Apache-2.0
"""The reading of an adapter's folder or file into factors by module; an adapter that is not completely understood is refused.

`located` finds the files, `adapter_file` reads the weights, `formats` and `naming` interpret names, and `peft_settings` reads
peft's configuration. `loads.binding` checks that the model has these modules.
"""

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.adapter_file import OpenWeights
from diffusion_worker.lora.formats import Format, module_path
from diffusion_worker.lora.header import AdapterHeader
from diffusion_worker.lora.identity import LOW_RANK, ModuleChange, contradicts, identity_of
from diffusion_worker.lora.loads import pattern_time
from diffusion_worker.lora.located import CONFIG_FILE, locate, shown
from diffusion_worker.lora.naming import AdaptedModel, LoRAFactors, NeedsValues, RawLoRAModule, bind, modules_of
from diffusion_worker.lora.peft_settings import METADATA_KEY, PeftSettings, read_settings, settings_in_metadata
from diffusion_worker.lora.recipe import read_recipe
from diffusion_worker.lora.request import LoadOptions
from diffusion_worker.messages import AdapterIdentity, Recipe

BASE_MODEL_KEYS = ("modelspec.architecture", "ss_base_model_version", "ss_sd_model_name")
FIRST, SECOND = "transformer", "transformer_2"
# A request for both accepts a file for either, because an adapter may be for one of them alone.
BOTH_TRANSFORMERS = {FIRST, SECOND}
PLAIN = LoadOptions()
ANY_MODEL = AdaptedModel()


class LoRACheckpoint(msgspec.Struct, frozen=True):
    """An adapter as read from its file, whose size is `size_bytes`; modules are named `component.path`.

    `hashed` returns the weights file's digest, and waits for the thread that computes it. The tensors are views of the file's bytes, all
    of which stay in memory as long as one of the tensors. `format` is the naming of the file's tensors. `alpha` is set if all modules
    share one. `base_model` is the model that the metadata name.
    """

    hashed: Callable[[], str]
    size_bytes: int
    modules: dict[str, LoRAFactors]
    format: str = "peft"
    alpha: float | None = None
    base_model: str | None = None
    recipe: Recipe | None = None

    @property
    def digest(self) -> str:
        """The digest of the weights file, `sha256:<hex>`; waits until it is computed."""
        return self.hashed()

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(factors.a.shape[0] for factors in self.modules.values())

    @property
    def identity(self) -> AdapterIdentity:
        """The identity of the effect, from the file's digest and from the rank and scaling of each module."""
        changes = (ModuleChange(name, LOW_RANK, factors.a.shape[0], factors.scaling) for name, factors in self.modules.items())
        return identity_of(self.digest, changes)


def invalid(message: str) -> RequestError:
    """Return an InvalidAdapter error: no retry helps before the adapter changes."""
    return RequestError(ErrorCode.INVALID_ADAPTER, message)


def read_checkpoint(
    path: str,
    *,
    root: str | None = None,
    name: str | None = None,
    options: LoadOptions = PLAIN,
    model: AdaptedModel = ANY_MODEL,
    judge: Callable[[LoRACheckpoint], None] = lambda checkpoint: None,
    sized: Callable[[int], None] = lambda size: None,
) -> LoRACheckpoint:
    """Read an adapter from a .safetensors file, or from a folder as peft or diffusers write it, and check it. Messages call it `name`.

    With a `root` no file outside of it is opened. `sized` gets the size of the weights file in bytes. Names, shapes, dtypes and alphas are
    checked before the factors are read, and `judge` gets the adapter without values then. Both calls may raise to stop the reading. `judge`
    is left out if names can be converted only by values.

    Raises:
        RequestError: InvalidAdapter, UnsupportedFormat, DigestMismatch, IdentityMismatch. NoMatchingModules: the file has nothing for a
            component that `options` ask for.
    """
    label = f"adapter {name or path!r}"
    beneath = None if root is None else Path(root)
    located = locate(Path(path), label, root=beneath)
    config = read_settings(located.config, label, root=beneath) if located.config else None
    with OpenWeights(located.weights, label, root=beneath) as opened:
        sized(opened.header.size_bytes)
        opened.allocate()
        reading = _Reading(opened.header, opened.tensors, config, options, model, label)
        checkpoint = None
        # Some conversions of names need values; those are made after the factors are read.
        with contextlib.suppress(NeedsValues):
            checkpoint = reading.checkpoint(filled=False)
            judge(checkpoint)
        hashed = opened.read()
    if options.digest is not None and hashed.result() != options.digest:
        found = f"found {hashed.result()}"
        raise RequestError(ErrorCode.DIGEST_MISMATCH, f"{label}: expected a weights file with digest {options.digest}, {found}")
    if checkpoint is None or any(factors.a.is_meta for factors in checkpoint.modules.values()):
        checkpoint = reading.checkpoint(filled=True)
    checkpoint = msgspec.structs.replace(checkpoint, hashed=hashed.result)
    if options.identity is not None and contradicts(checkpoint.identity, options.identity):
        found = f"found {checkpoint.identity}: its configuration, such as lora_alpha, was changed"
        message = f"{label}: expected identity {options.identity}, as it was asked for, {found}"
        raise RequestError(ErrorCode.IDENTITY_MISMATCH, message)
    return checkpoint


class _Reading:
    """The names, shapes and settings of an adapter, which are known before `tensors` have values; raises RequestError."""

    def __init__(
        self,
        header: AdapterHeader,
        tensors: Mapping[str, torch.Tensor],
        config: PeftSettings | None,
        options: LoadOptions,
        model: AdaptedModel,
        label: str,
    ) -> None:
        self._tensors, self._header, self._config, self._options = tensors, header, config, options
        self._model, self._label = model, label
        self._written = modules_of(tensors, model, label)
        self._settings = _settings_of(header, config, self._written, model, label)
        with pattern_time.counted():
            self._scaling = {module: _scaling(module, names, self._settings, model, label) for module, names in self._written.items()}

    def checkpoint(self, *, filled: bool) -> LoRACheckpoint:
        """Return the adapter; it has no digest yet. `filled`: all tensors have values; if not, those that a conversion makes are on meta.

        Raises RequestError, and NeedsValues if a conversion needs the values that are not there yet.
        """
        options, label, metadata = self._options, self._label, self._header.metadata
        factors, found = bind(self._tensors, self._written, self._scaling.__getitem__, filled=filled, model=self._model, label=label)
        found = Format.PEFT if self._config else found
        if options.format not in (None, found):
            raise RequestError(
                ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected tensor names in the format {options.format}, found {found}"
            )
        checkpoint = LoRACheckpoint(
            hashed=_not_read,
            size_bytes=self._header.size_bytes,
            modules=_of_components(factors, options.components, label),
            format=str(found),
            alpha=_common_alpha(self._written, self._settings),
            base_model=_base_model(metadata, self._config),
            recipe=read_recipe(metadata, label),
        )
        if options.expected_rank is not None and options.expected_rank != checkpoint.rank:
            raise invalid(f"{label}: expected {options.expected_rank} as the largest rank of its modules, found {checkpoint.rank}")
        return checkpoint


def _not_read() -> str:
    raise RuntimeError("expected an adapter whose weights were read, found one whose names and shapes alone are known")


def _settings_of(
    header: AdapterHeader, config: PeftSettings | None, written: Mapping[str, RawLoRAModule], model: AdaptedModel, label: str
) -> dict[str, PeftSettings]:
    """Return peft's settings by component, from the configuration or from the metadata; empty if there are none.

    Raises:
        RequestError: InvalidAdapter if both have settings, or if a module has neither settings nor an alpha of its own.
    """
    settings = settings_in_metadata(header.metadata, label, denoiser=model.denoiser)
    if config and settings:
        raise invalid(f"{label}: expected peft's settings in one place, found {CONFIG_FILE}, and {METADATA_KEY} in the file's metadata")
    settings = {model.denoiser: config} if config else settings
    for module, names in written.items() if settings else ():
        component = module_path(module, denoiser=model.denoiser).partition(".")[0]
        if component not in settings and names.alpha is None:
            found = ", ".join(map(shown, sorted(settings)))
            raise invalid(f"{label}: tensor {names.a}: expected peft's settings for component {component}, found those for {found} only")
    return settings


def _scaling(module: str, names: RawLoRAModule, settings: Mapping[str, PeftSettings], model: AdaptedModel, label: str) -> float:
    """Return the factor by which a module's product `b @ a` is multiplied: alpha / rank, or 1 without an alpha.

    The alpha is the module's own tensor, or comes from peft's settings for its component, which may divide by the root of the rank.

    Raises:
        RequestError: InvalidAdapter if there are both, if the settings do not fit the module, or if the result is not finite.
    """
    component, _, path = module_path(module, denoiser=model.denoiser).partition(".") if settings else ("", "", "")
    of_component = settings.get(component)
    if of_component is None:
        return names.rank**-1 * names.alpha if names.alpha is not None else 1.0
    if names.alpha is not None:
        raise invalid(f"{label}: {module}.alpha: expected one alpha, found one among the tensors and one in peft's settings")
    scaling = of_component.scaling(path, names.rank, f"{label}: {names.a}")
    if not math.isfinite(scaling):
        raise invalid(f"{label}: tensor {names.a}: its alpha in peft's settings is not finite")
    return scaling


def _of_components(factors: dict[str, LoRAFactors], components: list[str], label: str) -> dict[str, LoRAFactors]:
    """Return the factors of the requested components (none: all), sorted by module.

    Files for the second of two denoisers name the first one, because diffusers expects that (`load_into_transformer_2`). So a
    request for the second alone takes the factors of the first. A request for both accepts a file with factors for either.

    Raises:
        RequestError: NoMatchingModules for a component without factors.
    """
    asked = set(components)
    if asked & BOTH_TRANSFORMERS == {SECOND} and not any(module.startswith(f"{SECOND}.") for module in factors):
        factors = {re.sub(rf"^{FIRST}\.", f"{SECOND}.", module): pair for module, pair in factors.items()}
    found = sorted({module.partition(".")[0] for module in factors})
    if asked >= BOTH_TRANSFORMERS and BOTH_TRANSFORMERS & set(found):
        asked -= BOTH_TRANSFORMERS - set(found)
    if missing := sorted(asked - set(found)):
        message = f"{label}: has no tensors for component {', '.join(missing)}, which was asked for, only for {', '.join(found)}"
        raise RequestError(ErrorCode.NO_MATCHING_MODULES, message)
    kept = [module for module in sorted(factors) if not components or module.partition(".")[0] in components]
    return {module: factors[module] for module in kept}


def _common_alpha(written: Mapping[str, RawLoRAModule], settings: Mapping[str, PeftSettings]) -> float | None:
    alphas = {of_component.alpha for of_component in settings.values()} if settings else {names.alpha for names in written.values()}
    return alphas.pop() if len(alphas) == 1 else None


def _base_model(metadata: Mapping[str, str], config: PeftSettings | None) -> str | None:
    """Return the name of the base model, a hint for people, as at most 200 printable characters; None if there is none."""
    texts = [metadata.get(key) for key in BASE_MODEL_KEYS] + [config.base_model_name_or_path if config else None]
    text = next((text for text in texts if text), None)
    return "".join(character for character in text if character.isprintable())[:200] if text else None
