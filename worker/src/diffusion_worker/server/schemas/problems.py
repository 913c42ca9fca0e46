# SPDX-License-Identifier: Apache-2.0
"""Every error as a body in the one form of its port.

The data port answers as OpenAI does: `{"error": {message, type, param, code, …}}`, with a status that is right by itself. Clients
repeat 408, 409, 429 and every 5xx (OpenAI's SDKs unless `x-should-retry` forbids it, Vercel's by the status alone).
So no error that cannot succeed later has one of these. The control port's body is flat:
`{code, message, retryable, retryAfterSeconds, details}`.

Messages name the field, what was expected and what was found. Prompts are never repeated, other values shortened.
"""

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.server.schemas.control import ADAPTER_NAME_PATTERN, COMPONENT_PATTERN, REVISION_PATTERN
from diffusion_worker.server.schemas.images import OURS, REFUSED, SIZE_PATTERN, ErrorType
from diffusion_worker.server.schemas.sources import SOURCE_FORMS

# Fields of a user's private text, which goes into no message and no log.
PRIVATE_FIELDS = frozenset({"prompt", "negative_prompt"})
SHOWN_CHARS = 80
# nginx's status for a client that went away; nobody receives it.
CLIENT_CLOSED_REQUEST = 499
REQUEST_ID, REPLICA = "X-Request-ID", "X-Replica"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Codes of the framework's errors and of a body's arrival; all others are InvalidRequest.
HTTP_CODES: dict[int, ErrorCode] = {HTTPStatus.NOT_FOUND: ErrorCode.NOT_FOUND, HTTPStatus.REQUEST_TIMEOUT: ErrorCode.TIMEOUT}
# Hints for routes of OpenAI's images API that do not exist here.
INSTEAD = {"/v1/images/variations": "; POST /v1/images/edits without a mask makes variations, by its strength and seed"}
# Patterns in words for users.
FORMS = {
    SIZE_PATTERN: "WIDTHxHEIGHT in pixels or 'auto'",
    ADAPTER_NAME_PATTERN: "a name of a-z, 0-9, '.', '_' and '-', first and last a letter or digit",
    COMPONENT_PATTERN: "a component's name in the model's folder, such as transformer or text_encoder",
    REVISION_PATTERN: "a revision of the state, as bootId.n",
    **SOURCE_FORMS,
}


def install_error_answers(app: FastAPI, *, flat: bool) -> None:
    """Answer every error of routes and of routing in the port's one form: `flat`, or as OpenAI does."""
    app.state.flat_errors = flat
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(GroupFailed, _group_failed)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


