# SPDX-License-Identifier: Apache-2.0
"""Messages between the server process and its ranks: msgspec structs, MessagePack on the wire, no pickle.

The server broadcasts one stream that every rank reads in order: `Tick` (at most one a step), `Rpc`, `Shutdown`. Ranks
answer on a stream of their own: all of them to `Rpc`, only rank 0 to `Tick`. Images travel beside a message as raw frames.
"""

import enum
from typing import NewType

import msgspec

from diffusion_worker.errors import Fault

AdapterIdentity = NewType("AdapterIdentity", str)
"""`v<converter>:<sha256>` of the effect of an adapter; see `lora.identity`."""


class Task(enum.StrEnum):
    """Input of a request: words alone, images and words, or an image of which a part is repainted."""

    GENERATE = "generate"
    EDIT = "edit"
    INPAINT = "inpaint"


class LoRAUse(msgspec.Struct, frozen=True):
    """An adapter of one request: the id under which it was registered and the strength it is used with."""

    lora_int_id: int
    scale: float


class ImageInput(msgspec.Struct, frozen=True):
    """An image or mask that a request starts from. The request's binary frame number `frame` has the pixels.

    They are uint8 [height, width, channels]. Three channels are RGB; one is a mask, 255 where the image is to be made again and 0 where
    it stays.
    """

    frame: int
    shape: tuple[int, int, int]


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An image or video to make. None means the pipeline's own default; height and width are in pixels.

    `exact` keeps every model call of the request alone: at one rank it is bit-equal to diffusers' own, whatever else runs. `whole` requests
    run while no other advances, because their pipeline changes state of the model that others share. `accelerated` lets the worker's step
    cache, if it has one, skip work. `strength` is how far from its image an edit may go, 0 to 1. `previews` is the number of unfinished
    images that the request sends before its result.
    """

    request_id: str
    prompt: str
    negative_prompt: str | None = None
    seed: int
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    loras: list[LoRAUse] = []
    exact: bool = False
    whole: bool = False
    accelerated: bool = False
    # The schedule where an adapter's recipe has one: sigmas from 1 down, or the shift of a flow scheduler.
    sigmas: list[float] | None = None
    shift: float | None = None
    task: Task = Task.GENERATE
    images: list[ImageInput] = []
    mask: ImageInput | None = None
    strength: float | None = None
    previews: int = 0


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """A step of the running requests: those in `leave` end, those in `join` begin, and then those in `advance` (None: all) take a step.

    `frames` counts the frames of each request in `join`; they travel beside the message, in that order. Empty if none has any.
    """

    number: int
    join: list[RequestSpec] = []
    leave: list[str] = []
    advance: list[str] | None = None
    frames: list[int] = []


class Rpc(msgspec.Struct, frozen=True, tag="rpc"):
    """A call that the ranks' workers make when they reach it in the broadcast, with each argument encoded on its own.

    All ranks run the method, unless `output_rank` names one. Results then come from this rank alone; `exec_all_ranks` lets the others run
    it too.
    """

    call_id: int
    method: str
    kwargs: dict[str, msgspec.Raw] = {}
    output_rank: int | None = None
    exec_all_ranks: bool = False

    def runs_on(self, rank: int) -> bool:
        """Return whether `rank` runs the method: all do if `output_rank` is None or `exec_all_ranks` is set.

        Each of them sends a reply, if only an empty one.
        """
        return self.exec_all_ranks or self.output_rank in (None, rank)


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The last message to the ranks: each sends what it still has, leaves the process group, and ends with exit code 0."""


ToRank = Tick | Rpc | Shutdown


class SleepLevel(enum.StrEnum):
    """Memory that a sleeping rank keeps: a mirror of its weights in host memory or in cached files, or nothing."""

    HOST_MEMORY = "HostMemory"
    DISCARD = "Discard"


