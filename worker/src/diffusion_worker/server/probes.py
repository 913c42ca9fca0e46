# SPDX-License-Identifier: Apache-2.0
"""Routes of the data port that need no key: probes and metrics for a cluster."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.state.state_document import EngineState
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.schemas.images import ERRORS

router = APIRouter()
READY_RETRY_S = 1.0


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer 200 while the process lives and its event loop runs."""
    return {"status": "ok"}


@router.get("/health", responses=ERRORS)  # vLLM's name
@router.get("/readyz", responses=ERRORS)
async def readyz(request: Request) -> dict[str, str]:
    """Answer 200 from the end of the first load until termination or failure, also while asleep; otherwise an error."""
    engine: Engine = request.app.state.engine
    ending = engine.state in (EngineState.TERMINATING, EngineState.FAILED)
    if engine.loaded and not ending:
        return {"status": "ready"}
    code = ErrorCode.TERMINATING if ending else ErrorCode.STARTING
    raise RequestError(code, f"the worker is {engine.state}", retry_after_s=READY_RETRY_S)


@router.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    content, media_type = await request.app.state.metrics.exposition()
    return Response(content, headers={"Content-Type": media_type})