def error_answer(error: RequestError, request: Request, *, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer to an error in the form of the request's port, and keep its code for log and metrics."""
    request.state.error_code = error.code
    sent = dict(headers or {})
    if error.retryable and error.retry_after_s is not None:
        sent["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    status = status or error.status
    if request.app.state.flat_errors:
        return JSONResponse(flat_body(error), status, sent)
    status = settled_status(status, retryable=error.retryable)
    sent["x-should-retry"] = "true" if error.retryable else "false"
    # An unexpected error is answered outside of the middleware that adds these headers.
    sent[REQUEST_ID], sent[REPLICA] = getattr(request.state, "request_id", ""), request.app.state.replica
    return JSONResponse(error_envelope(error, status), status, sent)


def settled_status(status: int, *, retryable: bool) -> int:
    """Return the status of the data port's answer: 422 instead of a status on which clients would retry in vain."""
    repeated = status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500
    return HTTPStatus.UNPROCESSABLE_ENTITY if repeated and not retryable else status


def client_gone(request: Request) -> Response:
    """Build a response that nobody receives; mark the request for log and metrics as left by its client."""
    request.state.error_code = "ClientGone"
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def flat_body(error: RequestError) -> dict[str, object]:
    """Return the control port's `ErrorBody` of an error."""
    return {
        "code": error.code,
        "message": error.message,
        "retryable": error.retryable,
        "retryAfterSeconds": error.retry_after_s if error.retryable else None,
        "details": error.details,
    }


def error_envelope(error: RequestError, status: int) -> dict[str, object]:
    """Build the JSON body of the data port's errors. The `status` decides on OpenAI's type; `details["field"]` moves to `param`."""
    content = {
        "message": error.message,
        "type": _openai_type(status),
        "param": error.details.get("field"),
        "code": error.code,
        "retryable": error.retryable,
        "retry_after_seconds": error.retry_after_s if error.retryable else None,
        "details": {name: value for name, value in error.details.items() if name != "field"},
    }
    return {"error": content}


def _openai_type(status: int) -> ErrorType:
    """Return OpenAI's error type for a status, as in its guide to error codes."""
    if status >= 500:
        return "server_error"
    types: dict[int, ErrorType] = {HTTPStatus.UNAUTHORIZED: "authentication_error", HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}
    return types.get(status, "invalid_request_error")


def lost_ranks(error: GroupFailed) -> RequestError:
    """Build the client's error for ranks that were lost for good."""
    return RequestError(ErrorCode.ENGINE_FAILED, f"the worker lost its ranks for good, and its process ends: {error}")


def unexpected_error(error: Exception) -> RequestError:
    """Build the client's error: the exception's type only."""
    return RequestError(ErrorCode.ENGINE_FAILED, f"unexpected error in the worker: {type(error).__name__}")


def describe_validation(problem: Mapping[str, Any]) -> tuple[str, str]:
    """Translate a pydantic error to a field, such as `lora[1].scale`, and a message in our form.

    The message has the expected and the found value, but of a prompt only its length.
    """
    field = _field_name(problem["loc"])
    kind = problem["type"]
    if kind == "json_invalid":
        position, reason = problem["loc"][-1], problem["ctx"]["error"]
        return "body", f"the body: expected JSON, found an error at character {position}: {reason}"
    if kind in ("extra_forbidden", "none_required"):
        if field in REFUSED:
            return field, f"{field}: not supported: {REFUSED[field]}"
        return field, f"{field}: unknown field" + (f"; use {OURS[field]}" if field in OURS else "")
    if kind == "missing":
        return field, f"{field}: required, found nothing" if field != "body" else "the body: expected a JSON object, found nothing"
    if kind == "model_attributes_type":
        return field, f"{'the body' if field == 'body' else field}: expected a JSON object, sent as application/json"
    if kind == "one_source":
        return field, f"{field}: {problem['msg']}"
    why = f"; {REFUSED[field]}" if kind == "literal_error" and field in REFUSED else ""
    return field, f"{field}: {_expected(problem)}; found {_shown(field, problem.get('input'))}{why}"


def _field_name(location: Sequence[str | int]) -> str:
    """Return `("body", "lora", 1, "scale")` as `lora[1].scale`; a long key of a client is shortened."""
    if len(location) == 1:
        return str(location[0])
    return shortened("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:]).removeprefix("."))


def _expected(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "string_pattern_mismatch":
        pattern = problem["ctx"]["pattern"]
        return f"expected {FORMS.get(pattern, f'a text of the form {pattern}')}"
    message = str(problem["msg"])
    return message.replace("Input should be", "expected", 1).replace("String should have", "expected", 1)


def _shown(field: str, value: object) -> str:
    if isinstance(value, str):
        length = len(value)
        return f"a text of {length} characters" if field in PRIVATE_FIELDS else shortened(repr(value))
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and (bits := value.bit_length()) > 200:
        return f"an integer of {bits} bits"
    return shortened(str(value))


def shortened(text: str) -> str:
    """Shorten a client's text to the length that a message can show."""
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)  # starlette's handlers are typed for any exception
    return error_answer(error, request)


async def _group_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, GroupFailed)
    return error_answer(lost_ranks(error), request)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [describe_validation(problem) for problem in error.errors()[:5]]
    message = "; ".join(message for _, message in found)
    return error_answer(RequestError(ErrorCode.INVALID_REQUEST, message, details={"field": found[0][0]}), request)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == CLIENT_CLOSED_REQUEST:
        return client_gone(request)
    code = HTTP_CODES.get(error.status_code, ErrorCode.INVALID_REQUEST)
    method, path = request.method, shortened(request.url.path)
    route, hint = f"{method} {path}", INSTEAD.get(request.url.path, "")
    messages: dict[int, str] = {
        HTTPStatus.BAD_REQUEST: "the body: expected JSON, found a body that cannot be parsed",
        HTTPStatus.NOT_FOUND: f"{route}: there is no such route{hint}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{route}: the route does not support this method",
    }
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_allowed_methods(request))
    problem = RequestError(code, messages.get(error.status_code, error.detail))
    return error_answer(problem, request, status=error.status_code, headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    """Find every method that some route has for the path, for the header `Allow`; the framework's own stops at the first route."""
    routes = request.app.routes
    found = [name for name in METHODS if any(route.matches({**request.scope, "method": name})[0] is Match.FULL for route in routes)]
    return [*found, "HEAD"] if "GET" in found and "HEAD" not in found else found


async def _unexpected(request: Request, error: Exception) -> Response:
    """Answer for an unexpected error in our code; the server logs the error that it re-raises."""
    return error_answer(unexpected_error(error), request)
