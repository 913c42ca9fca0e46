# SPDX-License-Identifier: Apache-2.0
"""Start options of a worker, as a frozen struct that the server and every rank share."""

import enum
import os
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.errors import ConfigError

# The operator mounts Secrets here.
SECRETS_DIR = "/var/run/diffusion-operator/secrets"
CLAIMS_DIR = "/var/run/diffusion-operator/claims"
MODEL_INDEXES = ("model_index.json", "modular_model_index.json")


class Dtype(enum.StrEnum):
    """The dtype of weights. With `auto`, accelerators get bfloat16 and CPUs float32.

    Components that a pipeline's record wants in float32 have that with any value, unless an option names the component.
    """

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Device(enum.StrEnum):
    """The kind of device on which ranks compute. `auto` is an accelerator if torch finds one, else the CPU; `cuda` includes AMD GPUs."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class StartMethod(enum.StrEnum):
    """The way a rank process comes to be; `auto` is `spawn` for an accelerator and `forkserver` for a CPU."""

    AUTO = "auto"
    SPAWN = "spawn"
    FORKSERVER = "forkserver"


class LoadFormat(enum.StrEnum):
    """Way to a model: `default` reads its folder's weights, `dummy` makes random ones, `custom-pipeline` runs the user's pipeline class."""

    DEFAULT = "default"
    CUSTOM_PIPELINE = "custom-pipeline"
    DUMMY = "dummy"


class Compile(enum.StrEnum):
    """Compilation of the denoiser's repeated blocks, done at load: in torch's default mode, or tuned for longer."""

    NONE = "none"
    DEFAULT = "default"
    MAX_AUTOTUNE = "max-autotune"


class Offload(enum.StrEnum):
    """Location of idle weights: with `model` or `group` they stay in host memory, and move by component or by layers."""

    NONE = "none"
    MODEL = "model"
    GROUP = "group"


class Quantization(enum.StrEnum):
    """Storage type of the denoiser's weights."""

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"
    NF4 = "nf4"


class StepCache(enum.StrEnum):
    """Method by which a step reuses results of an earlier one of the same request."""

    NONE = "none"
    FIRST_BLOCK = "first-block"
    TAYLOR_SEER = "taylor-seer"
    MAG_CACHE = "mag-cache"


class OnMissing(enum.StrEnum):
    """Handling of a request for an adapter that is known but not in memory: refuse it, or let it wait for the load."""

    REJECT = "reject"
    LOAD = "load"


class RequestLimits(msgspec.Struct, frozen=True):
    """Bounds of one request; a request over one of them is refused with the limit's name."""

    max_steps: int = 200
    max_pixels: int = 4_194_304
    max_images: int = 10
    max_prompt_chars: int = 8_192


class QueueLimits(msgspec.Struct, frozen=True):
    """Bounds of the queue; a request beyond one of them is answered with 429 and the time to come back.

    `max_queued` counts requests that wait for their first step. The seconds are those that the device is expected to need for all
    requests, and the bytes those of their decoded images. A request that is alone is over none of the three.
    """

    max_queued: int = 512
    max_queued_seconds: float = 3600.0
    max_queued_bytes: int = 1 << 30


