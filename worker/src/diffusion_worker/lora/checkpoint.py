# SPDX-License-Identifier: Apache-2.0
"""Reads an adapter's folder or file into factors by module, or refuses it: nothing of it is left out and nothing is guessed.

Where it lies and what it holds is `adapter_file`'s, what names mean `formats`' and `naming`'s, peft's configuration is
`peft_settings`'. Whether the modules are the model's is found where they are bound (`adapter_layers`).
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.adapter_file import AdapterFile, locate, read_file
from diffusion_worker.lora.formats import Format, module_path
from diffusion_worker.lora.header import shown
from diffusion_worker.lora.naming import AdaptedModel, Factors, RawLoRAModule, bind, modules_of
from diffusion_worker.lora.peft_settings import CONFIG_FILE, METADATA_KEY, PeftSettings, read_settings, settings_in_metadata
from diffusion_worker.lora.recipe import read_recipe
from diffusion_worker.lora.request import LoadOptions
from diffusion_worker.messages import Recipe

BASE_MODEL_KEYS = ("modelspec.architecture", "ss_base_model_version", "ss_sd_model_name")
FIRST, SECOND = "transformer", "transformer_2"
# Asked for together they are what a model has of both: the file of an adapter may be for one of them.
BOTH_TRANSFORMERS = {FIRST, SECOND}
PLAIN = LoadOptions()
ANY_MODEL = AdaptedModel()


class LoRAFactors(msgspec.Struct, frozen=True):
    """The update of one module, `scaling * b @ a`, in the file's own dtype.

    Of a linear layer a is [rank, in] and b [out, rank]; of a convolution a is [rank, in, kh, kw] and b [out, rank, 1, 1] or
    [out, rank].
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class LoRACheckpoint(msgspec.Struct, frozen=True):
    """One adapter as read from its file. `digest` is the sha256 of the weights file; modules are named `component.path`.

    The tensors are views of the file's bytes, all of which are in memory as long as one of them is.
    `format` is how the file names its tensors, `alpha` is its own where there is one for all modules, `base_model` what its
    metadata say it was made for.
    """

    digest: str
    size_bytes: int
    modules: dict[str, LoRAFactors]
    format: str = "peft"
    alpha: float | None = None
    base_model: str | None = None
    recipe: Recipe | None = None

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(factors.a.shape[0] for factors in self.modules.values())


def invalid(message: str) -> RequestError:
    """The refusal of an adapter; not worth a retry before the adapter changes."""
    return RequestError(ErrorCode.INVALID_ADAPTER, message)


def read_checkpoint(path: str, *, name: str | None = None, options: LoadOptions = PLAIN, model: AdaptedModel = ANY_MODEL) -> LoRACheckpoint:
    """Read and check an adapter; `path` is a folder of peft or diffusers, or one .safetensors file. `name` is for messages.

    Raises:
        RequestError: InvalidAdapter, UnsupportedFormat, DigestMismatch, or NoMatchingModules for components it has nothing for.
    """
    label = f"adapter {name or path!r}"
    located = locate(Path(path), label)
    config = read_settings(located.config, label) if located.config else None
    file = read_file(located.weights, label)
    try:
        checkpoint = _checkpoint(file, config, options, model, label)
    except RequestError:
        # That it is another file than was asked for says more than what is wrong with it.
        _require_digest(file, options, label)
        raise
    _require_digest(file, options, label)
    return checkpoint


def _require_digest(file: AdapterFile, options: LoadOptions, label: str) -> None:
    if options.digest is not None and file.digest != options.digest:
        raise RequestError(ErrorCode.DIGEST_MISMATCH, f"{label}: expected digest {options.digest}, found {file.digest}")


