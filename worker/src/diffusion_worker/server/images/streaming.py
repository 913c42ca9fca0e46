# SPDX-License-Identifier: Apache-2.0
"""A request for images whose answer is a stream of server-sent events: previews, the finished images, and each step if requested.

An error before the stream begins is answered without a stream, with its status. A later one is an event `error`, which makes the SDK
raise. While there are no events, as in the queue, a comment keeps proxies from closing the stream.
"""

import asyncio
import logging
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.engine.state.request_events import Held, RequestEvent, StepTaken
from diffusion_worker.errors import GroupFailed, RequestError
from diffusion_worker.server.encoding.chunked import Pieces, send_piece
from diffusion_worker.server.encoding.threads import EncodingThreads
from diffusion_worker.server.http.running_requests import ClientGone, run_cancellable
from diffusion_worker.server.schemas.answers import AnswerOptions, completed_event, held_event, preview_event, progress_event, server_sent
from diffusion_worker.server.schemas.problems import client_gone, error_envelope, lost_ranks, settled_status, unexpected_error

# A refusal comes at once. After this time the stream begins, so that a queued client sees that the request was accepted.
FIRST_WORD_S = 1.0
# Proxies close a connection on which nothing was sent for half a minute or more.
KEEP_ALIVE_S = 10.0
# A client that reads nothing for so long is gone.
SEND_TIMEOUT_S = 60.0
KEEP_ALIVE = [b": keep-alive\n\n"]

log = logging.getLogger(__name__)


class EventStream(Response):
    """A response that runs the request only when the server sends it, and writes each event as it happens."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, params: GenerationParams, options: AnswerOptions) -> None:
        # Keeps proxies from buffering events.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._params = params
        self._options = options
        self._engine: Engine = request.app.state.engine
        self._encoding: EncodingThreads = request.app.state.encoding
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and send its events. An error after the first of them is sent as the last event, and is not raised.

        Raises:
            RequestError, GroupFailed: see `Engine.generate`, while nothing was sent yet.
        """
        try:
            await run_cancellable(self._request, self._run(send))
        except ClientGone:
            client_gone(self._request)
        except (RequestError, GroupFailed) as error:
            if not self._begun:
                raise
            await self._fail(send, error if isinstance(error, RequestError) else lost_ranks(error))
        except Exception as error:
            if not self._begun:
                raise
            log.exception("unexpected error in a streamed answer")
            await self._fail(send, unexpected_error(error))

    async def _run(self, send: Send) -> None:
        """Make the images; send each event as it comes, then one for each finished image, and end the body. Raise any error."""
        events: asyncio.Queue[RequestEvent | None] = asyncio.Queue()
        work = asyncio.create_task(self._engine.generate(self._params, on_event=events.put_nowait))
        work.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while not (work.done() and events.empty()):
                await self._send_next(send, events)
            made = await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        self._request.app.state.metrics.observe_generation(made)
        for index in range(len(made.images)):
            await self._send(send, await self._encoding.run(completed_event, made, index, self._options, created=int(time.time())))
        await self._send(send, [], more=False)

    async def _send_next(self, send: Send, events: asyncio.Queue[RequestEvent | None]) -> None:
        """Send the next event, or a comment if there is none within `KEEP_ALIVE_S`, or within `FIRST_WORD_S` before the stream has begun.

        None in the queue marks the end of the events, and sends nothing.
        """
        try:
            async with asyncio.timeout(KEEP_ALIVE_S if self._begun else FIRST_WORD_S):
                event = await events.get()
        except TimeoutError:
            await self._send(send, KEEP_ALIVE)
            return
        if event is not None:
            await self._send(send, await self._encoded(event))

    async def _encoded(self, event: RequestEvent) -> Pieces:
        """Return an event's bytes; a comment in place of our own events, unless the client asked for them."""
        if not self._options.progress and isinstance(event, StepTaken | Held):
            return KEEP_ALIVE
        if isinstance(event, StepTaken):
            return progress_event(event, self._options)
        if isinstance(event, Held):
            return held_event(event, self._options)
        accelerated = self._engine.accelerates(self._params)
        created = int(time.time())
        return await self._encoding.run(preview_event, event, self._options, accelerated=accelerated, created=created)

    async def _fail(self, send: Send, error: RequestError) -> None:
        """Send an error as the last event of a stream, in the form on which the SDK raises, and note its code for the log.

        A client that is gone is ignored.
        """
        self._request.state.error_code = error.code
        try:
            status = settled_status(error.status, retryable=error.retryable)
            await self._send(send, server_sent("error", error_envelope(error, status)), more=False)
        except ClientGone:
            log.debug("nobody reads the error of this stream any more")

    async def _send(self, send: Send, content: Pieces, *, more: bool = True) -> None:
        """Send all pieces, after the head if this is the first call; without `more`, end the body.

        Raises:
            ClientGone: the client read nothing for `SEND_TIMEOUT_S`, or its connection failed.
        """
        try:
            if not self._begun:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._begun = True
            for piece in content:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send_piece(send, piece)
            if not more:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            raise ClientGone from None
