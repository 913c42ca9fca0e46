# SPDX-License-Identifier: Apache-2.0
"""Request and answer bodies of the data port, as pydantic models: all of OpenAI's fields, and those that diffusion adds.

A field of OpenAI's is used, or accepted if ignoring it changes nothing that a client could miss, or refused by name. None is
dropped silently. Null stands for an absent field. Only the form is checked here; the engine checks all that depends on the model, on
limits or on its state.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from diffusion_worker.engine.requests.admission import MAX_LORA_SCALE, MAX_SEED, GenerationParams
from diffusion_worker.errors import refused
from diffusion_worker.messages import Task
from diffusion_worker.server.encoding.images import OutputFormat
from diffusion_worker.server.schemas.answers import ZIP_MEDIA_TYPE, AnswerOptions
from diffusion_worker.server.schemas.lora import AskedAdapter, LoRAObjects, asked_adapters

MAX_PARTIAL_IMAGES = 3

SIZE_PATTERN = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"

# Values of `quality` that let the worker's step cache skip work, and values for which every step is computed.
ACCELERATED_QUALITIES = ("low", "medium")
COMPUTED_QUALITIES = ("high", "hd", "xhigh", "max")

Finite = Annotated[float, Field(allow_inf_nan=False)]
# Without a bound pydantic lets texts through that are no valid Unicode (half of a surrogate pair), which cannot be encoded later.
# Prompts have a limit of their own, which is no larger.
Text = Annotated[str, Field(max_length=1_000_000)]
ModelName = Annotated[str, Field(max_length=256)]

# Reasons for refusing a field, or a value of it, with the alternative.
REFUSED = {
    "svg": "images consist of pixels; use output_format png, jpeg or webp",
    "frame_count": "no animated images are made",
    "frame_duration_ms": "no animated images are made",
    "background": "images have no transparency",
    "image": "input images are accepted by /v1/images/edits",
    "mask": "input images are accepted by /v1/images/edits",
    "strength": "input images are accepted by /v1/images/edits",
    "input_fidelity": "strength sets how close an edit stays to its image, at /v1/images/edits",
}
# Names of other programs for our fields.
OTHER_NAMES = {
    "num_inference_steps": ("steps", "num_steps", "inference_steps", "sampling_steps"),
    "guidance_scale": ("cfg", "cfg_scale", "guidance", "true_cfg_scale"),
    "size": ("width", "height", "image_size", "resolution", "aspect_ratio"),
    "n": ("num_images", "num_images_per_prompt", "num_outputs", "batch_size"),
    "negative_prompt": ("negative",),
    "lora": ("loras",),
    "strength": ("denoising_strength",),
    "output_format": ("format",),
}
OURS = {name: field for field, names in OTHER_NAMES.items() for name in names}


class StreamOptions(BaseModel):
    """The choice of a stream's events."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_progress: Annotated[bool | None, Field(description="True adds our own events, on which clients of OpenAI's may fail.")] = None


