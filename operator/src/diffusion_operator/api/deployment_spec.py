# SPDX-License-Identifier: Apache-2.0
"""The spec of a DiffusionDeployment, field for field as crds/diffusiondeployments.yaml has it (a test holds them together).

Defaults stand here and in the schema; in a cluster the schema's are the ones that act.
"""

from enum import StrEnum

import msgspec

from diffusion_operator.api.foreign_text import OpenWord
from diffusion_operator.api.names import DEFAULT_GPU_RESOURCE, NO_GPU_RESOURCE
from diffusion_operator.api.pod_parts import ContainerSecurity, EnvFrom, EnvVar, ExtraVolume, VolumeMount
from diffusion_operator.api.scheduling import Scheduling
from diffusion_operator.api.source import ModelSource


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    pass


class Dtype(StrEnum):
    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FLOAT32 = "Float32"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class SleepPolicy(OpenWord):
    """Choice of when a model sleeps. A newer worker may report another word, which is kept as text."""

    ALWAYS_AWAKE = "AlwaysAwake"
    ASLEEP = "Asleep"
    ON_IDLE = "OnIdle"


class SleepLevel(OpenWord):
    """Depth of a sleep: the weights stay in host memory, or are discarded.

    A newer worker may report another word, which is kept as text.
    """

    HOST_MEMORY = "HostMemory"
    DISCARD = "Discard"


class ColdMode(StrEnum):
    HOLD = "Hold"
    REJECT = "Reject"


class DrainMode(StrEnum):
    WAIT = "Wait"
    ABORT = "Abort"


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class LoadFormat(StrEnum):
    DEFAULT = "Default"
    CUSTOM_PIPELINE = "CustomPipeline"
    DUMMY = "Dummy"


class Compile(StrEnum):
    DISABLED = "Disabled"
    DEFAULT = "Default"
    MAX_AUTOTUNE = "MaxAutotune"


class Offload(StrEnum):
    NONE = "None"
    MODEL = "Model"
    GROUP = "Group"


class Quantization(StrEnum):
    NONE = "None"
    INT8 = "Int8"
    FP8 = "FP8"
    NF4 = "NF4"


class StepCache(StrEnum):
    NONE = "None"
    FIRST_BLOCK = "FirstBlock"
    TAYLOR_SEER = "TaylorSeer"
    MAG_CACHE = "MagCache"


class RolloutType(StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    RECREATE = "Recreate"


class PolicyMode(StrEnum):
    """Choice of who guards the control port: a NetworkPolicy of the operator (`Managed`), or policies of the user's own (`None`)."""

    MANAGED = "Managed"
    NONE = "None"


class DataPortAccess(StrEnum):
    """Sources that a deployment's NetworkPolicy admits to the data port: all, pods of the same namespace, or none."""

    OPEN = "Open"
    SAME_NAMESPACE = "SameNamespace"
    NONE = "None"


class Identity(StrEnum):
    """Choice of a pod's user and groups where the spec names none.

    `Image` takes those of our container images, `Platform` leaves them to the platform.
    """

    IMAGE = "Image"
    PLATFORM = "Platform"


class BudgetMode(StrEnum):
    """Choice of who makes the PodDisruptionBudget: the operator, with one replica unavailable at most (`Auto`), or the user (`None`)."""

    AUTO = "Auto"
    NONE = "None"


Quantity = int | str


class CacheClaim(_Spec, frozen=True):
    claim_name: str


class CacheFolder(_Spec, frozen=True):
    size_limit: Quantity | None = None


class Cache(_Spec, frozen=True):
    """The volume that caches model files: a PersistentVolumeClaim or an emptyDir. The schema validates that exactly one is set."""

    claim: CacheClaim | None = None
    empty_dir: CacheFolder | None = None


class Model(_Spec, frozen=True):
    source: ModelSource
    pipeline: str = "Auto"
    dtype: Dtype = Dtype.AUTO
    component_dtypes: dict[str, Dtype] = {}
    cache: Cache = Cache(empty_dir=CacheFolder())


class PullSecret(_Spec, frozen=True):
    name: str


class EngineSpec(_Spec, frozen=True):
    image: str | None = None
    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    pull_secrets: tuple[PullSecret, ...] = ()
    max_batch_size: int = 8
    batch_window_milliseconds: int = 0
    exact: bool = False
    prompt_cache_size: int = 32
    vae_tiling: bool = False
    load_format: LoadFormat = LoadFormat.DEFAULT
    compile: Compile = Compile.DISABLED
    offload: Offload = Offload.NONE
    quantization: Quantization = Quantization.NONE
    step_cache: StepCache = StepCache.NONE
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[EnvFrom, ...] = ()
    volume_mounts: tuple[VolumeMount, ...] = ()
    security_context: ContainerSecurity = ContainerSecurity()


class Parallelism(_Spec, frozen=True):
    ranks_per_replica: int = 1
    tensor: int = 1
    sequence: int = 1
    shard: int = 1


class DeviceClaim(_Spec, frozen=True):
    """A claim through which pods get devices: an existing one that all replicas share, or a template, which makes one for each replica.

    Without `request` the container gets all devices of the claim.
    """

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None
    request: str | None = None


class Resources(_Spec, frozen=True):
    gpu_resource_name: str | None = None
    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}
    claims: tuple[DeviceClaim, ...] = ()
    shared_memory: Quantity = "8Gi"

    @property
    def gpu_resource(self) -> str:
        """The extended resource that stands for a GPU, by default `nvidia.com/gpu`.

        It is `none` if the spec says so, because no GPU is needed. Without a name in the spec, resource claims make it `none` too.
        """
        return self.gpu_resource_name or (NO_GPU_RESOURCE if self.claims else DEFAULT_GPU_RESOURCE)

    @property
    def devices(self) -> frozenset[str]:
        """Names of what brings a replica its devices: the extended resource, claims and templates of claims."""
        names = {self.gpu_resource} - {NO_GPU_RESOURCE}
        return frozenset(names | {name for one in self.claims if (name := one.resource_claim_name or one.resource_claim_template_name)})


