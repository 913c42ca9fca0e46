# SPDX-License-Identifier: Apache-2.0
"""Routes of the data port's API: generated images, cancelled requests, and models, as the OpenAI SDK uses them."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.http.replica import replica_of
from diffusion_worker.server.http.running_requests import RunningRequests, owner_of
from diffusion_worker.server.images.generation import answer_generation
from diffusion_worker.server.images.model_cards import ModelCard, ModelList, model_card, model_cards
from diffusion_worker.server.schemas.images import ERRORS, IMAGE_ANSWERS, ImagesRequest
from diffusion_worker.server.schemas.lora import require_own_paths

router = APIRouter()


@router.post("/v1/images/generations", response_model=None, responses=IMAGE_ANSWERS | ERRORS)
async def generate_images(body: ImagesRequest, request: Request) -> Response:
    """Make `n` images of one prompt. Their seeds follow each other and are in the answer."""
    require_own_paths(request.app.state.engine, body.adapters())
    return await answer_generation(request, body.params(), body.options())


@router.delete("/v1/requests/{request_id}", status_code=204, responses=ERRORS)
async def cancel_request(request_id: str, request: Request) -> None:
    """Cancel a running request by its `X-Request-ID`, chosen by client or server. The place is free at the next step.

    The call needs the same `Authorization`. Only the replica that drew an id can cancel it; the error names that replica.
    """
    running: RunningRequests = request.app.state.running
    if running.cancel(owner_of(request), request_id):
        return
    own: str = request.app.state.replica
    if (replica := replica_of(request_id)) not in (None, own):
        message = f"requests: expected an id of this replica, {own}, found one of {replica}, which alone can cancel it"
        raise RequestError(ErrorCode.NOT_FOUND, message, details={"replica": replica})
    raise RequestError(ErrorCode.NOT_FOUND, "requests: no running request with the same Authorization has this id")


@router.get("/v1/models", response_model_exclude_none=True)
async def list_models(request: Request) -> ModelList:
    """Return the base model, then the adapters that a request may name now; answered in every state."""
    return ModelList(data=model_cards(request.app.state.engine, created=request.app.state.started_at))


@router.get("/v1/models/{model:path}", response_model_exclude_none=True, responses=ERRORS)
async def retrieve_model(model: str, request: Request) -> ModelCard:
    """Return a model's card. A model that cannot be served gets the same error as a request for it."""
    return model_card(request.app.state.engine, model, created=request.app.state.started_at)
