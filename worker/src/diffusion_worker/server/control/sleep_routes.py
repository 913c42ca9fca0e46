# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake for clients that know the routes of vLLM (`/sleep`) or vLLM-Omni (`/v1/omni/sleep`).

They do the same as `POST /v1/sleep` and `/v1/wake`, but answer when it is over: with no content, or with each rank's acknowledgement.
An error of a rank is an HTTP error that names it.
"""

import asyncio
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from diffusion_worker.compatibility import sleep_blocker
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.state.state_document import OperationCall, OperationResult, PauseCall, SleepCall, SleepMode, WakeCall
from diffusion_worker.errors import ErrorCode, RequestError, refused
from diffusion_worker.messages import MemoryTag, SleepLevel, TaskAck
from diffusion_worker.server.schemas.control import ERRORS
from diffusion_worker.server.schemas.problems import error_answer

router = APIRouter()

LEVELS = {1: SleepLevel.HOST_MEMORY, 2: SleepLevel.DISCARD}
MODES = {"wait": SleepMode.WAIT, "abort": SleepMode.ABORT}
# Clients of vLLM use the tags of a language model. The tag of the KV cache stands for all memory but the weights.
TAGS: dict[str, tuple[MemoryTag, ...]] = {
    **{tag.value: (tag,) for tag in MemoryTag},
    "kv_cache": (MemoryTag.ADAPTERS, MemoryTag.CACHES),
}
# A worker is a single stage.
STAGE = 0
# Longest wait for a drain, the ranks, and a restart after a failure. Past it the operation goes on; its result is in `/v1/state`.
OVER_TIMEOUT_S = 900.0
NOT_IMPLEMENTED = 501
GIB = 1 << 30
NOTHING: dict[int | str, dict[str, Any]] = {200: {"description": "Done, after the sleep or wake has ended; no content."}, **ERRORS}


class SleepQuery(BaseModel):
    """Query of `POST /sleep`."""

    # Not strict: a query has only strings.
    model_config = ConfigDict(extra="forbid")

    level: Annotated[
        int,
        Field(
            ge=0,
            le=2,
            description="0 only pauses the steps. 1 keeps the weights in host memory for the wake, 2 reads the files again.",
        ),
    ] = 1
    mode: Annotated[Literal["abort", "wait"], Field(description="abort ends running requests before the sleep, wait lets them finish.")] = (
        "abort"
    )


class WakeQuery(BaseModel):
    """Query of `POST /wake_up`: the tags to wake, all if absent."""

    model_config = ConfigDict(extra="forbid")

    tags: Annotated[list[Literal["weights", "adapters", "caches", "kv_cache"]] | None, Field(max_length=8)] = None


class OmniBody(BaseModel):
    """Body of `POST /v1/omni/wakeup`: the stages to wake. A worker has a single one, 0."""

    model_config = ConfigDict(extra="forbid", strict=True)

    stage_ids: Annotated[
        list[int] | None,
        Field(min_length=1, max_length=64, description="Stages of the call; a worker has the stage 0 only. All if absent."),
    ] = None


class OmniSleepBody(OmniBody):
    """Body of `POST /v1/omni/sleep`."""

    level: Annotated[int, Field(ge=1, le=2, description="1 keeps the weights in host memory for the wake, 2 reads the files again.")] = 2


class AckAnswer(BaseModel):
    """A rank's acknowledgement: `freed_bytes` of a sleep, and in `metadata` its memory now."""

    task_id: str
    status: str
    stage_id: int
    rank: int
    freed_bytes: int
    metadata: dict[str, str | float]
    error_msg: str | None


class OmniAnswer(BaseModel):
    """Acknowledgements by all ranks. `status` is `SKIPPED` if a wake found no memory to restore."""

    status: Literal["SUCCESS", "SKIPPED"]
    acks: list[AckAnswer]


class SleepingAnswer(BaseModel):
    """Answer to `GET /is_sleeping`; true for a pause as well."""

    is_sleeping: bool


@router.post("/sleep", response_class=Response, responses=NOTHING)
async def sleep(query: Annotated[SleepQuery, Query()], request: Request) -> Response:
    """Put the model to sleep as vLLM does; the answer comes when the memory is freed. Level 0 only pauses."""
    engine: Engine = request.app.state.engine
    if (refusal := _cannot_sleep(engine, request)) is not None:
        return refusal
    if query.level == 0:
        await engine.pause(PauseCall(operation_id=uuid.uuid4().hex))
    else:
        await _slept(engine, LEVELS[query.level], MODES[query.mode])
    return Response()


@router.post("/wake_up", response_class=Response, responses=NOTHING)
async def wake_up(query: Annotated[WakeQuery, Query()], request: Request) -> Response:
    """Wake the model as vLLM does; the answer comes when it serves again, or when the tags are back. Ends a pause as well."""
    engine: Engine = request.app.state.engine
    if (refusal := _cannot_sleep(engine, request)) is not None:
        return refusal
    engine.resume(OperationCall(operation_id=uuid.uuid4().hex))
    await _woken(engine, None if query.tags is None else [tag for name in query.tags for tag in TAGS[name]])
    return Response()


