# SPDX-License-Identifier: Apache-2.0
"""Routes of the control port. Long operations are started here and observed in `/v1/state`."""

from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from diffusion_worker.engine.engine import Engine
from diffusion_worker.errors import refused
from diffusion_worker.server.http.running_requests import ClientGone, unless_gone
from diffusion_worker.server.schemas.control import (
    ERRORS,
    AdapterBody,
    AdapterName,
    AdapterRemoval,
    DrainBody,
    FingerprintAnswer,
    OperationAnswer,
    PauseAnswer,
    PauseBody,
    ProbeAnswer,
    ProbeBody,
    ProfileAnswer,
    ProfileBody,
    RemovedAdapter,
    ResumeBody,
    SleepBody,
    StateQuery,
    WakeBody,
)
from diffusion_worker.server.schemas.problems import client_gone

router = APIRouter()

OPERATION: dict[int | str, dict[str, Any]] = {200: {"model": OperationAnswer}, 202: {"model": OperationAnswer}, **ERRORS}


@router.get("/v1/state", response_model=None, responses=ERRORS)
async def state(query: Annotated[StateQuery, Query()], request: Request) -> Response:
    """Return the whole state of this worker; cheap, and answered in every state.

    With `after`, the answer comes as soon as the revision differs, or after `wait` seconds.
    """
    engine = _engine(request)
    if query.after is None:
        if query.wait:
            raise refused("after", "a revision of the state, because wait is given", "nothing")
        return _encoded(engine.state_document())
    try:
        return _encoded(await unless_gone(request, engine.state_after(query.after, query.wait)))
    except ClientGone:
        return client_gone(request)


@router.post("/v1/sleep", response_model=None, responses=OPERATION)
async def sleep(body: SleepBody, request: Request) -> Response:
    """Start to sleep: 202, also for a running sleep; 200 if the operation is over or there is nothing to do."""
    return _operation(_engine(request), body.operation_id, running=_engine(request).sleep(body.call()))


@router.post("/v1/wake", response_model=None, responses=OPERATION)
async def wake(body: WakeBody, request: Request) -> Response:
    """Wake the model, or cancel a sleep that still drains. Status 202 means that this continues, 200 that it is over or not needed."""
    return _operation(_engine(request), body.operation_id, running=_engine(request).wake(body.call()))


@router.post("/v1/drain", status_code=HTTPStatus.ACCEPTED, responses=ERRORS)
async def drain(body: DrainBody, request: Request) -> OperationAnswer:
    """Accept no request any more, before the process ends: 202. Held requests are refused, running ones finish."""
    _engine(request).drain(body.call())
    return OperationAnswer(operationId=body.operation_id, state=_engine(request).state)


@router.post("/v1/pause", responses=ERRORS)
async def pause(body: PauseBody, request: Request) -> PauseAnswer:
    """Make no more steps; the answer comes when running steps are over on the ranks. Requests are queued meanwhile."""
    await _engine(request).pause(body.call())
    return _paused(_engine(request), body.operation_id)


@router.post("/v1/resume", responses=ERRORS)
async def resume(body: ResumeBody, request: Request) -> PauseAnswer:
    """Make steps again."""
    _engine(request).resume(body.call())
    return _paused(_engine(request), body.operation_id)


@router.post("/v1/probe", responses=ERRORS)
async def probe(body: ProbeBody, request: Request) -> ProbeAnswer:
    """Return the checksums of every rank's contents and of its result for a fixed seed, which a wake compares."""
    fingerprints = await _engine(request).probe(body.call())
    ranks = [
        FingerprintAnswer(rank=rank, weights=each.weights, adapters=sorted(each.adapters.values()), probe=each.probe)
        for rank, each in enumerate(fingerprints)
    ]
    return ProbeAnswer(operationId=body.operation_id, ranks=ranks)


@router.put("/v1/adapters/{name}", response_model=None, responses=ERRORS)
async def put_adapter(name: AdapterName, body: AdapterBody, request: Request) -> Response:
    """Load an adapter on all ranks, or change the scale of a loaded one. The answer is its record, as in `/v1/state`.

    While the model sleeps, the load is Deferred. An OnDemand adapter is loaded by its first request instead.
    """
    call = msgspec.structs.replace(body.call(), public_only=not request.app.state.has_token)
    return _encoded(await _engine(request).put_adapter(name, call))


@router.delete("/v1/adapters/{name}", responses=ERRORS)
async def delete_adapter(name: AdapterName, query: Annotated[AdapterRemoval, Query()], request: Request) -> RemovedAdapter:
    """Remove an adapter. Requests that name it are refused at once, while those in progress have `drainSeconds` to finish."""
    await _engine(request).delete_adapter(name, operation_id=query.operation_id, boot_id=query.boot_id, drain_s=query.drain_seconds)
    return RemovedAdapter(name=name)


@router.post("/v1/profile", response_model=None, responses={200: {"model": ProfileAnswer}, **ERRORS})
async def profile(body: ProfileBody, request: Request) -> Response:
    """Begin or end a trace on every rank. Without `--profile-dir` no trace is taken, and `running` is false."""
    return _encoded(await _engine(request).profile(body.call()))


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _encoded(document: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _paused(engine: Engine, operation_id: str) -> PauseAnswer:
    return PauseAnswer(operationId=operation_id, paused=engine.state_document().paused)


def _operation(engine: Engine, operation_id: str, *, running: bool) -> Response:
    answer = OperationAnswer(operationId=operation_id, state=engine.state)
    return JSONResponse(answer.model_dump(), HTTPStatus.ACCEPTED if running else HTTPStatus.OK)
