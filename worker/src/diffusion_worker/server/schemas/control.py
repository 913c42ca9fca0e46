# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests and answers as pydantic models, so that `/openapi.json` is right and unknown fields are refused.

Pydantic stays in this package: each body turns itself into the struct that the engine takes. Only the form is checked here;
the engine checks all that depends on the model, on limits or on its state.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from diffusion_worker.engine.requests.admission import MAX_LORA_SCALE
from diffusion_worker.engine.state.state_document import (
    AdapterCall,
    DrainCall,
    OperationCall,
    PauseCall,
    ProfileCall,
    Residency,
    SleepCall,
    SleepMode,
    SleepPolicy,
    WakeCall,
)
from diffusion_worker.messages import MemoryTag, SleepLevel
from diffusion_worker.server.schemas.images import Finite
from diffusion_worker.server.schemas.sources import ControlBody, SourceBody

# Longest deadline: an operation of more than a day is a mistake of the caller.
MAX_DEADLINE_S = 86_400.0

ADAPTER_NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$"
COMPONENT_PATTERN = r"^[a-z][a-z0-9_]*$"
MAX_RANK = 4096
# A revision, `bootId.n`.
REVISION_PATTERN = r"^[A-Za-z0-9-]+\.[0-9]{1,18}$"
MAX_WAIT_S = 60.0

Deadline = Annotated[float, Field(gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False)]
OperationId = Annotated[str, Field(min_length=1, max_length=128)]
BootId = Annotated[str, Field(min_length=1, max_length=128)]
AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME_PATTERN, max_length=63)]
Tag = Literal["weights", "adapters", "caches"]
# The sleep policy from now on; the operator's file will say the same, only later.
Policy = Literal["AlwaysAwake", "Asleep", "OnIdle"]
ComponentName = Annotated[str, Field(pattern=COMPONENT_PATTERN, max_length=64)]


class ErrorBody(BaseModel):
    """The body of every error of the control port."""

    code: str
    message: str
    retryable: bool
    retryAfterSeconds: float | None
    details: dict[str, object]


# `responses` of every route of that port: one form for all errors, instead of the framework's own.
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "Any error, with a code, a message, and whether a retry may succeed."}
}


class WakeBody(ControlBody):
    """Body of `POST /v1/wake`. A call without `bootId` is for any life of the server."""

    operation_id: OperationId
    boot_id: BootId | None = None
    deadline_seconds: Deadline = 120.0
    tags: Annotated[
        list[Tag] | None,
        Field(
            min_length=1,
            max_length=8,
            description="Kinds of memory to restore, all if absent; no request is served before all are restored.",
        ),
    ] = None
    policy: Policy | None = None

    def call(self) -> WakeCall:
        """Convert the body to a `WakeCall`, with enum members for tags and policy; None for the tags means all memory."""
        return WakeCall(
            operation_id=self.operation_id,
            boot_id=self.boot_id,
            deadline_seconds=self.deadline_seconds,
            tags=None if self.tags is None else [MemoryTag(tag) for tag in self.tags],
            policy=None if self.policy is None else SleepPolicy(self.policy),
        )


class DrainBody(ControlBody):
    """Body of `POST /v1/drain`. Requests that outlast the deadline end with code `Terminating`."""

    operation_id: OperationId
    boot_id: BootId | None = None
    deadline_seconds: Deadline = 300.0

    def call(self) -> DrainCall:
        """Return the body as the engine takes it."""
        return DrainCall(operation_id=self.operation_id, boot_id=self.boot_id, deadline_seconds=self.deadline_seconds)


class SleepBody(ControlBody):
    """Body of `POST /v1/sleep`. The deadline bounds the drain; after it running requests end as by `Abort`."""

    operation_id: OperationId
    boot_id: BootId | None = None
    deadline_seconds: Deadline = 300.0
    level: Literal["HostMemory", "Discard"] = "HostMemory"
    mode: Literal["Wait", "Abort"] = "Wait"
    if_idle_since: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_DEADLINE_S,
            allow_inf_nan=False,
            description="Seconds before this call. If a request came, ran or ended within them, the sleep is refused with Busy.",
        ),
    ] = None
    policy: Policy | None = None

    def call(self) -> SleepCall:
        """Convert the body to a `SleepCall`, with enum members for level, mode and policy; without a policy the present one stays."""
        return SleepCall(
            operation_id=self.operation_id,
            boot_id=self.boot_id,
            deadline_seconds=self.deadline_seconds,
            level=SleepLevel(self.level),
            mode=SleepMode(self.mode),
            if_idle_since=self.if_idle_since,
            policy=None if self.policy is None else SleepPolicy(self.policy),
        )


class ResumeBody(ControlBody):
    """Body of `POST /v1/resume`."""

    operation_id: OperationId
    boot_id: BootId | None = None

    def call(self) -> OperationCall:
        """Convert the body to an `OperationCall`; a client gives no deadline, because a resume takes effect at once."""
        return OperationCall(operation_id=self.operation_id, boot_id=self.boot_id)


class PauseBody(ControlBody):
    """Body of `POST /v1/pause`. A pause that does not take effect in time changes nothing."""

    operation_id: OperationId
    boot_id: BootId | None = None
    deadline_seconds: Deadline = 60.0

    def call(self) -> PauseCall:
        """Convert the body to a `PauseCall`, field by field; the deadline bounds the wait for running steps."""
        return PauseCall(operation_id=self.operation_id, boot_id=self.boot_id, deadline_seconds=self.deadline_seconds)


