# SPDX-License-Identifier: Apache-2.0
"""A full worker: connections over the limit, and requests over the limit of the queue."""

import asyncio

import httpx2
import uvicorn

from diffusion_worker.config import QueueLimits
from diffusion_worker.server.http.connection import BoundedConnection
from support.worker.server_edge import DEADLINE_S, code, serving_edge

MANY_REQUESTS = 429


async def test_beyond_the_bound_of_connections_only_probes_are_answered() -> None:
    async with serving_edge(max_connections=2) as edge:
        application = edge.data_application

        class DataConnection(BoundedConnection):
            limit = application.state.connections

        config = uvicorn.Config(application, lifespan="off", ws="none", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        server = await asyncio.get_running_loop().create_server(lambda: DataConnection(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            for path in ("/healthz", "/readyz", "/metrics"):
                answer = await client.get(path)
                assert (answer.status_code, answer.headers["connection"]) == (200, "close"), path
            refused = await client.get("/v1/models")
            assert code(refused) == (MANY_REQUESTS, "Overloaded") and refused.headers["connection"] == "close"
            assert "at most 2 (--max-connections)" in refused.json()["error"]["message"] and refused.headers["retry-after"] == "5"
            assert "diffusion_worker_connections_refused_total 1.0" in (await client.get("/metrics")).text
            for _, writer in idle:
                writer.close()
                await writer.wait_closed()
            async with asyncio.timeout(DEADLINE_S):
                while (await client.get("/v1/models")).status_code == MANY_REQUESTS:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        server.close()
        await server.wait_closed()


async def test_a_request_beyond_the_queue_gets_429_with_the_bound_and_the_time() -> None:
    async with serving_edge(max_batch_size=1, queue=QueueLimits(max_queued=1)) as edge:
        edge.ranks.stepping.clear()
        body = {"prompt": "p kumquatfen", "num_inference_steps": 3}
        running = asyncio.create_task(edge.request_images(**body))
        await edge.wait_state(inFlight=1)
        waiting = asyncio.create_task(edge.request_images(**body))
        await edge.wait_state(queued=1)
        over = await edge.request_images(**body)
        assert code(over) == (MANY_REQUESTS, "Overloaded")
        assert "at most 1 waiting requests (--max-queued), found 2 with this request" in over.json()["error"]["message"]
        assert float(over.headers["retry-after"]) == over.json()["error"]["retry_after_seconds"] >= 1
        assert 'queue_refusals_total{bound="requests"} 1.0' in (await edge.data.get("/metrics")).text
        edge.ranks.stepping.set()
        assert [answer.status_code for answer in await asyncio.gather(running, waiting)] == [200, 200]
        assert (await edge.request_images(**body)).status_code == 200
