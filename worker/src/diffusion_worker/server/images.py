# SPDX-License-Identifier: Apache-2.0
"""Routes of the data port: pictures as the OpenAI SDK asks for them, models, probes, metrics."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from diffusion_worker.engine.documents import AdapterDocument, EngineState
from diffusion_worker.engine.engine import Engine
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.generation import answer_generation
from diffusion_worker.server.image_schemas import ImagesAnswer, ImagesRequest
from diffusion_worker.server.running_requests import RunningRequests
from diffusion_worker.server.schemas import ERRORS, ModelCard, ModelList

router = APIRouter()
READY_RETRY_S = 1.0


@router.post("/v1/images/generations", response_model=None, responses={200: {"model": ImagesAnswer}, **ERRORS})
async def generate_images(body: ImagesRequest, request: Request) -> Response:
    """Make `n` pictures of one prompt. Their seeds follow each other and are in the answer."""
    return await answer_generation(request, body.params(), body.options())


@router.delete("/v1/requests/{request_id}", status_code=204, responses=ERRORS)
async def cancel_request(request_id: str, request: Request) -> None:
    """Cancel the request that was sent with, or answered by, this `X-Request-ID`. Its place is free at the next step."""
    running: RunningRequests = request.app.state.running
    if not running.cancel(request_id):
        raise RequestError(ErrorCode.NOT_FOUND, "requests: nothing runs under this id")


@router.get("/v1/models", response_model_exclude_none=True)
async def list_models(request: Request) -> ModelList:
    """The base model first, then the adapters that are loaded."""
    served = request.app.state.engine.served_models()
    return ModelList(data=[_card(name, adapter, served[0][0], request.app.state.started_at) for name, adapter in served])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process lives and its event loop turns."""
    return {"status": "ok"}


@router.get("/readyz", responses=ERRORS)
async def readyz(request: Request) -> dict[str, str]:
    """200 from the end of the first load until the drain for termination, also asleep."""
    engine: Engine = request.app.state.engine
    ending = engine.state in (EngineState.TERMINATING, EngineState.FAILED)
    if engine.loaded and not ending:
        return {"status": "ready"}
    code = ErrorCode.TERMINATING if ending else ErrorCode.STARTING
    raise RequestError(code, f"the worker is {engine.state}", retry_after_s=READY_RETRY_S)


@router.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    content, media_type = request.app.state.metrics.exposition()
    return Response(content, headers={"Content-Type": media_type})


def _card(name: str, adapter: AdapterDocument | None, base: str, created: int) -> ModelCard:
    if adapter is None:
        return ModelCard(id=name, created=created)
    return ModelCard(id=name, created=created, parent=base, digest=adapter.digest)
