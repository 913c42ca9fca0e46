# SPDX-License-Identifier: Apache-2.0
"""Metrics of the operator's process. Labels are bounded: no object names."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from diffusion_operator.reconcile.keyed_queue import Key, Result

REGISTRY = CollectorRegistry()
RECONCILE_SECONDS = Histogram(
    "diffusion_operator_reconcile_seconds", "Time of one pass over an object.", ["kind", "outcome"], registry=REGISTRY
)


class ObjectsByReason(Collector):
    """How many objects there are of each kind by the reason of their Ready condition, counted when somebody asks."""

    def __init__(self, reasons: Mapping[Key, str]) -> None:
        self._reasons = reasons

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """In the thread of the metrics server; the copy is one step of the interpreter."""
        family = GaugeMetricFamily(
            "diffusion_operator_objects", "Objects by the reason of their Ready condition.", labels=["kind", "reason"]
        )
        for (kind, reason), count in sorted(Counter((key.kind, reason) for key, reason in list(self._reasons.items())).items()):
            family.add_metric([kind, reason], count)
        yield family


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
