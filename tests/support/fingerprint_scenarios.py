# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of ranks that make each call together: what the processes of their tests run."""

from typing import Any

import torch
from diffusers import FluxPipeline

from corrupting_extension import flip
from diffusion_worker.config import WorkerConfig
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from families import flux
from families.family import build_seeded, seeded
from rank_processes import Rank


class WordyFlux(FluxPipeline):
    """Takes words, which the tiny pipelines of the tests have no encoders for."""

    def encode_prompt(self, prompt: Any, *_args: Any, **_kwargs: Any) -> Any:  # type: ignore[override]
        """Values that are the same for the same words."""
        seed = sum(map(ord, prompt))
        return seeded(seed, 1, flux.TEXT_TOKENS, 16), seeded(seed + 100, 1, 16), torch.zeros(flux.TEXT_TOKENS, 3)


def tensor(rank: Rank) -> dict[str, Any]:
    """Each layer in two parts."""
    return _over_a_sleep(rank, tensor=2)


def sequence(rank: Rank) -> dict[str, Any]:
    """Half of the tokens each."""
    return _over_a_sleep(rank, sequence=2)


def _over_a_sleep(rank: Rank, **kind: int) -> dict[str, Any]:
    with rank.group(**kind) as parallel:
        config = WorkerConfig(model="(in memory)", served_name="tiny", ranks=rank.world, **kind)
        runner = DiffusionModelRunner(config, torch.device("cpu"), parallel)
        runner.adopt(build_seeded(_pipeline)(), torch.float32, lambda done, total: None)
        before = runner.fingerprint(probe=True)
        runner.release()
        runner.restore()
        after = runner.fingerprint(probe=True)
        flip(runner.weights.tensors()[-1])
        return {"before": before, "after": after, "spoilt": runner.fingerprint(probe=True)}


def _pipeline() -> Any:
    return WordyFlux(**flux.pipeline("FluxPipeline").components)