@router.get("/is_sleeping", responses=ERRORS)
async def is_sleeping(request: Request) -> SleepingAnswer:
    """Return true while memory is freed, about to be, or being restored, and also during a pause."""
    engine: Engine = request.app.state.engine
    return SleepingAnswer(is_sleeping=engine.is_sleeping or engine.state_document().paused)


@router.post("/v1/omni/sleep", response_model=OmniAnswer, responses=ERRORS)
async def omni_sleep(body: OmniSleepBody, request: Request) -> OmniAnswer | Response:
    """Put the model to sleep as vLLM-Omni does, and return each rank's freed memory. Running requests may finish."""
    engine: Engine = request.app.state.engine
    _require_stage(body)
    if (refusal := _cannot_sleep(engine, request)) is not None:
        return refusal
    result = await _slept(engine, LEVELS[body.level], SleepMode.WAIT)
    return _answer(engine, result, skipped="SUCCESS")


@router.post("/v1/omni/wakeup", response_model=OmniAnswer, responses=ERRORS)
async def omni_wakeup(body: OmniBody, request: Request) -> OmniAnswer | Response:
    """Wake the model as vLLM-Omni does, and return each rank's acknowledgement once the model serves again."""
    engine: Engine = request.app.state.engine
    _require_stage(body)
    if (refusal := _cannot_sleep(engine, request)) is not None:
        return refusal
    result = await _woken(engine, None)
    return _answer(engine, result, skipped="SKIPPED")


async def _slept(engine: Engine, level: SleepLevel, mode: SleepMode) -> OperationResult | None:
    call = SleepCall(operation_id=uuid.uuid4().hex, level=level, mode=mode)
    engine.sleep(call)
    return await _over(engine, call.operation_id, "sleep")


async def _woken(engine: Engine, tags: list[MemoryTag] | None) -> OperationResult | None:
    call = WakeCall(operation_id=uuid.uuid4().hex, tags=tags)
    engine.wake(call)
    return await _over(engine, call.operation_id, "wake")


async def _over(engine: Engine, operation_id: str, kind: str) -> OperationResult | None:
    """Wait for an operation and return its result; None if there was nothing to do, or an operation of another kind ended it.

    Raises:
        RequestError: the operation's own error, or Timeout after `OVER_TIMEOUT_S`, while the operation goes on.
    """
    try:
        async with asyncio.timeout(OVER_TIMEOUT_S):
            result = await engine.operation_over(operation_id)
    except TimeoutError:
        raise RequestError(ErrorCode.TIMEOUT, f"{kind}: expected an end within {OVER_TIMEOUT_S:g} s; the operation goes on") from None
    if result is None or result.kind != kind:
        return None  # a wake during the drain cancelled the sleep, so nothing slept
    if result.error is not None:
        raise RequestError(ErrorCode(result.error.code), result.error.message)
    return result


def _answer(engine: Engine, result: OperationResult | None, *, skipped: Literal["SUCCESS", "SKIPPED"]) -> OmniAnswer:
    if result is None:
        return OmniAnswer(status=skipped, acks=[])
    acks = engine.last_acks
    return OmniAnswer(status="SUCCESS", acks=[_ack(ack, acks, slept=result.kind == "sleep") for ack in acks])


def _ack(ack: TaskAck, acks: list[TaskAck], *, slept: bool) -> AckAnswer:
    held = ack.resident_bytes / GIB
    metadata: dict[str, str | float] = {"source": "diffusion-worker"}
    if slept:
        metadata |= {"total_freed_gib": sum(each.freed_bytes for each in acks) / GIB, "rank_residual_gib": held}
    else:
        metadata |= {"state": "WARM", "current_vram_gib": held}
    return AckAnswer(
        task_id=ack.task_id,
        status=ack.status,
        stage_id=STAGE,
        rank=ack.rank,
        freed_bytes=ack.freed_bytes,
        metadata=metadata,
        error_msg=ack.error_msg,
    )


def _require_stage(body: OmniBody) -> None:
    unknown = [stage for stage in body.stage_ids or [] if stage != STAGE]
    if unknown:
        raise refused("stage_ids", f"only {STAGE}, the one stage of a worker", unknown[0])


def _cannot_sleep(engine: Engine, request: Request) -> Response | None:
    """Return an answer 501, as vLLM gives it, that names the option with which this worker cannot sleep; None if it can."""
    option = sleep_blocker(engine.config)
    if option is None:
        return None
    error = RequestError(ErrorCode.INVALID_REQUEST, f"sleep: not supported with {option}")
    return error_answer(error, request, status=NOT_IMPLEMENTED)
