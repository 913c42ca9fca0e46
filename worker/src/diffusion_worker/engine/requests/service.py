# SPDX-License-Identifier: Apache-2.0
"""Requests for images, from their parameters to their images: checked, held until the model serves, given adapters, made."""

import contextlib
import importlib.metadata
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diffusion_worker.config import StepCache, WorkerConfig
from diffusion_worker.engine.requests import admission, recipes
from diffusion_worker.engine.requests.adapter_selection import AdapterSelection, AdapterWait, chosen
from diffusion_worker.engine.requests.admission import AdapterChoice, GenerationParams
from diffusion_worker.engine.requests.holding import HoldBudget, Holding, NoLongerServing
from diffusion_worker.engine.requests.image_generation import AdmittedRequest, make_images
from diffusion_worker.engine.requests.queueing import QueuePlace, RequestQueue
from diffusion_worker.engine.scheduling.step_loop import OnEvent, StepLoop
from diffusion_worker.engine.state.lifecycle import EngineLife
from diffusion_worker.engine.state.request_events import AppliedAdapter, Generation, Provenance
from diffusion_worker.messages import ModelInfo, Recipe

# A call for the model's revision and digest, None while unknown.
Identity = Callable[[], tuple[str | None, str | None]]


class RequestService:
    """Serves requests for images: checks their parameters, queues them or holds them back, and makes the images on the ranks."""

    def __init__(
        self, config: WorkerConfig, life: EngineLife, steps: StepLoop, adapters: AdapterSelection, holding: Holding, *, identity: Identity
    ) -> None:
        # Set when the model is loaded.
        self.model: ModelInfo | None = None
        self.holding = holding
        self.queue = RequestQueue(config, life, steps)
        self._config = config
        self._life = life
        self._steps = steps
        self._adapters = adapters
        self._identity = identity
        self._going = 0
        self._last_at_s: float | None = None
        # Read once, as it comes from a file and takes longer than all else that the loop does for a request.
        self.version = importlib.metadata.version("diffusion-worker")

    @property
    def last_at_s(self) -> float | None:
        """Time at which a valid request last came or ended, on the monotonic clock; None before the first."""
        return self._last_at_s

    @property
    def last_age_s(self) -> float | None:
        """Seconds since a valid request came or ended last; 0 while there is one, None before the first."""
        if self._last_at_s is None:
            return None
        return 0.0 if self._going else round(time.monotonic() - self._last_at_s, 3)

    async def generate(self, params: GenerationParams, *, on_event: OnEvent | None = None) -> Generation:
        """Make `n` images with the seeds `seed`, `seed + 1`, …, the first random if not given; a cancelled call frees its place and rows.

        `on_event` is called on the event loop, in order, each time the request is held, and for each step and preview. It must not block.
        An image that is restarted after a loss of the ranks reports step 0.

        Raises:
            RequestError: the request is refused, or ended early. GroupFailed: the ranks were lost for good meanwhile. Any error
                that `on_event` raises.
        """
        choices = self.checked(params)
        with self.queue.place(params) as place, self._counted() as started_s:
            turn, wait = HoldBudget(on_event), AdapterWait()
            while True:
                await self.holding.admit(turn)
                with contextlib.suppress(NoLongerServing):
                    return await self._made(params, choices, wait, place, started_s, on_event)

    def checked(self, params: GenerationParams) -> list[AdapterChoice]:
        """Check a request as far as possible before its turn, and return its adapters; raise RequestError if it can never be served."""
        if self.model is None:
            admission.check_form(params, self._config.limits)
        else:
            self._admit(params)
        most = min(self._config.max_loras_per_request, self._config.max_loras)
        choices = chosen(params, served_names=self._config.served_names, most=most)
        # Until the start is over, adapters may still come.
        if self._life.loaded:
            self._adapters.require_known(choices)
        return choices

    @contextmanager
    def _counted(self) -> Iterator[float]:
        """Count a request as active while entered, and yield the monotonic time of its arrival."""
        self._going += 1
        self._last_at_s = time.monotonic()
        try:
            yield self._last_at_s
        finally:
            self._going -= 1
            self._last_at_s = time.monotonic()

    async def _made(
        self,
        params: GenerationParams,
        choices: list[AdapterChoice],
        wait: AdapterWait,
        place: QueuePlace,
        started_s: float,
        on_event: OnEvent | None,
    ) -> Generation:
        """Make the images of a request whose turn it is; raise NoLongerServing if the model stops serving before it begins."""
        request_id = uuid.uuid4().hex
        async with self._adapters.taken(choices, request_id, wait) as taken:
            recipe, owners = recipes.agreed([(adapter.name, adapter.loaded.recipe if adapter.loaded else None) for adapter, _ in taken])
            params = self._admit(recipes.inherit(params, recipe, owners))
            applied = [each.applied for each in taken]
            work = AdmittedRequest(request_id, started_s, [each.use for each in taken], recipe, self.accelerates(params), place)
            images = await make_images(self._steps, params, work, on_event=on_event)
        return Generation(images, self._provenance(params, applied, recipe))

    def _admit(self, params: GenerationParams) -> GenerationParams:
        """Return the request with the worker's defaults; raise RequestError if it cannot be served."""
        assert self.model is not None
        params = admission.with_own_mask(params, self.model)
        params = admission.with_defaults(params, self._config.defaults, self._config.limits, self.model)
        admission.check(params, self._config.limits, self.model)
        admission.check_memory(params, self.model, self._steps.memory.most_load(time.monotonic()))
        return params

    def accelerates(self, params: GenerationParams) -> bool:
        """Return whether the step cache may skip work: there is one, and the request demands neither every step nor every bit."""
        exact = params.exact or self._config.exact
        return self._config.step_cache is not StepCache.NONE and params.accelerated is not False and not exact

    def _provenance(self, params: GenerationParams, adapters: list[AppliedAdapter], recipe: Recipe) -> Provenance:
        assert self.model is not None
        revision, digest = self._identity()
        return Provenance(
            model=self._config.served_name,
            pipeline=self.model.pipeline,
            # A folder has no revision, but its content has a digest.
            revision=revision,
            digest=digest,
            task=params.task,
            strength=params.strength,
            adapters=adapters,
            steps=params.steps or self.model.default_steps,
            guidance_scale=self.model.default_guidance_scale if params.guidance_scale is None else params.guidance_scale,
            accelerated=self.accelerates(params),
            exact=params.exact or self._config.exact,
            engine=self.version,
            sigmas=recipe.sigmas,
            shift=recipe.shift,
        )
