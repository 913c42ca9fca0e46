# SPDX-License-Identifier: Apache-2.0
"""The page at `/` of the data port: three files that a browser needs nothing else for, and the state they show.

The files need no key, as they hold no data; `/v1/status` is part of the API, and requires the API key if there is one.
"""

import hashlib
from importlib import resources
from typing import NamedTuple

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.state.state_document import EngineState, LoadStage, RankState, SleepPolicy, StateDocument
from diffusion_worker.errors import ErrorCode

# No content from elsewhere, no inline code, no frames around the page; images are made from answers.
POLICY = "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The browser asks each time, and gets the file again only from a worker with another version of it.
    "Cache-Control": "no-cache",
}


class PageFile(NamedTuple):
    """A static file, held in memory from the start, with its media type and an ETag derived from its SHA-256."""

    content: bytes
    media_type: str
    etag: str


class RankStatus(BaseModel):
    """A rank process."""

    rank: int
    state: RankState


class Status(BaseModel):
    """The worker's state for people. `percent` is the loaded part of the model, null while no model loads.

    `generation` counts the lives of the rank group, `problem` is the code of the fault that keeps it from serving. `queued` images wait
    for a place on the ranks, `held` requests until the model serves; with the policy OnIdle they wake it.
    """

    model: str
    state: EngineState
    asleep: bool
    stage: LoadStage
    percent: int | None
    generation: int
    in_flight: int
    queued: int
    held: int
    paused: bool
    policy: SleepPolicy
    ranks: list[RankStatus]
    problem: ErrorCode | None


def page_router() -> APIRouter:
    """Read the page, its style sheet and its script, and route GET to them, outside of the OpenAPI document.

    A browser with the current version gets 304.
    """
    router = APIRouter(include_in_schema=False)
    for path, name, media_type in (
        ("/", "page.html", "text/html"),
        ("/page.css", "page.css", "text/css"),
        ("/page.js", "page.js", "text/javascript"),
    ):
        _add_file(router, path, _read(name, media_type))
    return router


status_router = APIRouter()


@status_router.get("/v1/status")
async def status(request: Request) -> Status:
    """Return the worker's state for the page; the route exists only with the page."""
    engine: Engine = request.app.state.engine
    return status_of(engine.state_document())


def status_of(document: StateDocument) -> Status:
    """Return the state document's part for users: without paths, processes, messages and memory, which are for the operator."""
    loading = document.state in (EngineState.STARTING, EngineState.RESTARTING)
    done, total = document.load.bytes_done, document.load.bytes_total
    return Status(
        model=document.model.served_name,
        state=document.state,
        asleep=document.state is EngineState.ASLEEP,
        stage=document.load.stage,
        percent=(min(100, 100 * done // total) if total else 0) if loading else None,
        generation=document.generation,
        in_flight=document.in_flight,
        queued=document.queued,
        held=document.held.current,
        paused=document.paused,
        policy=document.policy,
        ranks=[RankStatus(rank=rank.rank, state=rank.state) for rank in document.ranks],
        problem=ErrorCode(document.failure.code) if document.failure else None,
    )


def _read(name: str, media_type: str) -> PageFile:
    content = resources.files("diffusion_worker.server").joinpath("page", name).read_bytes()
    return PageFile(content, f"{media_type}; charset=utf-8", f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _add_file(router: APIRouter, path: str, file: PageFile) -> None:
    async def answer(request: Request) -> Response:
        headers = {**HEADERS, "ETag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "Content-Type": file.media_type})

    router.add_api_route(path, answer, response_model=None)
