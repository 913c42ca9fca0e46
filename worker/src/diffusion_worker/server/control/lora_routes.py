# SPDX-License-Identifier: Apache-2.0
"""vLLM's two routes for adapters, for its clients: the same loads as by `PUT` and `DELETE /v1/adapters/{name}`.

They answer a sentence instead of a record. If the operator's file lists the adapters, they are refused, because their changes would be
undone.
"""

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.state.state_document import AdapterCall
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.server.schemas.control import AdapterName
from diffusion_worker.sources.parsing import parse_source
from diffusion_worker.sources.source import Source

router = APIRouter()

DRAIN_S = 60.0
# Written by hand, as the framework would document every answer of these routes as text.
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Success, as a text that names the adapter.", "content": {"text/plain": {"schema": {"type": "string"}}}},
    "default": {
        "description": "Any error, with a code, a message, and whether a retry may succeed.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
    },
}


class LoadLoRABody(BaseModel):
    """Body of vLLM's load."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: AdapterName
    lora_path: Annotated[
        str,
        Field(
            min_length=1,
            max_length=4096,
            description="The adapter's source: a path on the worker, or an address such as hf://org/name@revision.",
        ),
    ]
    load_inplace: Annotated[
        bool,
        Field(description="True replaces the adapter that has the name, if any, and reads the source again; false refuses a name in use."),
    ] = False


class UnloadLoRABody(BaseModel):
    """Body of vLLM's unload."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: AdapterName
    lora_int_id: Annotated[
        int | None, Field(ge=1, le=2**63 - 1, description="Accepted for compatibility and ignored; the name selects the adapter.")
    ] = None


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=ANSWERS)
async def load_lora_adapter(body: LoadLoRABody, request: Request) -> str:
    """Load an adapter under a new name, or with `load_inplace` also under a name in use, whose adapter it replaces."""
    engine = _own_engine(request)
    if not body.load_inplace and engine.adapter_source(body.lora_name) is not None:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"lora_name: expected a new name, or also 'load_inplace': true, found {body.lora_name!r}, which an adapter has",
            details={"field": "lora_name"},
        )
    source = _source(body.lora_path)
    call = AdapterCall(
        operation_id=uuid.uuid4().hex,
        source=source,
        deadline_seconds=engine.config.lora_load_timeout_s,
        public_only=not request.app.state.has_token,
        read_again=body.load_inplace,
    )
    await engine.put_adapter(body.lora_name, call)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=ANSWERS)
async def unload_lora_adapter(body: UnloadLoRABody, request: Request) -> str:
    """Remove an adapter. Requests that name it are refused at once, while those in progress have a minute to finish."""
    engine = _own_engine(request)
    await engine.delete_adapter(body.lora_name, operation_id=uuid.uuid4().hex, boot_id=None, drain_s=DRAIN_S)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _source(path: str) -> Source:
    try:
        return parse_source(path)
    except ConfigError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"lora_path: {error}", details={"field": "lora_path"}) from None


def _own_engine(request: Request) -> Engine:
    """Return the engine, if calls may change its adapters; raise RequestError (Managed) if the operator manages them."""
    engine: Engine = request.app.state.engine
    if engine.config.desired_path is not None:
        message = (
            "adapters: expected LoRAAdapter objects in the cluster instead of this call, as the operator manages this worker's adapters"
        )
        raise RequestError(ErrorCode.MANAGED, message)
    return engine
