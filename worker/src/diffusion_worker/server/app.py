# SPDX-License-Identifier: Apache-2.0
"""The two applications, data and control, over one engine."""

import time
from collections.abc import Callable
from pathlib import Path

from fastapi import Depends, FastAPI, params
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware

from diffusion_worker.engine.engine import Engine
from diffusion_worker.server import probes
from diffusion_worker.server.control import lora_routes, sleep_routes
from diffusion_worker.server.control import routes as control
from diffusion_worker.server.control.operator_epoch import admit_epoch
from diffusion_worker.server.encoding.decoders import Decoders
from diffusion_worker.server.encoding.threads import EncodingThreads
from diffusion_worker.server.http.bearer_token import RequireToken, TokenFile
from diffusion_worker.server.http.body_limit import BodyLimit
from diffusion_worker.server.http.connection_limit import ConnectionCollector, ConnectionLimit
from diffusion_worker.server.http.head_and_slash import HeadAndSlash
from diffusion_worker.server.http.origin import OwnOrigin
from diffusion_worker.server.http.replica import replica_name
from diffusion_worker.server.http.request_log import RequestLog
from diffusion_worker.server.http.running_requests import RunningRequests
from diffusion_worker.server.images import edits
from diffusion_worker.server.images import routes as images
from diffusion_worker.server.metrics.page import Metrics
from diffusion_worker.server.schemas.problems import install_error_answers
from diffusion_worker.server.ui import page_router, status_router

# Most bytes of a body: a prompt is a few kilobytes, and only edits bring images.
MAX_BODY_BYTES = 1_048_576
LARGER_BODIES = {"/v1/images/edits": 67_108_864}
# The tokens' names in errors.
API_KEY = "the API key"
CONTROL_TOKEN = "the control token"
# Methods that a page of an allowed origin may use, and headers of answers that it may read.
METHODS_OF_PAGES = ("GET", "POST", "DELETE")
READ_BY_PAGES = ("X-Request-ID", "X-Replica", "Retry-After", "X-Should-Retry")


def data_app(engine: Engine, *, local: bool = False) -> FastAPI:
    """Build the application of the data port: image routes, models, probes and metrics, and the page if it is enabled.

    With an API key, every path under `/v1/` needs it. Without one, a `local` app (on loopback) refuses any `Host` that is neither loopback
    nor an allowed origin's.

    Raises:
        ConfigError: the file of the API key is missing or empty.
    """
    app = _app(engine, title="diffusion-worker", flat_errors=False)
    app.state.encoding = EncodingThreads()
    app.state.decoders = Decoders()
    app.state.started_at = int(time.time())
    app.state.running = RunningRequests()
    app.state.replica = replica_name()
    app.state.connections = ConnectionLimit(app, engine.config.max_connections)
    app.state.metrics = Metrics(engine, app.state.encoding, app.state.decoders)
    app.state.metrics.registry.register(ConnectionCollector(app.state.connections))
    secured, key_path, origins = [], engine.config.api_key_path, engine.config.cors_origins
    if key_path is not None:
        secured = _require(app, TokenFile(Path(key_path), "--api-key-file"), API_KEY, _is_api)
    app.add_middleware(OwnOrigin, allowed=origins, local=local and key_path is None)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=METHODS_OF_PAGES, allow_headers=["*"], expose_headers=READ_BY_PAGES
        )
    app.add_middleware(RequestLog, metrics=app.state.metrics, replica=app.state.replica)
    app.add_middleware(HeadAndSlash)
    app.include_router(images.router, dependencies=secured)
    app.include_router(edits.router, dependencies=secured)
    app.include_router(probes.router)
    if engine.config.ui:
        app.include_router(page_router())
        app.include_router(status_router, dependencies=secured)
    return app


def control_app(engine: Engine, token_path: Path | None) -> FastAPI:
    """Build the application of the control port: state, operations, adapters, and vLLM's routes.

    With a token file all paths need the token but the API's description. Without one, only a loopback listener is safe.

    Raises:
        ConfigError: the token file is missing or empty.
    """
    app = _app(engine, title="diffusion-worker control API", flat_errors=True)
    secured = []
    if token_path is not None:
        token_file = TokenFile(token_path, "--control-token-file", pod_uid=engine.pod_uid)
        # The API's description is no secret.
        secured = _require(app, token_file, CONTROL_TOKEN, lambda path: path != "/openapi.json")
    app.add_middleware(OwnOrigin, local=token_path is None)
    app.add_middleware(HeadAndSlash)
    app.state.has_token = token_path is not None
    for router in (control.router, lora_routes.router, sleep_routes.router):
        app.include_router(router, dependencies=[*secured, Depends(admit_epoch)])
    return app


def _require(app: FastAPI, token_file: TokenFile, credential: str, guards: Callable[[str], bool]) -> list[params.Depends]:
    """Add a middleware that requires the token for each path of which `guards` returns True; `credential` is its name in errors.

    The returned dependencies check nothing, but put the token into the OpenAPI document. Raise ConfigError if there is no token.
    """
    token_file.require()
    app.add_middleware(RequireToken, token_file=token_file, credential=credential, guards=guards)
    return [Depends(HTTPBearer(auto_error=False))]


def _is_api(path: str) -> bool:
    """Return whether a path is of the API. A cluster has no key for probes and metrics, and the page asks for the key itself."""
    return path.startswith("/v1/")


def _app(engine: Engine, *, title: str, flat_errors: bool) -> FastAPI:
    app = FastAPI(
        title=title,
        # The interactive pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        # A redirect behind a proxy with TLS would name http://, and take the key along.
        redirect_slashes=False,
        # A single registry of metrics is enough; spans of every request cost time, and validation logs would hold prompts.
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False},
    )
    app.state.engine = engine
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, larger=LARGER_BODIES)
    install_error_answers(app, flat=flat_errors)
    return app