class MemoryTag(enum.StrEnum):
    """Kinds of a rank's device memory that a wake restores."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    CACHES = "caches"


class SleepTask(msgspec.Struct, frozen=True):
    """A command to drop all requests and give memory back.

    A rank that succeeded with this id lately, or sleeps at this level already, changes nothing. A failed task is tried again.
    """

    task_id: str
    level: SleepLevel = SleepLevel.HOST_MEMORY


class WakeTask(msgspec.Struct, frozen=True):
    """A command to restore the memory of these tags (None: all).

    A rank that succeeded with this id lately, or has this memory already, changes nothing. A failed task is tried again.
    """

    task_id: str
    tags: list[MemoryTag] | None = None


class TaskStatus(enum.StrEnum):
    """Outcome of a sleep or wake on a rank."""

    SUCCESS = "SUCCESS"
    ERROR = "ERROR"


class TaskAck(msgspec.Struct, frozen=True):
    """A rank's answer to a `SleepTask` or `WakeTask`; errors are answers too, and the rank lives on.

    `freed_bytes` is the memory that a sleep gave back. `resident_bytes` is that of weights, slots and caches on the device afterwards.
    """

    task_id: str
    status: TaskStatus
    rank: int
    freed_bytes: int = 0
    resident_bytes: int = 0
    error_code: str | None = None
    error_msg: str | None = None


class WakeCheck(enum.StrEnum):
    """Use of the probe to verify a wake. The checksums of the weights and the adapters count in every case.

    `Exact`: every bit of the probe's image counts. `Tolerance`: it may differ a little, because two probes of the load did. `Checksums`: it
    is not used, because there is none, or because two probes of the load differed by more.
    """

    EXACT = "Exact"
    TOLERANCE = "Tolerance"
    CHECKSUMS = "Checksums"


class Fingerprint(msgspec.Struct, frozen=True):
    """A digest of a rank's contents and results, to compare it with itself before a sleep.

    `weights` is a checksum of all weights on the device. `adapters` maps each registered adapter's id to one text: identity, a
    checksum of its kept copy, and `misapplied` if its slot differs from that. `probe` is the SHA-256 of the result of one step from a
    fixed seed; None if the model cannot run such a step. `cells` are levels, 0 to 255, of the same image in few large cells. `check` says
    how later probes compare with this one.
    """

    weights: str
    adapters: dict[int, str] = {}
    probe: str | None = None
    cells: bytes = b""
    check: WakeCheck = WakeCheck.EXACT


class MemoryReport(msgspec.Struct, frozen=True, rename="camel"):
    """Memory of a rank's weights, adapters and caches by place, in bytes.

    `weights_resident_bytes` is the kernel's count of the slabs' mappings in memory, whose address ranges are `mappings`. On a GPU it counts
    the slabs' memory on the device. `mirror_*` is the source of the weights at a wake, as far as there is one already. `mirror_file_bytes`
    come from the checkpoint's files. The system caches their pages at `HostMemory`, and is asked to drop them at `Discard`.
    `mirror_memory_bytes` are this process's own. On a CPU the latter are the tensors that are in no file. On a GPU they are a pinned copy
    of everything, of which `Discard` keeps the tensors that are in no file. `mirror_shared_bytes` are such a copy that ranks of the pod
    share: each reports it, and the pod has it once. `adapter_slots_bytes` counts adapter slots, beside the weights;
    `adapter_slots_resident_bytes` of these are held now. `adapter_host_bytes` counts registered adapters in host memory, which `Discard`
    forgets. `cache_bytes` counts the prompt cache. `asleep` lists the tags whose memory is given back, `level` the level of that sleep.
    """

    weights_bytes: int = 0
    weights_resident_bytes: int = 0
    mirror_file_bytes: int = 0
    mirror_memory_bytes: int = 0
    mappings: list[str] = []
    adapter_slots_bytes: int = 0
    adapter_slots_resident_bytes: int = 0
    adapter_host_bytes: int = 0
    cache_bytes: int = 0
    asleep: list[MemoryTag] = []
    level: SleepLevel | None = None
    mirror_shared_bytes: int = 0


class ModelMerging(msgspec.Struct, frozen=True, rename="camel"):
    """A method of a component, and whether its calls are merged with those of other requests.

    `model` is the component's class, and `why` gives the reason.
    """

    component: str
    model: str
    method: str
    merged: bool
    why: str


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about the loaded model that the server needs to validate requests. Sizes are in pixels.

    `kind` is `image` or `video`; a video has a multiple of `frame_multiple` frames and one more. The defaults are the pipeline's
    own; None where they depend on its other arguments.
    """

    pipeline: str
    dtype: str
    size_multiple: int
    weights_bytes: int
    kind: str = "image"
    frame_multiple: int = 1
    default_height: int | None = None
    default_width: int | None = None
    default_frames: int | None = None
    default_steps: int | None = None
    # Memory of its device that one rank has for everything but the weights; 0 where that is not known.
    free_bytes: int = 0
    # The supported values of `Task`, and the number of images an edit may start from.
    tasks: list[Task] = msgspec.field(default_factory=lambda: [Task.GENERATE])
    max_input_images: int = 0
    # The input images of an edit are references that the model processes beside its output: each costs as much as the output.
    references: bool = False
    default_guidance_scale: float | None = None
    # Outcome of the options that speed up or shrink the model, by their names: `{"compile": "default"}`.
    features: dict[str, str] = {}
    # With --sequence an image's tokens are split over ranks: their number is a multiple of `tokens_multiple`, and a token
    # has sides of `token_pixels`.
    token_pixels: int = 1
    tokens_multiple: int = 1
    # The longest sides that the model has positions for; None where it computes them for any size.
    max_height: int | None = None
    max_width: int | None = None
    # For each method of each component.
    merging: list[ModelMerging] = []


