# SPDX-License-Identifier: Apache-2.0
"""The program `diffusion-operator` with commanded deaths and counted actions.

Real: the program, except its two ports, which are wrapped where the process makes them. `OPERATOR_UNDER_TEST` in the environment is a JSON
object with these fields. `dieAt` is the number of the place to die at. `diedAt` is a file of the kinds of places where it died before. It
dies once at each other kind, and starts again as a new process. `controlPort` is the workers' port, and `settings` are values for the
operator's settings; `reopens_after_s` among them is the limit for a watch that brings nothing. After `strangersS` seconds, instead
of a minute, it looks again at another owner's object. The metrics include the number of each kind of action begun, the number of kept
objects, and the most passes of an object.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from diffusion_operator import connected, handlers, metrics, watch_stream
from diffusion_operator.__main__ import main
from diffusion_operator.plan.observed import children
from diffusion_operator.reconcile.dispatch import reconcile
from diffusion_operator.reconcile.keyed_queue import Key, Result
from diffusion_operator.reconcile.runtime import Runtime
from support.operator.fault_points import FaultPoints

TOLD = json.loads(os.environ.get("OPERATOR_UNDER_TEST", "{}"))


def _die(place: str) -> None:
    print(f"dies {place}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class DyingOnce(FaultPoints):
    """An operator that dies once at each kind of place, over all its lives. The kind is: before or after, the action, and its object or
    call.

    The next life begins without the imports, which take most of a start's time.
    """

    def __init__(self, died_at: Path) -> None:
        super().__init__(_die)
        self._died_at = died_at

    def live(self) -> None:
        """Fork a child to run the operator, and return in it. The parent waits for it to end, forks the next, and never returns."""
        while life := os.fork():
            os.waitpid(life, 0)

    def reach(self, place: str) -> None:
        """Die at a place of a new kind. The kind is written to the file first, so that the next life gets further."""
        super().reach(place)
        kind = " ".join(place.split()[:3])
        if kind not in self._died_at.read_text().splitlines():
            with self._died_at.open("a") as file:
                file.write(f"{kind}\n")
            _die(place)


POINTS = DyingOnce(Path(TOLD["diedAt"])) if "diedAt" in TOLD else FaultPoints(_die, at=TOLD.get("dieAt"))


class CountingProcess(handlers.Process, Collector):
    """The real process, with a count of the passes of each object that exists."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.passes: Counter[Key] = Counter()
        connected.reconcile = self.count
        metrics.REGISTRY.register(self)

    async def count(self, runtime: Runtime, key: Key) -> Result:
        """Count a pass, and make it."""
        self.passes[key] += 1
        result = await reconcile(runtime, key)
        if result.gone:
            del self.passes[key]
        return result

    def collect(self) -> Iterator[GaugeMetricFamily]:
        actions = GaugeMetricFamily("under_test_actions", "Actions that were begun, by kind.", labels=["what"])
        for what, count in Counter(" ".join(place.split()[1:3]) for place in list(POINTS.passed) if place.startswith("before")).items():
            actions.add_metric([what], count)
        yield actions
        kept = GaugeMetricFamily("under_test_kept", "Entries about objects.", labels=["where", "namespace"])
        for (where, namespace), count in self._kept().items():
            kept.add_metric([where, namespace], count)
        yield kept
        yield GaugeMetricFamily(
            "under_test_most_passes", "The most passes over a single object.", value=max(self.passes.values(), default=0)
        )

    def _kept(self) -> Counter[tuple[str, str]]:
        """Count the entries about objects by the place that keeps them and the namespace of the object."""
        kept: Counter[tuple[str, str]] = Counter()
        if self.connected is not None:
            runtime, leading = self.connected.runtime, self.connected.leading
            kept.update(("queue", key.namespace) for key in list(leading.queue._lines if leading is not None else ()))
            kept.update(("memories", namespace) for namespace, _ in list(runtime.memories))
            kept.update(("ready reasons", key.namespace) for key in list(runtime.ready_reasons))
            kept.update(("statuses", key.namespace) for key in list(runtime.statuses))
        return kept


def _wrap_ports() -> None:
    connect, client = handlers.connect, connected.HttpWorkerClient

    async def connect_wrapped(*given: Any, **more: Any) -> Any:
        return POINTS.wrap(await connect(*given, **more))

    def client_wrapped(**given: Any) -> Any:
        return POINTS.wrap(client(**({"port": TOLD["controlPort"]} if "controlPort" in TOLD else {}), **given))

    handlers.connect = connect_wrapped
    connected.HttpWorkerClient = client_wrapped  # type: ignore[misc,assignment]


if __name__ == "__main__":
    if isinstance(POINTS, DyingOnce):
        POINTS.live()
    _wrap_ports()
    if "strangersS" in TOLD:
        children.PAUSES[children.NAME_CONFLICT] = timedelta(seconds=TOLD["strangersS"])
    import diffusion_operator.__main__ as program

    program.Process = CountingProcess  # type: ignore[misc]
    if (reopens_after_s := TOLD.get("settings", {}).pop("reopens_after_s", None)) is not None:
        assert handlers.build_kopf_settings().watching.inactivity_timeout == watch_stream.limits().sock_read == 70
        watch_stream.SILENT_S = reopens_after_s
    made = program.Settings
    program.Settings = lambda **given: made(**given | TOLD.get("settings", {}))  # type: ignore[misc,assignment]
    main()