class ProbeBody(ControlBody):
    """Body of `POST /v1/probe`."""

    operation_id: OperationId
    boot_id: BootId | None = None
    deadline_seconds: Deadline = 120.0

    def call(self) -> OperationCall:
        """Convert the body to an `OperationCall`; a probe needs nothing beyond ids and a deadline."""
        return OperationCall(operation_id=self.operation_id, boot_id=self.boot_id, deadline_seconds=self.deadline_seconds)


class AdapterBody(ControlBody):
    """Body of `PUT /v1/adapters/{name}`."""

    operation_id: OperationId
    boot_id: BootId | None = None
    deadline_seconds: Deadline = 120.0
    source: SourceBody
    digest: Annotated[str | None, Field(pattern=r"^sha256:[0-9a-f]{64}$")] = None
    identity: Annotated[
        str | None,
        Field(
            pattern=r"^v[0-9]{1,9}:[0-9a-f]{64}$",
            description="The identity that the adapter must have, as an earlier load answered it; otherwise the load fails.",
        ),
    ] = None
    scale: Annotated[Finite, Field(ge=-MAX_LORA_SCALE, le=MAX_LORA_SCALE)] = 1.0
    components: Annotated[
        list[ComponentName],
        Field(default_factory=list, max_length=8, description="Components of the model whose layers in the file are used; all if empty."),
    ]
    format: Annotated[
        Literal["peft", "diffusers", "kohya"] | None, Field(description="The format that the file must have; any if absent.")
    ] = None
    expected_rank: Annotated[
        int | None, Field(ge=1, le=MAX_RANK, description="The rank that the adapter must have, the largest of its modules; any if absent.")
    ] = None
    residency: Literal["Resident", "Cached", "OnDemand"] = "Cached"
    priority: Annotated[
        int, Field(ge=-(2**31), lt=2**31, description="If there is no room, adapters of the lowest priority are evicted first.")
    ] = 0

    def call(self) -> AdapterCall:
        """Convert the body to an `AdapterCall`. It has no `public_only`, which the route sets by the presence of a token."""
        return AdapterCall(
            operation_id=self.operation_id,
            boot_id=self.boot_id,
            deadline_seconds=self.deadline_seconds,
            source=self.source.source(),
            digest=self.digest,
            identity=self.identity,
            scale=self.scale,
            components=self.components,
            format=self.format,
            expected_rank=self.expected_rank,
            residency=Residency(self.residency),
            priority=self.priority,
        )


class ProfileBody(ControlBody):
    """Body of `POST /v1/profile`: begin a trace on every rank, or end it."""

    operation_id: OperationId
    boot_id: BootId | None = None
    deadline_seconds: Deadline = 120.0
    action: Literal["Start", "Stop"]
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)] = "trace"

    def call(self) -> ProfileCall:
        """Convert the body to a `ProfileCall`, with `start` True for the action Start and False for Stop."""
        return ProfileCall(
            operation_id=self.operation_id,
            boot_id=self.boot_id,
            deadline_seconds=self.deadline_seconds,
            start=self.action == "Start",
            prefix=self.prefix,
        )


class StateQuery(BaseModel):
    """Query of `GET /v1/state`. Without `after` the answer comes at once."""

    # Not strict: a query has only strings.
    model_config = ConfigDict(extra="forbid")

    after: Annotated[
        str | None,
        Field(
            pattern=REVISION_PATTERN,
            max_length=150,
            description="The revision of an earlier answer. With wait, the answer comes once there is another.",
        ),
    ] = None
    wait: Annotated[
        float,
        Field(
            ge=0,
            le=MAX_WAIT_S,
            allow_inf_nan=False,
            description="Most seconds to wait for another revision than after; then the answer comes all the same.",
        ),
    ] = 0.0


class AdapterRemoval(BaseModel):
    """Query of `DELETE /v1/adapters/{name}`: requests that use the adapter have `drainSeconds` to finish."""

    # Not strict: a query has only strings.
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    operation_id: OperationId
    boot_id: BootId | None = None
    drain_seconds: Annotated[float, Field(ge=0, le=MAX_DEADLINE_S, allow_inf_nan=False)] = 60.0


class OperationAnswer(BaseModel):
    """Answer to a sleep, wake or drain call; an operation's result is in `/v1/state`."""

    operationId: str
    state: str


class PauseAnswer(BaseModel):
    """Answer to a pause or a resume; `paused` is true while no steps are made."""

    operationId: str
    paused: bool


class FingerprintAnswer(BaseModel):
    """A rank's checksums: of its weights, of each adapter, and of a small image from a fixed seed.

    Each adapter is one text: its identity and its checksum, then `misapplied` if its slot differs. `probe` is null if the model can make no
    such image.
    """

    rank: int
    weights: str
    adapters: list[str]
    probe: str | None


class ProbeAnswer(BaseModel):
    """The checksums of all ranks, in rank order."""

    operationId: str
    ranks: list[FingerprintAnswer]


class ProfileAnswer(BaseModel):
    """State of a trace: whether it runs, and the files that were written, as paths on the worker."""

    running: bool
    files: list[str]


class RemovedAdapter(BaseModel):
    """The adapter that was removed."""

    name: str