class WarmTick(msgspec.Struct, frozen=True):
    """The times of a request's warm-up with `images` images at once, on one rank.

    `step_s` are the denoisers' seconds in its shortest step, and `longest_s` those of its longest tick, with all that comes once.
    `replayed` says what the pipeline was about to do with the shared model where the request was made again as `whole`; empty otherwise.
    """

    spec: RequestSpec
    images: int
    step_s: float
    longest_s: float
    replayed: str = ""


class WarmedUp(msgspec.Struct, frozen=True):
    """A rank's report of its warm-up: the outcome of the options, as `ModelInfo.features`, and what ticks took."""

    features: dict[str, str] = {}
    ticks: list[WarmTick] = []


class LoadProgress(msgspec.Struct, frozen=True, tag="load"):
    """Bytes of weights that a rank has read so far, and all that it has to read."""

    rank: int
    bytes_done: int
    bytes_total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A rank's message at the end of its load: its pid, the model's description, and its memory.

    The group can serve when all ranks have sent it.
    """

    rank: int
    pid: int
    model: ModelInfo
    memory: MemoryReport


class ErrorReport(msgspec.Struct, frozen=True):
    """An error on its way from a rank to a caller; `code` is one of `ErrorCode`."""

    code: str
    message: str


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """A rank's report that it is about to exit: `config` if its configuration is wrong, else the kind of `fault`."""

    rank: int
    message: str
    config: bool = False
    fault: Fault = Fault.DEFECT


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """A rank's report of frames that are no message and were ignored; `count` is their number since its start."""

    rank: int
    count: int


class StageSeconds(msgspec.Struct, frozen=True):
    """The time of a request by stage, as rank 0 measured it.

    A call shared by several requests counts in full for each; `post` is the conversion to pixels. `peak_bytes` is the device's highest
    memory use beyond the weights over the request's ticks; 0 if it is unknown.
    """

    encode: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0
    post: float = 0.0
    peak_bytes: int = 0


class Finished(msgspec.Struct, frozen=True):
    """The result of a request within a `TickDone`: frame `frame` of the message has its pixels, uint8.

    `shape` is (height, width, 3), for a video with the number of frames first.
    """

    request_id: str
    frame: int
    shape: tuple[int, ...]
    stages: StageSeconds = StageSeconds()


class Progress(msgspec.Struct, frozen=True):
    """Steps that a request has taken, and the total if its scheduler declares it.

    `held_bytes` is the memory that it holds on rank 0 until its next step, by estimate: latents, embeddings and values of its step cache.
    """

    request_id: str
    step: int
    steps: int | None = None
    held_bytes: int = 0


class Preview(msgspec.Struct, frozen=True):
    """An unfinished image of a request: preview `number` from 0 is frame `frame`, `shape` (height, width, 3) of uint8."""

    request_id: str
    number: int
    frame: int
    shape: tuple[int, ...]


class PromptCacheStats(msgspec.Struct, frozen=True):
    """The prompt cache of rank 0 since its start.

    `size` and `max_size` count entries kept and allowed. `hits` are encoder calls answered from the cache, `misses` calls whose
    results were kept, and `bypassed` calls whose results were not.
    """

    size: int = 0
    max_size: int = 0
    hits: int = 0
    misses: int = 0
    bypassed: int = 0


