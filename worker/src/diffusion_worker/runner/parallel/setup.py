# SPDX-License-Identifier: Apache-2.0
"""Application of the configured parallel kinds to a loaded pipeline, or the reasons why they do not fit it.

Faults that can be known beforehand are refused here, when the model is loaded, so that no request meets them.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffusion_worker.config import Offload, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.lora.layers import LinearPart
from diffusion_worker.memory.filling import ReportBytes
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.memory.weights import NOTHING_UNREAD, ModelWeights, read_in_place
from diffusion_worker.messages import ModelInfo
from diffusion_worker.runner.families import pipeline_record
from diffusion_worker.runner.model_call.components import DIVISIBLE_DENOISERS
from diffusion_worker.runner.parallel import sequence, sharding, tensor, vae_tiles
from diffusion_worker.runner.parallel.rows import Parallel


class ParallelKinds:
    """The parallel kinds of one worker on one pipeline. Without any, nothing here touches a process group."""

    def __init__(self, config: WorkerConfig, parallel: Parallel, pipeline: Any, modules: dict[str, nn.Module]) -> None:
        """Refuse options that the pipeline cannot serve, before weights are placed.

        The ConfigError has the option, the class and the reason.
        """
        self._config = config
        self._parallel = parallel
        self._pipeline = pipeline
        self._modules = modules
        self._denoisers = {name: modules[name] for name in DIVISIBLE_DENOISERS if name in modules}
        self._cuts: dict[str, tensor.TensorCut] = {}
        self._ulysses: sequence.Ulysses | None = None
        self._check()
        if config.sequence > 1:
            assert parallel.mesh is not None
            self._ulysses = sequence.Ulysses(parallel.mesh, rank=parallel.rank, world=parallel.world, device=parallel.device)

    def place(
        self,
        name: str,
        weights: ModelWeights,
        checkpoint: Path,
        *,
        unread: Placeholders = NOTHING_UNREAD,
        report: ReportBytes = lambda count: None,
    ) -> None:
        """Place a component's weights as its parallel kind needs them, and set up its calls; see `ModelWeights.place`."""
        module, config = self._modules[name], self._config
        denoises = name in self._denoisers
        if config.tensor > 1 and denoises:
            self._place_parts(name, functools.partial(weights.place, module, checkpoint, unread=unread, report=report))
        elif config.shard > 1 and sharding.is_sharded(name):
            read_in_place(module, unread, report)
            self._place_shards(name, module, weights)
        elif config.offload is Offload.GROUP:
            # Diffusers keeps these weights in memory that it pins itself.
            read_in_place(module, unread, report)
            weights.leave((*module.parameters(), *module.buffers()))
        else:
            if self._ulysses is not None and denoises:
                self._split_sequence(name, module)
            weights.place(module, checkpoint, unread=unread, report=report)
        if config.vae_tiling and name == "vae":
            self._parallel.decode_tiles(name, vae_tiles.VaeTiles(module, self._parallel).decode)

    def part_of(self, layer: str) -> LinearPart | None:
        """Return this rank's part of a layer (`transformer.blocks.0.attn.to_q`), for its adapters; None if --tensor does not cut it."""
        component, _, path = layer.partition(".")
        return self._cuts[component].part(path) if component in self._cuts else None

    def describe(self, info: ModelInfo) -> ModelInfo:
        """Add the sizes whose tokens can be split to a description, for the server; without --sequence return it unchanged.

        Raises:
            ConfigError: the pipeline's default size cannot be split.
        """
        return info if self._config.sequence == 1 else sequence.describe(info, self._token_pixels(), self._config.sequence)

    def _place_parts(self, name: str, place: Callable[..., int]) -> None:
        assert self._parallel.mesh is not None
        self._cuts[name] = cut = tensor.TensorCut(self._modules[name], self._parallel.mesh["tensor"].get_group())
        place(cut=cut.cut)
        cut.connect()
        self._parallel.compute_together(name, lambda call: call)

    def _place_shards(self, name: str, module: nn.Module, weights: ModelWeights) -> None:
        assert self._parallel.mesh is not None
        if self._ulysses is not None and name in self._denoisers:
            self._split_sequence(name, module)
        sharding.shard(module, self._parallel.mesh["shard"])
        weights.leave(map(_local, module.parameters()))
        self._parallel.collect_weights(name)

    def _split_sequence(self, name: str, module: nn.Module) -> None:
        assert self._ulysses is not None
        # The class is read before sharding gives the model another one.
        self._parallel.compute_together(name, self._ulysses.prepare(module))
        self._ulysses.apply(module)

    def _check(self) -> None:
        config = self._config
        for name, module in self._denoisers.items():
            if config.sequence > 1:
                sequence.check_model(name, module, config.sequence)
            if config.tensor > 1:
                tensor.check_model(name, module, config.tensor)
            if config.shard > 1:
                sharding.check_model(name, module)
        for option, size in (("--sequence", config.sequence), ("--tensor", config.tensor), ("--shard", config.shard)):
            if size > 1 and not self._denoisers:
                raise ConfigError(f"{option}: {type(self._pipeline).__name__} has none of the components {', '.join(DIVISIBLE_DENOISERS)}")
        if config.sequence > 1:
            self._check_sequence()
        if config.shard > 1:
            self._check_shared_layers()
        if config.vae_tiling:
            if "vae" not in self._modules:
                raise ConfigError(f"--vae-tiling: {type(self._pipeline).__name__} has no component vae")
            vae_tiles.check_vae("vae", self._modules["vae"])

    def _check_sequence(self) -> None:
        """Raise ConfigError for parts of the pipeline, beside its model, that cannot be split."""
        size, pipeline = self._config.sequence, type(self._pipeline).__name__
        if any("controlnet" in name for name in self._modules):
            raise ConfigError(f"--sequence: {pipeline} is not supported: a ControlNet adds to the tokens of whole images")
        if why := pipeline_record(type(self._pipeline)).unsplit:
            raise ConfigError(f"--sequence: {pipeline} is not supported: {why}")
        parameter = inspect.signature(type(self._pipeline).__call__).parameters.get("max_sequence_length")
        tokens = None if parameter is None else parameter.default
        splits_text = any(sequence.plan_of(model).text for model in self._denoisers.values())
        if splits_text and isinstance(tokens, int) and tokens % size:
            raise ConfigError(f"--sequence {size}: a text of {pipeline} has {tokens} tokens by default, which is not a multiple of {size}")

    def _check_shared_layers(self) -> None:
        """Raise ConfigError where two models share a layer, because a layer is sharded with one model."""
        owners: dict[int, str] = {}
        for name, module in self._modules.items():
            for parameter in module.parameters() if sharding.is_sharded(name) else ():
                owner = owners.setdefault(id(parameter), name)
                if owner != name:
                    raise ConfigError(f"--shard: {type(self._pipeline).__name__} is not supported: {owner} and {name} share layers")

    def _token_pixels(self) -> int:
        """Return the side of a token in pixels."""
        model = next(iter(self._denoisers.values()))
        return self._vae_scale() * sequence.packed_latents(model)

    def _vae_scale(self) -> int:
        for name in ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor"):
            if isinstance(found := getattr(self._pipeline, name, None), int):
                return found
        raise ConfigError(f"--sequence: {type(self._pipeline).__name__} has no vae_scale_factor, the pixels along a side of a latent")


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded parameter; any other parameter unchanged."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
