# SPDX-License-Identifier: Apache-2.0
"""The program `diffusion-operator`, which can be told where to die and which counts what it does.

The two ports are wrapped where the process makes them; all else is the real program. `OPERATOR_UNDER_TEST` in the environment is a
JSON object: `dieAt`, the number of the place to die at, `controlPort`, where workers listen. Among the metrics are how often each
kind of action was begun, how much is kept of objects, and the most passes that one object had.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from diffusion_operator import handlers, metrics
from diffusion_operator.__main__ import main
from diffusion_operator.reconcile.keyed_queue import Key, Result
from fault_points import FaultPoints

TOLD = json.loads(os.environ.get("OPERATOR_UNDER_TEST", "{}"))


def _die(place: str) -> None:
    print(f"dies {place}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


POINTS = FaultPoints(_die, at=TOLD.get("dieAt"))


class CountingProcess(handlers.Process):
    """The real one, and the passes of each object that is there."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.passes: Counter[Key] = Counter()
        metrics.REGISTRY.register(_Counts(self))

    async def _reconcile(self, key: Key) -> Result:
        self.passes[key] += 1
        result = await super()._reconcile(key)
        if result.gone:
            del self.passes[key]
        return result


class _Counts(Collector):
    def __init__(self, process: CountingProcess) -> None:
        self._process = process

    def collect(self) -> Iterator[GaugeMetricFamily]:
        process, runtime = self._process, self._process.runtime
        actions = GaugeMetricFamily("under_test_actions", "Begun.", labels=["what"])
        for what, count in Counter(" ".join(place.split()[1:3]) for place in list(POINTS.passed) if place.startswith("before")).items():
            actions.add_metric([what], count)
        yield actions
        kept = 0 if runtime is None else sum(map(len, (runtime.memories, runtime.ready_reasons, runtime.touched, runtime.statuses)))
        yield GaugeMetricFamily("under_test_kept", "Entries about objects.", value=kept + len(process.queue or ()))
        yield GaugeMetricFamily("under_test_most_passes", "Of one object.", value=max(process.passes.values(), default=0))


def _wrap_ports() -> None:
    connect, client = handlers.connect, handlers.HttpWorkerClient

    async def connect_wrapped(*given: Any, **more: Any) -> Any:
        return POINTS.wrap(await connect(*given, **more))

    def client_wrapped(**given: Any) -> Any:
        return POINTS.wrap(client(**({"port": TOLD["controlPort"]} if "controlPort" in TOLD else {}), **given))

    handlers.connect = connect_wrapped
    handlers.HttpWorkerClient = client_wrapped  # type: ignore[misc,assignment]


if __name__ == "__main__":
    _wrap_ports()
    import diffusion_operator.__main__ as program

    program.Process = CountingProcess  # type: ignore[misc]
    main()