class ImageRequest(BaseModel):
    """The fields of every route that makes images."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, description="The image's content in words; not only spaces.")]
    model: Annotated[
        ModelName | None,
        Field(description="The model's served name, or the name of an adapter to use; the model without adapters if absent."),
    ] = None
    n: Annotated[
        int | None, Field(ge=1, description="Number of images, by default 1. The seed of each is that of the image before it, plus 1.")
    ] = None
    size: Annotated[
        str | None, Field(pattern=SIZE_PATTERN, description="WIDTHxHEIGHT in pixels, or auto, the default, for the worker's own size.")
    ] = None
    seed: Annotated[int | None, Field(ge=-1, le=MAX_SEED, description="The first image's seed; random if -1 or absent.")] = None
    num_inference_steps: Annotated[int | None, Field(ge=1)] = None
    guidance_scale: Annotated[Finite | None, Field(ge=0)] = None
    negative_prompt: Annotated[Text | None, Field(description="Content that the image must not show.")] = None
    lora: LoRAObjects = None
    lora_scale: Annotated[
        Finite | None,
        Field(
            ge=-MAX_LORA_SCALE,
            le=MAX_LORA_SCALE,
            description="Strength of the request's only adapter without a scale; the adapter's own if absent.",
        ),
    ] = None
    exact: Annotated[
        bool | None,
        Field(
            description="True shares no call of the model with other requests: the same bits under any load. False unless quality is max."
        ),
    ] = None
    quality: Annotated[
        Literal["auto", "standard", "low", "medium", "high", "hd", "xhigh", "max"] | None,
        Field(
            description="high, hd, xhigh and max compute every step, and max implies exact. "
            "With the others the worker's step cache, if it has one, may skip work."
        ),
    ] = None
    response_format: Annotated[
        Literal["b64_json", "url", "file"] | None,
        Field(
            description="The default, b64_json, answers JSON. The value url does too, with each image as a data URL, since none is stored. "
            "The value file answers the image file itself, or several in a ZIP."
        ),
    ] = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[
        int | None, Field(ge=0, le=100, description="Quality of a jpeg or webp, 0 to 100; 90 if absent. For a png only 100.")
    ] = None
    stream: Annotated[bool | None, Field(description="Answer with server-sent events: previews and the images.")] = None
    stream_options: Annotated[StreamOptions | None, WithJsonSchema(StreamOptions.model_json_schema())] = None
    partial_images: Annotated[
        int | None, Field(ge=0, le=MAX_PARTIAL_IMAGES, description="Number of previews of each image while it is made; only with stream.")
    ] = None
    timings: Annotated[
        bool | None, Field(description="True adds to each image the seconds of its stages and the most memory that it needed.")
    ] = None
    background: Annotated[Literal["auto", "opaque"] | None, Field(description="Accepted, without effect: all images are opaque.")] = None
    moderation: Annotated[Literal["auto", "low"] | None, Field(description="Accepted, without effect: nothing is moderated.")] = None
    user: Annotated[Text | None, Field(description="Accepted and ignored: it is neither kept nor logged.")] = None
    safety_identifier: Annotated[Text | None, Field(description="Accepted and ignored: it is neither kept nor logged.")] = None
    style: Annotated[Literal["vivid", "natural"] | None, Field(description="Accepted, without effect: there are no styles.")] = None
    complexity: Annotated[Literal["low", "medium", "high"] | None, Field(description="Accepted, without effect: no plan is made.")] = None
    svg: Annotated[None, Field(description="Refused: " + REFUSED["svg"])] = None
    frame_count: Annotated[None, Field(description="Refused: " + REFUSED["frame_count"])] = None
    frame_duration_ms: Annotated[None, Field(description="Refused: " + REFUSED["frame_duration_ms"])] = None

    def adapters(self) -> list[AskedAdapter]:
        """Return the adapters of `lora`; raise RequestError (InvalidRequest) for an object without a name."""
        return asked_adapters(self.lora)

    def params(self) -> GenerationParams:
        """Convert the fields to the engine's parameters; `auto` or no size leaves both sides None.

        If `exact` is absent, the quality `max` implies it. The quality also allows or forbids the step cache, or leaves that open with
        None.

        Raises:
            RequestError: InvalidRequest, previews or options of a stream without one, or an adapter with no name or with two values for
                one field.
        """
        if self.partial_images and not self.stream:
            raise refused("partial_images", "0 without stream", self.partial_images)
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "none without stream", "some")
        width, height = (None, None) if self.size in (None, "auto") else map(int, self.size.split("x"))
        return GenerationParams(
            prompt=self.prompt,
            model=self.model,
            negative_prompt=self.negative_prompt,
            n=1 if self.n is None else self.n,
            seed=None if self.seed == -1 else self.seed,
            height=height,
            width=width,
            steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            loras=[asked.choice for asked in self.adapters()],
            lora_scale=self.lora_scale,
            exact=self.quality == "max" if self.exact is None else self.exact,
            accelerated=_accelerated(self.quality),
            previews=self.partial_images or 0,
        )

    def options(self) -> AnswerOptions:
        """Return the form of the answer.

        Raises:
            RequestError: a compression of a format without any, or a file and a stream at once.
        """
        output_format = OutputFormat(self.output_format or OutputFormat.PNG)
        if self.output_compression not in (None, 100) and output_format is OutputFormat.PNG:
            raise refused("output_compression", "100 for png, which is lossless, or output_format jpeg or webp", self.output_compression)
        if self.response_format in ("file", "url") and self.stream:
            raise refused("response_format", "b64_json with stream", self.response_format)
        return AnswerOptions(
            output_format=output_format,
            output_compression=self.output_compression,
            as_file=self.response_format == "file",
            as_url=self.response_format == "url",
            stream=bool(self.stream),
            progress=self.stream_options is not None and bool(self.stream_options.include_progress),
            timings=bool(self.timings),
        )


class ImagesRequest(ImageRequest):
    """Body that `client.images.generate(...)` of the OpenAI SDK sends, with the fields that diffusion adds."""


class TimingsBody(BaseModel):
    """Seconds of one image; calls that it shared with others count in full."""

    queue: float
    encode: float
    denoise: float
    decode: float
    post: float
    total: float


class AdapterUse(BaseModel):
    """An adapter that an image was made with."""

    name: str
    digest: str
    scale: float
    identity: str


class ProvenanceBody(BaseModel):
    """The model, adapters and settings that an image was made with. They are also in the metadata of the file."""

    model: str
    pipeline: str
    revision: str | None
    digest: str | None
    task: Task
    strength: float | None
    adapters: list[AdapterUse]
    steps: int | None
    guidance_scale: float | None
    sigmas: list[float] | None
    shift: float | None
    accelerated: bool
    exact: bool
    engine: str
    seed: int
    width: int
    height: int


class ImageData(BaseModel):
    """An image of the answer, in one of its first two fields.

    `timings` and `peak_memory_bytes` are there if requested; the latter is null if unknown.
    """

    b64_json: str | None = None
    url: Annotated[str | None, Field(description="A data URL, with response_format url.")] = None
    seed: int
    provenance: ProvenanceBody
    timings: TimingsBody | None = None
    peak_memory_bytes: int | None = None


class ImagesAnswer(BaseModel):
    """The images in base64. `quality` is the one that ran: high computes every step, medium uses the step cache."""

    created: int
    background: Literal["opaque"]
    output_format: OutputFormat
    quality: Literal["medium", "high"]
    size: str
    usage: Annotated[dict[str, Any], Field(description="OpenAI's numbers of tokens, all 0: a diffusion model counts none.")]
    data: list[ImageData]


ErrorType = Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]


class ErrorObject(BaseModel):
    """An error in OpenAI's fields and some of this worker. `param` is the faulty field of the request, if there is one."""

    message: str
    type: ErrorType
    param: str | None
    code: str
    retryable: Annotated[bool, Field(description="True if the same request may succeed later, as the header x-should-retry says too.")]
    retry_after_seconds: float | None
    details: dict[str, object]


class ErrorEnvelope(BaseModel):
    """The body of every error of the data port, and the data of an event `error`."""

    error: ErrorObject


# `responses` of every route of the data port.
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorEnvelope, "description": "Any error, with a code, a message, and whether a retry may succeed."}
}

# The schema of an event with `stream`, for any of the events: OpenAPI 3.1 cannot describe a sequence.
EVENT = {
    "type": "object",
    "description": "A server-sent event. The data is a JSON object with its type: a preview, an image, an error, or a step if requested.",
    "required": ["event", "data"],
    "properties": {
        "event": {"type": "string", "pattern": r"^(image_(generation|edit)\.(held|progress|partial_image|completed)|error)$"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
# `responses` of the routes that make images: the forms of an answer by media type.
IMAGE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ImagesAnswer,
        "content": {
            "text/event-stream": {"schema": EVENT},
            **{f"image/{kind}": {"schema": {"type": "string", "format": "binary"}} for kind in OutputFormat},
            ZIP_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def _accelerated(quality: str | None) -> bool | None:
    if quality in ACCELERATED_QUALITIES:
        return True
    return False if quality in COMPUTED_QUALITIES else None