def _checkpoint(file: AdapterFile, config: PeftSettings | None, options: LoadOptions, model: AdaptedModel, label: str) -> LoRACheckpoint:
    written = modules_of(file.tensors, label)
    settings = _settings_of(file, config, written, model, label)
    scaling = {module: _scaling(module, names, settings, model, label) for module, names in written.items()}
    factors, found = bind(file.tensors, written, scaling.__getitem__, model=model, label=label)
    found = Format.PEFT if config else found
    if options.format not in (None, found):
        raise RequestError(ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected format {options.format}, found {found}")
    modules = _of_components(factors, options.components, label)
    checkpoint = LoRACheckpoint(
        digest=file.digest,
        size_bytes=file.header.size_bytes,
        modules=modules,
        format=str(found),
        alpha=_common_alpha(written, settings),
        base_model=_base_model(file.header.metadata, config),
        recipe=read_recipe(file.header.metadata, label),
    )
    if options.expected_rank is not None and options.expected_rank != checkpoint.rank:
        raise invalid(f"{label}: expected rank {options.expected_rank}, found {checkpoint.rank}")
    return checkpoint


def _settings_of(
    file: AdapterFile, config: PeftSettings | None, written: Mapping[str, RawLoRAModule], model: AdaptedModel, label: str
) -> dict[str, PeftSettings]:
    """The settings by component, from one place; each module without an alpha of its own has some where there are any."""
    settings = settings_in_metadata(file.header.metadata, label, denoiser=model.denoiser)
    if config and settings:
        raise invalid(f"{label}: expected settings in one place, found {CONFIG_FILE} and {METADATA_KEY} in the file's metadata")
    settings = {model.denoiser: config} if config else settings
    for module, names in written.items() if settings else ():
        component = module_path(module, denoiser=model.denoiser).partition(".")[0]
        if component not in settings and names.alpha is None:
            found = ", ".join(map(shown, sorted(settings)))
            raise invalid(f"{label}: {names.a}: expected settings for component {component}, found those for {found} only")
    return settings


def _scaling(module: str, names: RawLoRAModule, settings: Mapping[str, PeftSettings], model: AdaptedModel, label: str) -> float:
    """What a module's product is multiplied with: by its own alpha, by a configuration, or not at all, which is alpha = rank."""
    component, _, path = module_path(module, denoiser=model.denoiser).partition(".") if settings else ("", "", "")
    of_component = settings.get(component)
    if of_component is None:
        return names.rank**-1 * names.alpha if names.alpha is not None else 1.0
    if names.alpha is not None:
        raise invalid(f"{label}: {module}.alpha: an alpha of its own beside one in the configuration")
    scaling = of_component.scaling(path, names.rank, f"{label}: {names.a}")
    if not math.isfinite(scaling):
        raise invalid(f"{label}: {names.a}: its alpha is not finite")
    return scaling


def _of_components(factors: dict[str, Factors], components: list[str], label: str) -> dict[str, LoRAFactors]:
    """Those of the components that are asked for, in the order of their names.

    Files for the second of two denoisers name the first one, as diffusers wants them (`load_into_transformer_2`): who asks for
    the second alone says which of them is meant.
    """
    asked = set(components)
    if asked & BOTH_TRANSFORMERS == {SECOND} and not any(module.startswith(f"{SECOND}.") for module in factors):
        factors = {re.sub(rf"^{FIRST}\.", f"{SECOND}.", module): pair for module, pair in factors.items()}
    found = sorted({module.partition(".")[0] for module in factors})
    if asked >= BOTH_TRANSFORMERS and BOTH_TRANSFORMERS & set(found):
        asked -= BOTH_TRANSFORMERS - set(found)
    if missing := sorted(asked - set(found)):
        message = f"{label}: has nothing for component {', '.join(missing)}, only for {', '.join(found)}"
        raise RequestError(ErrorCode.NO_MATCHING_MODULES, message)
    kept = [module for module in sorted(factors) if not components or module.partition(".")[0] in components]
    return {module: LoRAFactors(*factors[module]) for module in kept}


def _common_alpha(written: Mapping[str, RawLoRAModule], settings: Mapping[str, PeftSettings]) -> float | None:
    alphas = {of_component.alpha for of_component in settings.values()} if settings else {names.alpha for names in written.values()}
    return alphas.pop() if len(alphas) == 1 else None


def _base_model(metadata: Mapping[str, str], config: PeftSettings | None) -> str | None:
    """A hint for people: short, and without characters that act."""
    texts = [metadata.get(key) for key in BASE_MODEL_KEYS] + [config.base_model_name_or_path if config else None]
    text = next((text for text in texts if text), None)
    return "".join(character for character in text if character.isprintable())[:200] if text else None
