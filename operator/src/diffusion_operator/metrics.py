# SPDX-License-Identifier: Apache-2.0
"""Metrics of the operator's process. Labels are bounded: no object names."""

from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Histogram, start_http_server

from diffusion_operator.reconcile.keyed_queue import Key, Result

REGISTRY = CollectorRegistry()
RECONCILE_SECONDS = Histogram(
    "diffusion_operator_reconcile_seconds", "Time of one pass over an object.", ["kind", "outcome"], registry=REGISTRY
)


def measured(reconcile: Callable[[Key], Awaitable[Result]], clock: Callable[[], float]) -> Callable[[Key], Awaitable[Result]]:
    """`clock` counts seconds from anywhere."""

    async def timed(key: Key) -> Result:
        begun, outcome = clock(), "error"
        try:
            result = await reconcile(key)
            outcome = "gone" if result.gone else "ok"
            return result
        finally:
            RECONCILE_SECONDS.labels(kind=key.kind, outcome=outcome).observe(clock() - begun)

    return timed


def serve_metrics(port: int) -> None:
    """In a thread of its own, so that it answers while the loop is busy."""
    start_http_server(port, registry=REGISTRY)
