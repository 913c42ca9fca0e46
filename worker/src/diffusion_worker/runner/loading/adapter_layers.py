# SPDX-License-Identifier: Apache-2.0
"""The adapters of a loaded pipeline: the components that they may change, and their registration on all ranks together."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.lora.conversion import Convert
from diffusion_worker.lora.diffusion_manager import Candidate, DiffusionLoRAManager
from diffusion_worker.lora.layers import LinearPart
from diffusion_worker.lora.loads.model_table import ConverterTable
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import ErrorReport, LoadedLoRA, LoRAUse
from diffusion_worker.runner.model_call.components import DENOISERS
from diffusion_worker.runner.parallel.agreement import failures_of_all, same_on_all
from diffusion_worker.runner.parallel.rows import Parallel
from diffusion_worker.runner.stepping.stepper import report_of

TEXT_ENCODER = "text_encoder"


def adapted_components(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the components that adapters may change: denoisers in order, and text encoders that have linear layers."""
    denoisers = {name: modules[name] for name in DENOISERS if name in modules}
    encoders = {name: module for name, module in modules.items() if name.startswith(TEXT_ENCODER) and _has_linears(module)}
    return denoisers | encoders


def create_lora_manager(
    config: WorkerConfig,
    modules: Mapping[str, nn.Module],
    device: torch.device,
    *,
    part_of: Callable[[str], LinearPart | None],
    in_use: Callable[[], Iterable[LoRAUse]],
    convert: Convert | None,
    converter: ConverterTable | None = None,
    asleep: bool = False,
) -> DiffusionLoRAManager:
    """Make the manager of a pipeline's adapters, without any adapter yet; if `asleep`, its slots take no memory.

    Raises:
        ConfigError: --max-cached-loras is below --max-loras, or a target of --lora-target-modules fits no layer.
    """
    if config.max_cached_loras < config.max_loras:
        raise ConfigError(f"--max-cached-loras: expected at least --max-loras {config.max_loras}, found {config.max_cached_loras}")
    components = adapted_components(modules)
    return DiffusionLoRAManager(
        components,
        denoiser=next(iter(components), DENOISERS[0]),
        slots=config.max_loras,
        cached=config.max_cached_loras,
        max_rank=config.max_lora_rank,
        device=device,
        part_of=part_of,
        target_modules=config.lora_target_modules,
        convert=convert,
        converter=converter,
        in_use=in_use,
        asleep=asleep,
    )


def add_on_all_ranks(loras: DiffusionLoRAManager, parallel: Parallel, request: LoRARequest, options: LoadOptions) -> LoadedLoRA:
    """Read an adapter's files and register it, on every rank or on none: they agree before any of them evicts another adapter for it.

    Raises:
        RequestError: on all ranks, the error that one met; RankFailed if they read different files.
    """
    candidate: Candidate | None = None
    refused: dict[str, ErrorReport] = {}
    try:
        candidate = loras.read(request, options)
    except Exception as error:
        refused[request.lora_name] = report_of(error, asked=True)
    for failure in failures_of_all(parallel, refused).values():
        raise RequestError(ErrorCode(failure.code), failure.message)
    assert candidate is not None
    if not same_on_all(parallel, candidate.loaded.identity):
        message = f"adapter {request.lora_name!r}: the ranks read different files, expected the same; did the files change meanwhile?"
        raise RequestError(ErrorCode.RANK_FAILED, message)
    return loras.register(candidate)


def _has_linears(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Linear) for part in module.modules())
