# SPDX-License-Identifier: Apache-2.0
"""A request's past calls and steps, kept only for requests with previews, which are made from them."""

from typing import Any

import torch

from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.model_call.outputs import tensors_of, with_tensors

# Algorithms of schedulers that keep their estimate of the final image for the next step.
KEEPING_ESTIMATES = frozenset({"dpmsolver++", "sde-dpmsolver++"})


class NoPreview(Exception):
    """Raised where a request's history cannot be replayed; there is no preview then, and nothing else happens."""


class Step:
    """A scheduler's step: its inputs and its outputs. The tensors are the request's own."""

    def __init__(self, scheduler: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        self.scheduler = scheduler
        self._result = result
        given = dict(zip(("model_output", "timestep", "sample"), arguments, strict=False)) | keywords
        self._predicted, self._sample = given.get("model_output"), given.get("sample")

    def estimate(self) -> torch.Tensor:
        """Return the latents that the model now predicts for the end; the present ones where the scheduler has no estimate."""
        latents = tensors_of(self._result)[0]
        found = self._estimated(latents)
        if found is None or found.shape != latents.shape or not bool(found.isfinite().all()):
            return latents
        return found.to(latents.dtype)

    def returning(self, latents: torch.Tensor) -> Any:
        """Return the step's output with these latents, as copies that the caller may change."""
        rest = tensors_of(self._result)[1:]
        return with_tensors(self._result, [tensor.clone() for tensor in (latents, *rest)])

    def _estimated(self, latents: torch.Tensor) -> torch.Tensor | None:
        """Return the scheduler's estimate of the last latents, None without one.

        It is part of the step's result, kept for the next step, or for a flow the point where one more step would lead.
        """
        beside = tensors_of(self._result)[1:]
        if beside:
            return beside[0]
        config = getattr(self.scheduler, "config", {})
        if config.get("algorithm_type") in KEEPING_ESTIMATES or config.get("predict_x0"):
            kept = getattr(self.scheduler, "model_outputs", [None])[-1]
            return kept if isinstance(kept, torch.Tensor) else None
        return self._end_of_flow(latents.device)

    def _end_of_flow(self, device: torch.device) -> torch.Tensor | None:
        index = getattr(self.scheduler, "step_index", None)
        if "FlowMatch" not in type(self.scheduler).__name__ or not index or self._predicted is None or self._sample is None:
            return None
        sigma = self.scheduler.sigmas[index - 1].to(device)
        end: torch.Tensor = self._sample.float() - sigma * self._predicted.float()
        return end


class CallHistory:
    """A request's record for its previews: each denoiser's last answer, all other answers in order, and each scheduler's last step.

    Schedulers stand in the order in which they first stepped, by which a replay recognises them.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[str, str, Any]] = []
        self.denoised: dict[tuple[str, str, int], Any] = {}
        self.steps: dict[int, Step] = {}

    def answered(self, call: ModelCall, answer: Any) -> None:
        """Record the answer to a model call."""
        if call.denoises:
            self.denoised[call.component, call.method, call.rows] = answer
        else:
            self.answers.append((call.component, call.method, answer))

    def forget(self) -> None:
        """Drop all recorded answers and steps, which would otherwise keep their tensors in memory."""
        self.answers.clear()
        self.denoised.clear()
        self.steps.clear()

    def stepped(self, step: Step) -> None:
        """Record a scheduler's step."""
        self.steps[id(step.scheduler)] = step

    def denoised_like(self, call: ModelCall) -> Any:
        """Return the last answer to this denoiser and number of rows, or else one of another denoiser for as many rows.

        Raises:
            NoPreview: no denoiser has been called with as many rows yet.
        """
        exact = self.denoised.get((call.component, call.method, call.rows))
        if exact is not None:
            return exact
        # The call may be of another denoiser, for the last steps, that was not reached yet (Wan 2.2).
        alike = [answer for (_, _, rows), answer in self.denoised.items() if rows == call.rows]
        if not alike:
            raise NoPreview(f"no denoiser has been called with {call.rows} rows yet")
        return alike[-1]