class RequestDefaults(msgspec.Struct, frozen=True):
    """Defaults of a request; None leaves a value to the pipeline. Height and width go together."""

    steps: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    width: int | None = None


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one worker. Times are in seconds.

    `model` is the path of a diffusers folder, with one of MODEL_INDEXES at its top. `preload_loras` maps names of adapters to their
    sources, as on the command line. `desired_path` is a file that names more adapters and the sleep policy.
    """

    model: str
    served_name: str
    # Further names of the model in requests. Answers name it by the first.
    other_names: list[str] = []
    # The source of a model that is not here yet, in the command line's form; `model` is then the path it will have.
    model_source: str | None = None
    ranks: int = 1
    # Parallel kinds: their product divides `ranks`, and the quotient is the number of groups that share the rows of each call.
    tensor: int = 1
    sequence: int = 1
    shard: int = 1
    vae_tiling: bool = False
    device: Device = Device.AUTO
    start_method: StartMethod = StartMethod.AUTO
    # Processes that are past their imports, for the next loss of spawned ranks. None: one a rank on an accelerator.
    standby_ranks: int | None = None
    dtype: Dtype = Dtype.AUTO
    # Types of components in place of `dtype`, and of float32 where the record of a pipeline class wants that.
    component_dtypes: dict[str, Dtype] = {}
    pipeline: str = "auto"
    load_format: LoadFormat = LoadFormat.DEFAULT
    max_batch_size: int = 8
    # Adapters that running requests use at once (slots on the device), and those kept in host memory.
    max_loras: int = 4
    max_cached_loras: int = 16
    max_lora_rank: int = 64
    max_loras_per_request: int = 4
    # Ends of the names of layers that adapters may change, which then have their slots from the start; none: any layer.
    lora_target_modules: list[str] = []
    lora_on_missing: OnMissing = OnMissing.REJECT
    # Time for the fetch and the load of one adapter, if a call gives none.
    lora_load_timeout_s: float = 120.0
    # Folder for fetched models and adapters, by digest; None: a folder of this process, deleted with it.
    cache_dir: str | None = None
    # Size beyond which unused files are evicted; None: when the disk is full.
    cache_size_bytes: int | None = None
    # Secrets and claims of sources are folders in these.
    secrets_dir: str = SECRETS_DIR
    claims_dir: str = CLAIMS_DIR
    # Plain http and its like for sources: for tests and closed networks.
    allow_http_sources: bool = False
    preload_loras: dict[str, str] = msgspec.field(default_factory=dict)
    desired_path: str | None = None
    control_token_path: str | None = None
    # Folder in which a server records that its model sleeps, for its successor. None: the successor loads the model.
    state_dir: str | None = None
    limits: RequestLimits = msgspec.field(default_factory=RequestLimits)
    defaults: RequestDefaults = msgspec.field(default_factory=RequestDefaults)
    queue: QueueLimits = msgspec.field(default_factory=QueueLimits)
    # Connections of the data port that are served at once; probes are beside them. Below the usual limit of 1024 open files.
    max_connections: int = 900
    # File with the bearer token that the data port requires; None requires none.
    api_key_path: str | None = None
    # Origins, other than the worker's own, whose pages may call the data port; `*` is any.
    cors_origins: list[str] = []
    ui: bool = True
    compile: Compile = Compile.NONE
    offload: Offload = Offload.NONE
    quantization: Quantization = Quantization.NONE
    step_cache: StepCache = StepCache.NONE
    # Steps of a request that runs before the worker is ready, 0 for none. The sizes are those it runs in; none means the default one.
    warmup_steps: int = 1
    warmup_sizes: list[tuple[int, int]] = []
    # A group that loads no model within this time is given up: the API's default for `startup.timeoutSeconds`.
    startup_timeout_s: float = 1800.0
    # Time after which a rank that works on a tick counts as hung. None: a multiple of the time measured for its request.
    tick_timeout_s: float | None = None
    # Longest wait of a first step for requests to share it with.
    batch_window_s: float = 0.0
    # Meeting point of a generation's ranks. Port 0 takes a free port for each generation.
    rendezvous_host: str = "127.0.0.1"
    rendezvous_port: int = 0
    # Most restarts of a lost group within ten minutes; after more losses a restart is assumed not to help.
    max_restarts: int = 5
    # `module:Class` that is mixed into every rank's worker; its public methods can be called like the worker's own.
    worker_extension: str | None = None
    # Number of text encoder results that are kept, 0 for none; the default covers a gallery's page or a user's last tries.
    prompt_cache_size: int = 32
    # Each request's model calls run alone, so that results at one rank are bit-equal to diffusers.
    exact: bool = False
    # The model is compared before and after every run of a request's own code, which costs time at each model call.
    check_sharing: bool = False
    # Folder for traces of `profile`; None disables profiling.
    profile_dir: str | None = None
    # Below Kubernetes' default grace of 30 s, so that the server still ends by itself.
    drain_timeout_s: float = 25.0

    @property
    def served_names(self) -> list[str]:
        """All names of the model in requests, the first of which stands in answers."""
        return [self.served_name, *self.other_names]

    @property
    def rank_timeout_s(self) -> float:
        """Deadline in seconds for the work of ranks between two ticks, such as sleep: `tick_timeout_s`, or 300 if that is unset."""
        return self.tick_timeout_s or 300.0

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a rank gives up in a collective: `tick_timeout_s` and a minute, or an hour if that is unset.

        The server normally loses the group before that, by its own deadlines.
        """
        return self.tick_timeout_s + 60.0 if self.tick_timeout_s else 3600.0


def served_name_of(model: str) -> str:
    """Return the name that a model is served under if none is given: the last part of its path, with links and `..` resolved."""
    return Path(model).resolve().name


def read_model_index(model: str) -> dict[str, Any]:
    """Return the decoded index of a diffusers folder: `model_index.json`, or if that is missing `modular_model_index.json`.

    Raises:
        ConfigError: there is no folder or no index, or the index is no JSON object with a `_class_name`. The message begins with the
            code that a fetch would report.
    """
    folder = Path(model)
    if not folder.is_dir():
        raise ConfigError(
            f"SourceNotFound: model path {model!r}: expected a diffusers folder, found {'a file' if folder.exists() else 'nothing there'}"
        )
    index = next((folder / name for name in MODEL_INDEXES if (folder / name).exists()), None)
    if index is None:
        raise ConfigError(
            f"UnsupportedFormat: model path {model!r}: expected a diffusers folder, found no {' or '.join(MODEL_INDEXES)} in it"
        )
    try:
        content = msgspec.json.decode(index.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"UnsupportedFormat: model path {model!r}: {index.name} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("_class_name"), str):
        raise ConfigError(f"UnsupportedFormat: model path {model!r}: {index.name} has no _class_name")
    return content


def split_import_path(path: str, option: str) -> tuple[str, str]:
    """Split `module:Class` or `module.Class` into module and class.

    Raises:
        ConfigError: `path` has neither form; the message names `option`.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{option} {path!r}: expected an import path, module:Class or module.Class")
    return module, name


def usable_cores() -> int:
    """Count the CPU cores for this process: its affinity, but not over the cgroup's quota rounded down, and never 0."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, min(allowed, int(quota)) if quota else allowed)


def _cgroup_quota() -> float | None:
    """Read the cores that a cgroup allows, maybe a fraction, from v2 or else v1; None for no limit or unreadable files.

    torch ignores this limit when it chooses its number of threads.
    """
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None
