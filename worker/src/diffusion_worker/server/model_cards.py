# SPDX-License-Identifier: Apache-2.0
"""`/v1/models`: what this worker serves and what can be asked of it. The SDK hands on the fields that OpenAI does not have."""

from typing import Literal

from pydantic import BaseModel

from diffusion_worker.engine.documents import EngineState
from diffusion_worker.engine.engine import Engine
from diffusion_worker.messages import ModelInfo, Task
from diffusion_worker.server.image_schemas import MAX_PARTIAL_IMAGES


class LimitsCard(BaseModel):
    """Bounds of one request; sides of a picture are multiples of `size_multiple`. Some are known once the model is loaded."""

    max_images: int
    max_steps: int
    max_pixels: int
    max_prompt_characters: int
    max_partial_images: int
    max_input_images: int | None = None
    size_multiple: int | None = None


class DefaultsCard(BaseModel):
    """What a request gets that does not say; absent where the pipeline decides by its other arguments."""

    size: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None


class ModelCard(BaseModel):
    """The base model, or an adapter with the `parent` it belongs to. `tasks` and `pipeline` are known once it is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["diffusion-worker"] = "diffusion-worker"
    parent: str | None = None
    digest: str | None = None
    state: EngineState
    pipeline: str | None = None
    tasks: list[Task] | None = None
    # What was made of the options that speed up or shrink the model.
    features: dict[str, str] | None = None
    limits: LimitsCard
    defaults: DefaultsCard


class ModelList(BaseModel):
    """What this worker serves now; an adapter is in it once it is loaded."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_cards(engine: Engine, *, created: int) -> list[ModelCard]:
    """The base model, then the adapters; all have the same limits."""
    model = engine.model
    base = ModelCard(
        id=engine.config.served_name,
        created=created,
        state=engine.state,
        pipeline=model.pipeline if model else None,
        tasks=model.tasks if model else None,
        features=engine.features if model else None,
        limits=_limits(engine, model),
        defaults=_defaults(engine, model),
    )
    adapters = [(name, adapter) for name, adapter in engine.served_models() if adapter is not None]
    return [base] + [base.model_copy(update={"id": name, "parent": base.id, "digest": adapter.digest}) for name, adapter in adapters]


def _limits(engine: Engine, model: ModelInfo | None) -> LimitsCard:
    limits = engine.config.limits
    return LimitsCard(
        max_images=limits.max_images,
        max_steps=limits.max_steps,
        max_pixels=limits.max_pixels,
        max_prompt_characters=limits.max_prompt_chars,
        max_partial_images=MAX_PARTIAL_IMAGES,
        max_input_images=model.max_input_images if model else None,
        size_multiple=model.size_multiple if model else None,
    )


def _defaults(engine: Engine, model: ModelInfo | None) -> DefaultsCard:
    told = engine.config.defaults
    width, height = (told.width, told.height) if told.width or model is None else (model.default_width, model.default_height)
    return DefaultsCard(
        size=f"{width}x{height}" if width and height else None,
        num_inference_steps=told.steps or (model.default_steps if model else None),
        guidance_scale=told.guidance_scale if told.guidance_scale is not None or model is None else model.default_guidance_scale,
    )
