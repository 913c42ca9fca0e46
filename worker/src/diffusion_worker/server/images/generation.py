# SPDX-License-Identifier: Apache-2.0
"""The path of an image request from its parameters to its answer, shared by all routes."""

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.server.encoding.chunked import PiecedResponse
from diffusion_worker.server.encoding.images import check_sides
from diffusion_worker.server.encoding.threads import EncodingThreads
from diffusion_worker.server.http.running_requests import ClientGone, run_cancellable
from diffusion_worker.server.images.streaming import EventStream
from diffusion_worker.server.schemas.answers import AnswerOptions, file_answer, image_file, image_json, json_answer
from diffusion_worker.server.schemas.problems import client_gone

__all__ = ["AnswerOptions", "answer_generation"]


async def answer_generation(request: Request, params: GenerationParams, options: AnswerOptions) -> Response:
    """Serve a request that has been read: return JSON with all images, the files themselves, or a stream that has yet to make them.

    The work is cancelled if the client disconnects or cancels its id meanwhile.

    Raises:
        RequestError, GroupFailed: see `Engine.generate`; RequestError (Cancelled, or InvalidRequest for a side that the format cannot
            have).
    """
    check_sides(options.output_format, params.height, params.width)
    if options.stream:
        return EventStream(request, params, options)
    try:
        return await run_cancellable(request, _answer(request, params, options))
    except ClientGone:
        return client_gone(request)


async def _answer(request: Request, params: GenerationParams, options: AnswerOptions) -> Response:
    engine: Engine = request.app.state.engine
    made = await engine.generate(params)
    request.app.state.metrics.observe_generation(made)
    encoding: EncodingThreads = request.app.state.encoding
    if options.as_file:
        files = await asyncio.gather(*(encoding.run(image_file, made, image, options) for image in made.images))
        return PiecedResponse(*await encoding.run(file_answer, files, options))
    images = await asyncio.gather(*(encoding.run(image_json, made, image, options) for image in made.images))
    return PiecedResponse(json_answer(made, images, options, created=int(time.time())), "application/json")
