# SPDX-License-Identifier: Apache-2.0
"""`/v1/models`: the models that this worker serves, and the limits of requests. The SDK passes on fields that OpenAI does not have."""

from typing import Literal

from pydantic import BaseModel

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import usual_steps
from diffusion_worker.engine.state.state_document import AdapterDocument, AdapterState, EngineState
from diffusion_worker.messages import ModelInfo, Task
from diffusion_worker.server.schemas.images import MAX_PARTIAL_IMAGES


class LimitsCard(BaseModel):
    """Bounds of one request; sides of an image are multiples of `size_multiple`. Fields of the model are null until it is loaded."""

    max_images: int
    max_steps: int
    max_pixels: int
    max_prompt_characters: int
    max_partial_images: int
    max_adapters: int
    max_input_images: int | None = None
    size_multiple: int | None = None
    max_width: int | None = None
    max_height: int | None = None


class DefaultsCard(BaseModel):
    """Default values of a request; absent if the pipeline derives them from other arguments."""

    size: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None


class RecipeCard(BaseModel):
    """Values that an adapter's requests get and may not contradict; absent if the adapter leaves them open."""

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    sigmas: list[float] | None = None
    shift: float | None = None


class ModelCard(BaseModel):
    """A model that requests can name: the base model, or an adapter, whose `parent` is the base model.

    `state` is the worker's state for the base model. An adapter is `Loaded`, or `Cached` if its next request has to wait for its load.
    `tasks` and `pipeline` are unknown until the base model is loaded.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["diffusion-worker"] = "diffusion-worker"
    parent: str | None = None
    digest: str | None = None
    # For an adapter: the identity of its effect, of which the file's digest is a part.
    identity: str | None = None
    state: EngineState | AdapterState
    # For an adapter: its default strength, its largest rank, and its recipe.
    scale: float | None = None
    rank: int | None = None
    recipe: RecipeCard | None = None
    pipeline: str | None = None
    tasks: list[Task] | None = None
    # Outcome of the options that speed up or shrink the model.
    features: dict[str, str] | None = None
    limits: LimitsCard
    defaults: DefaultsCard


class ModelList(BaseModel):
    """Models that this worker serves now; an adapter is included if a request for it would be served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_cards(engine: Engine, *, created: int) -> list[ModelCard]:
    """List everything that a request may name now: the base model's card under each of its names, then those of served adapters.

    Adapters have the base model's limits, and its defaults unless their recipe sets others.
    """
    base = _base(engine, created)
    names = [base.model_copy(update={"id": name}) for name in engine.config.served_names]
    return [*names, *(_of_adapter(base, adapter) for adapter in engine.served_adapters())]


def model_card(engine: Engine, name: str, *, created: int) -> ModelCard:
    """Return a model's card; raise the RequestError that a request for the model would get."""
    adapter = engine.model_document(name)
    base = _base(engine, created)
    return base if adapter is None else _of_adapter(base, adapter)


def _base(engine: Engine, created: int) -> ModelCard:
    model = engine.model
    return ModelCard(
        id=engine.config.served_name,
        created=created,
        state=engine.state,
        pipeline=model.pipeline if model else None,
        tasks=model.tasks if model else None,
        features=engine.features if model else None,
        limits=_limits(engine, model),
        defaults=_defaults(engine, model),
    )


def _of_adapter(base: ModelCard, adapter: AdapterDocument) -> ModelCard:
    """Return an adapter's card: a copy of the base model's card with the adapter's own id, digest, scale, rank and recipe.

    A setting in the adapter's recipe replaces the base model's default.
    """
    told = adapter.recipe
    recipe, defaults = None, base.defaults
    if told is not None:
        recipe = RecipeCard(num_inference_steps=told.steps, guidance_scale=told.guidance_scale, sigmas=told.sigmas, shift=told.shift)
        defaults = defaults.model_copy(
            update={name: value for name, value in recipe if value is not None and name in DefaultsCard.model_fields}
        )
    own: dict[str, object] = {"id": adapter.name, "parent": base.id, "digest": adapter.digest, "identity": adapter.identity}
    own |= {"state": adapter.state, "scale": adapter.scale}
    return base.model_copy(update=own | {"rank": adapter.rank, "recipe": recipe, "defaults": defaults})


def _limits(engine: Engine, model: ModelInfo | None) -> LimitsCard:
    limits = engine.config.limits
    return LimitsCard(
        max_images=limits.max_images,
        max_steps=limits.max_steps,
        max_pixels=limits.max_pixels,
        max_prompt_characters=limits.max_prompt_chars,
        max_partial_images=MAX_PARTIAL_IMAGES,
        max_adapters=min(engine.config.max_loras_per_request, engine.config.max_loras),
        max_input_images=model.max_input_images if model else None,
        size_multiple=model.size_multiple if model else None,
        max_width=model.max_width if model else None,
        max_height=model.max_height if model else None,
    )


def _defaults(engine: Engine, model: ModelInfo | None) -> DefaultsCard:
    told = engine.config.defaults
    width, height = (told.width, told.height) if told.width or model is None else (model.default_width, model.default_height)
    # An edit has the size of its image.
    sized = model is None or Task.GENERATE in model.tasks
    return DefaultsCard(
        size=f"{width}x{height}" if sized and width and height else None,
        num_inference_steps=told.steps if model is None else usual_steps(told, engine.config.limits, model),
        guidance_scale=told.guidance_scale if told.guidance_scale is not None or model is None else model.default_guidance_scale,
    )
