# SPDX-License-Identifier: Apache-2.0
"""A rig that runs a family's requests: through diffusers' own pipeline, and through the engine's model runner at one rank."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from diffusion_worker.messages import ErrorReport, LoRAUse, RequestSpec, Tick
from diffusion_worker.runner.families import pipeline_record
from diffusion_worker.runner.model_call.call import ModelCall, execute
from diffusion_worker.runner.pipelines.step_support import why_exclusive
from diffusion_worker.runner.pipelines.view import modules_of, view_of
from support.families.rig.family import Arguments, Family, as_tensor, in_float64
from support.runner.rig import OneRank, attributes_of, changes_of, runner_with


@dataclass(frozen=True)
class Asked:
    """A request of a test. `changes` replace or add arguments; `scheduler` replaces the pipeline's scheduler.

    `loras` apply to the engine only; a comparison gives the plain pipeline the same.
    """

    seed: int = 1
    steps: int = 3
    guidance: float = 5.0
    exact: bool = False
    accelerated: bool = False
    changes: Arguments = field(default_factory=dict)
    scheduler: Any = None
    loras: list[LoRAUse] = field(default_factory=list)


TRIO = (Asked(1, 4, 5.0), Asked(2, 6, 3.0), Asked(3, 3, 7.0))
JOINING = (0, 1, 2)


class FamilyRig:
    """A family's tiny pipeline twice: one that only diffusers runs, and one that a model runner serves.

    `parallel` replaces `OneRank`, which records its calls; `config` is the runner's configuration, or its `device`. The model is compared
    around every run of a request's own code, as `--check-sharing` does.
    """

    def __init__(self, family: Family, dtype: torch.dtype = torch.float32, parallel: Any = None, **config: Any) -> None:
        torch.set_num_threads(1)
        self.family = family
        self.dtype = dtype
        self.pipeline = self._build()
        self.rank = OneRank()
        self.runner = runner_with(
            self.pipeline, parallel or self.rank, dtype, **{"served_name": family.name, "check_sharing": True} | config
        )
        # Requests of the last run that were repeated as `whole`, by number, with the reason.
        self.replays: dict[str, str] = {}
        # The rows that a step cache skipped and all rows, in each tick so far.
        self.rows: list[tuple[int, int]] = []

    @cached_property
    def plain(self) -> Any:
        """The pipeline to compare with, built at first use; it has the same weights as the served one and never meets the engine."""
        return self._build()

    def alone(self, asked: Asked) -> torch.Tensor:
        """Run a request by diffusers alone, without the engine, and return its result as a flat tensor.

        Some pipelines draw a little from the global random state. It gets the request's seed for this run, and is restored afterwards.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(asked.seed)
            return as_tensor(self.family.call(_with_scheduler(self.plain, asked.scheduler), self._arguments(asked)))

    def together(self, *requests: Asked, joining: tuple[int, ...] | None = None) -> list[torch.Tensor]:
        """Serve requests in company, and return their results as flat tensors in the order of the requests.

        `joining` gives the tick at which each request joins; without it all join at tick 0.

        Raises:
            AssertionError: a request ended with an error, a shared model call failed, or an attribute of a shared module changed.
        """
        results, errors = self.outcome(*requests, joining=joining)
        assert not errors, errors
        assert not self.rank.failures, self.rank.failures
        return [results[str(number)] for number in range(len(requests))]

    def outcome(self, *requests: Asked, joining: tuple[int, ...] | None = None) -> tuple[dict[str, torch.Tensor], dict[str, ErrorReport]]:
        """Serve requests until each has a result or an error, and return both by number, as text.

        A module that ends with other attributes than before is an AssertionError. So is a request that was to be made again alone, unless
        its class is known to change the model.
        """
        self.rank.calls.clear()
        self.rank.failures.clear()
        modules = modules_of(self.pipeline)
        before = attributes_of(modules)
        found = self.finish(requests, joining or (0,) * len(requests))
        assert not (changed := changes_of(before, attributes_of(modules))), changed
        kind = type(self.pipeline)
        assert not self.replays or why_exclusive(kind) or pipeline_record(kind).harmless, self.replays
        return found

    def finish(self, requests: Sequence[Asked], joining: Sequence[int]) -> tuple[dict[str, torch.Tensor], dict[str, ErrorReport]]:
        """Serve requests as `outcome` does, but without its checks of the modules and of repeated requests.

        Each joins at its tick in `joining`, and once more as `whole` if the runner asks for that. AssertionError after 200 ticks.
        """
        self.replays.clear()
        results: dict[str, torch.Tensor] = {}
        errors: dict[str, ErrorReport] = {}
        for tick in range(200):
            for number, asked in enumerate(requests):
                if joining[number] == tick:
                    self.runner.join(self._spec(number, asked), self._body(asked))
            output = self.runner.execute_stepwise(Tick(tick))
            results |= {name: as_tensor(result) for name, result in output.images.items()}
            errors |= output.errors
            self.rows.append((output.skipped, output.rows))
            self.replays |= output.replays
            for name in output.replays:
                asked = requests[int(name)]
                self.runner.join(self._spec(int(name), asked), self._body(asked, whole=True))
            if len(results) + len(errors) == len(requests):
                return results, errors
        raise AssertionError(f"after 200 ticks only {sorted(results)} are done")

    def denoiser_calls(self) -> list[ModelCall]:
        """List the last run's calls of denoisers as the rank got them, merged; text encoders and decoders are left out."""
        return [call for call in self.rank.calls if call.denoises]

    @torch.inference_mode()
    def execute(self, call: ModelCall) -> Any:
        """Apply a component of the served pipeline to a call's arguments, without gradients and without the engine."""
        return execute(self.pipeline.components[call.component], call)

    def _build(self) -> Any:
        pipeline = self.family.build()
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.to(self.dtype)
        return pipeline

    def _spec(self, number: int, asked: Asked) -> RequestSpec:
        fields = {name: getattr(asked, name) for name in ("seed", "steps", "exact", "accelerated", "loras")}
        return RequestSpec(request_id=str(number), prompt="", **fields)

    def _body(self, asked: Asked, *, whole: bool = False) -> Callable[[], Any]:
        view = view_of(_with_scheduler(self.pipeline, asked.scheduler))

        def body() -> Any:
            return self.family.call(view, self._arguments(asked))

        # A `PipelineBody` has the same attribute.
        vars(body).update(whole=whole, modules=lambda: modules_of(self.pipeline))
        return body

    def _arguments(self, asked: Asked) -> Arguments:
        arguments = self.family.request(asked.seed, asked.steps, asked.guidance) | asked.changes
        if self.dtype is torch.float64:
            arguments = in_float64(arguments)
        return arguments | {"generator": torch.Generator().manual_seed(asked.seed), "output_type": self.family.output_type}


def _with_scheduler(pipeline: Any, scheduler: Any) -> Any:
    """Return a shallow copy whose scheduler is a deep copy of this one, so that the given pipeline keeps its own.

    Without one, return that pipeline.
    """
    if scheduler is None:
        return pipeline
    changed = copy.copy(pipeline)
    changed.__dict__["scheduler"] = copy.deepcopy(scheduler)
    return changed


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, in standard deviations of the second tensor, or absolute where these are below one.

    AssertionError if the shapes differ, or the second tensor is constant or not finite.
    """
    assert one.shape == other.shape, f"{tuple(one.shape)} and {tuple(other.shape)}"
    assert other.isfinite().all(), "the result alone is not finite"
    deviation = float(other.double().std())
    assert deviation > 1e-4, "the result alone is a constant: nothing can be compared with it"
    return float((one.double() - other.double()).abs().max()) / max(1.0, deviation)