class Failed(msgspec.Struct, frozen=True):
    """The end of a request by an error that concerns no other request."""

    request_id: str
    error: ErrorReport


class Replay(msgspec.Struct, frozen=True):
    """A request that was ended before its pipeline did `what` with the shared model; it is to run again as `whole`."""

    request_id: str
    what: str


class TickDone(msgspec.Struct, frozen=True, tag="tick-done"):
    """Results of a tick, from rank 0.

    `rows` and `calls` count the merged model calls of the tick. `denoise_seconds` is the denoisers' part of `seconds`. `peak_bytes` is the
    device's peak memory beside the weights (0 if unknown). `split` is set if a merged call failed and was repeated request by request.
    `progress` has the requests that took a step.
    """

    number: int
    finished: list[Finished] = []
    failed: list[Failed] = []
    rows: int = 0
    calls: int = 0
    seconds: float = 0.0
    denoise_seconds: float = 0.0
    peak_bytes: int = 0
    split: bool = False
    progress: list[Progress] = []
    previews: list[Preview] = []
    prompt_cache: PromptCacheStats | None = None
    # The `features` of `ModelInfo`, if they changed: compiled code did not fit, and the model runs uncompiled.
    features: dict[str, str] | None = None
    # The part of `rows` for which a step cache skipped most blocks.
    skipped: int = 0
    replays: list[Replay] = []


class RpcReply(msgspec.Struct, frozen=True, tag="rpc-reply"):
    """A rank's reply to the `Rpc` of this `call_id`: a result in MessagePack, or an error.

    `result` is None if only another rank was asked for it. Replies without an error also report the rank's memory.
    """

    call_id: int
    rank: int
    result: bytes | None = None
    error: ErrorReport | None = None
    memory: MemoryReport | None = None


ToServer = LoadProgress | Ready | Fatal | Dropped | TickDone | RpcReply


class Recipe(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Settings that a few-step adapter requires: its requests get them, and may not contradict them. None leaves a setting open."""

    steps: int | None = None
    guidance_scale: float | None = None
    sigmas: list[float] | None = None
    shift: float | None = None


class LoadedLoRA(msgspec.Struct, frozen=True):
    """A rank's report of an adapter it registered.

    `digest` is the sha256 of the weights file, `identity` that of its effect, `size_bytes` that file's size. `rank` is its largest
    rank. `modules` counts the layers that it changes, all in `components`. `format` is `peft`, `diffusers` or `kohya`. `alpha` is
    the adapter's own if all modules share one. `base_model` is the model named in its metadata. `evicted` lists the ids that were
    evicted for it. `checksum` is that of this rank's copy in host memory.
    """

    digest: str
    rank: int
    modules: int
    size_bytes: int
    components: list[str] = []
    format: str = "peft"
    alpha: float | None = None
    base_model: str | None = None
    recipe: Recipe | None = None
    evicted: list[int] = []
    checksum: str = ""
    identity: AdapterIdentity = AdapterIdentity("")


class PreparedPart(msgspec.Struct, frozen=True):
    """An adapter that a load's process prepared for some ranks: `size` sealed bytes at `path`, and the layout of the adapter in them.

    `layout` is an encoded `lora.loads.layout.Layout`.
    """

    ranks: list[int]
    path: str
    size: int
    layout: bytes
    loaded: LoadedLoRA


_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)


def encode(message: ToRank | ToServer) -> bytes:
    """Encode a message in MessagePack. Frames of images are not in it: they are sent beside it."""
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Decode the first frame of the broadcast as a `Tick`, `Rpc` or `Shutdown`.

    Other bytes raise one of the errors in `ranks.broadcast.NO_MESSAGE`.
    """
    return _to_rank.decode(data)


def decode_to_server(data: bytes) -> ToServer:
    """Decode the first frame of an answer as one of `ToServer`. Other bytes raise one of the errors in `ranks.broadcast.NO_MESSAGE`."""
    return _to_server.decode(data)


def pack(**values: object) -> dict[str, msgspec.Raw]:
    """Encode every value on its own, so that the rank can decode it to the type that its table of methods has for the argument."""
    return {name: msgspec.Raw(_encoder.encode(value)) for name, value in values.items()}