class OnMissing(StrEnum):
    """Answer to a request whose adapter was evicted: 503 with Retry-After (`Reject`), or a wait until it is loaded again (`Load`)."""

    REJECT = "Reject"
    LOAD = "Load"


class Lora(_Spec, frozen=True):
    """Settings of LoRA adapters.

    The schema sets no default for `max_cached` and `max_per_request`; `cached` and `per_request` derive theirs from `max_loaded`.
    """

    enabled: bool = True
    max_loaded: int = 4
    max_cached: int | None = None
    max_rank: int = 64
    target_modules: tuple[str, ...] = ()
    max_per_request: int | None = None
    on_missing: OnMissing = OnMissing.REJECT
    drain_timeout_seconds: int = 120
    load_timeout_seconds: int = 120
    secrets: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """Number of adapters that running requests can have active simultaneously: `max_loaded`, or 0 if `enabled` is false."""
        return self.max_loaded if self.enabled else 0

    @property
    def mounted_secrets(self) -> tuple[str, ...]:
        """Names of the Secrets to mount for sources of adapters; empty where `enabled` is false."""
        return self.secrets if self.enabled else ()

    @property
    def mounted_claims(self) -> tuple[str, ...]:
        """Names of the claims to mount for adapters; empty where `enabled` is false."""
        return self.claims if self.enabled else ()

    @property
    def cached(self) -> int:
        """Capacity of the adapter cache in host RAM, in adapters: `max_cached`, by default the larger of 16 and `max_loaded`."""
        return self.max_cached if self.max_cached is not None else max(16, self.max_loaded)

    @property
    def per_request(self) -> int:
        """Most adapters that a request can combine: `max_per_request`, by default 4, limited to `slots` but never below 1."""
        return max(1, min(self.max_per_request or 4, self.slots))


class Sleep(_Spec, frozen=True):
    policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE
    level: SleepLevel = SleepLevel.HOST_MEMORY
    idle_seconds: int = 300
    min_awake: int = 0
    min_awake_seconds: int = 60
    drain: DrainMode = DrainMode.WAIT
    drain_timeout_seconds: int = 300
    wake_timeout_seconds: int = 120


class ColdRequests(_Spec, frozen=True):
    """Limits of the requests that a replica holds while its model loads, sleeps or wakes. With `Reject` none is held: each gets 503."""

    mode: ColdMode = ColdMode.HOLD
    max_held: int = 64
    hold_timeout_seconds: int = 300


class Warmup(_Spec, frozen=True):
    enabled: bool = True
    steps: int = 1
    sizes: tuple[str, ...] = ()


class Startup(_Spec, frozen=True):
    timeout_seconds: int = 1800
    warmup: Warmup = Warmup()


class ApiKeySecret(_Spec, frozen=True):
    name: str
    key: str = "apiKey"


class ServiceSpec(_Spec, frozen=True):
    type: ServiceType = ServiceType.CLUSTER_IP
    port: int = 80
    annotations: dict[str, str] = {}
    api_key_secret: ApiKeySecret | None = None


class RequestDefaults(_Spec, frozen=True):
    """Defaults of requests; None leaves a value to the pipeline."""

    steps: int | None = None
    guidance_scale: str | None = None
    size: str | None = None


class RequestLimits(_Spec, frozen=True):
    max_steps: int = 200
    max_pixels: int = 4_194_304
    max_images: int = 10
    max_queued: int = 512
    max_queued_seconds: int = 3600
    max_queued_bytes: int = 1 << 30
    max_connections: int = 900


class Requests(_Spec, frozen=True):
    defaults: RequestDefaults = RequestDefaults()
    limits: RequestLimits = RequestLimits()


class Rollout(_Spec, frozen=True):
    """Strategy for replacing replicas after a change of the template.

    `max_surge` and `max_unavailable` apply to the type RollingUpdate alone, so the schema cannot give them a default.
    """

    type: RolloutType = RolloutType.ROLLING_UPDATE
    max_surge: int | str | None = None
    """A number, or a share of `replicas` as in `25%`."""
    max_unavailable: int | str | None = None
    progress_deadline_seconds: int = 1800


class ReplicaRecovery(_Spec, frozen=True):
    backoff_seconds: int = 10
    backoff_max_seconds: int = 300
    failure_threshold: int = 5
    window_seconds: int = 3600


class Drain(_Spec, frozen=True):
    timeout_seconds: int = 300


class Control(_Spec, frozen=True):
    network_policy: PolicyMode = PolicyMode.MANAGED


class NetworkPolicy(_Spec, frozen=True):
    data: DataPortAccess = DataPortAccess.OPEN


class SecurityContext(_Spec, frozen=True):
    """The user and groups of the pods, as Kubernetes names them."""

    identity: Identity = Identity.IMAGE
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    supplemental_groups: tuple[int, ...] = ()


class PodMetadata(_Spec, frozen=True):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class DeploymentSpec(_Spec, frozen=True):
    model: Model
    served_name: str | None = None
    served_names: tuple[str, ...] = ()
    engine: EngineSpec = EngineSpec()
    replicas: int = 1
    parallelism: Parallelism = Parallelism()
    resources: Resources = Resources()
    lora: Lora = Lora()
    sleep: Sleep = Sleep()
    cold_requests: ColdRequests = ColdRequests()
    startup: Startup = Startup()
    service: ServiceSpec = ServiceSpec()
    requests: Requests = Requests()
    rollout: Rollout = Rollout()
    replica_recovery: ReplicaRecovery = ReplicaRecovery()
    drain: Drain = Drain()
    control: Control = Control()
    network_policy: NetworkPolicy = NetworkPolicy()
    scheduling: Scheduling = Scheduling()
    security_context: SecurityContext = SecurityContext()
    pod_metadata: PodMetadata = PodMetadata()
    service_account_name: str | None = None
    volumes: tuple[ExtraVolume, ...] = ()
    host_network: bool = False
    host_ipc: bool = msgspec.field(default=False, name="hostIPC")
    host_pid: bool = msgspec.field(default=False, name="hostPID")
    pod_disruption_budget: BudgetMode = BudgetMode.AUTO
    suspend: bool = False

    @property
    def wanted_replicas(self) -> int:
        """Number of replicas to run: 0 while `suspend` is set, else `replicas`. Suspending leaves `replicas` alone for an autoscaler."""
        return 0 if self.suspend else self.replicas


def host_namespaces(spec: DeploymentSpec) -> dict[str, bool]:
    """Return for each of the three host namespaces, by its field name, whether the spec shares it with the pods."""
    return {"hostNetwork": spec.host_network, "hostIPC": spec.host_ipc, "hostPID": spec.host_pid}
