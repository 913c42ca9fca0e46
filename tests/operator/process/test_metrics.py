# SPDX-License-Identifier: Apache-2.0
"""The operator's counters: objects by the reason of Ready, with no object's name in a label, and their waiting times."""

import asyncio
import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.errors import ClusterUnavailable
from diffusion_operator.metrics import REGISTRY, ObjectsByReason, PrometheusMeter, Waiting, Watches, measured, register
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result
from support.operator.rig import Rig, adapter, serving


def scraped(rig: Rig) -> list[str]:
    registry = CollectorRegistry()
    registry.register(ObjectsByReason(rig.runtime.ready_reasons, rig.runtime.degraded_reasons))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


async def test_objects_are_counted_by_kind_and_reason_and_forgotten_when_they_go() -> None:
    rig = await serving()
    for name in ("a", "b"):
        rig.cluster.put(adapter(name, f"/loras/{name}"))
    rig.cluster.put(adapter("c", "/loras/c", suspend=True))
    await rig.run()
    assert scraped(rig) == [
        'diffusion_operator_objects{kind="DiffusionDeployment",object_namespace="default",reason="Serving"} 1.0',
        'diffusion_operator_objects{kind="LoRAAdapter",object_namespace="default",reason="LoadedEverywhere"} 2.0',
        'diffusion_operator_objects{kind="LoRAAdapter",object_namespace="default",reason="Suspended"} 1.0',
        'diffusion_operator_objects_degraded{kind="DiffusionDeployment",object_namespace="default",reason="AsExpected"} 1.0',
        'diffusion_operator_objects_degraded{kind="LoRAAdapter",object_namespace="default",reason="AsExpected"} 3.0',
    ]
    for name in ("a", "b", "c"):
        rig.cluster.remove(ADAPTER, name)
    await rig.run()
    assert scraped(rig) == [
        'diffusion_operator_objects{kind="DiffusionDeployment",object_namespace="default",reason="Serving"} 1.0',
        'diffusion_operator_objects_degraded{kind="DiffusionDeployment",object_namespace="default",reason="AsExpected"} 1.0',
    ]


async def nothing(key: Key) -> Result:
    return Result()


async def test_every_metric_of_the_operator_has_its_line_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text().partition("## The operator")[2]
    rig, queue = Rig(), KeyedQueue(nothing, resync_s=100, parallel=1, random=lambda: 0.5)
    collectors = register(rig.runtime, lambda: queue, (), Leadership.for_ever())
    try:
        text = generate_latest(REGISTRY).decode()
    finally:
        for collector in collectors:
            REGISTRY.unregister(collector)
    # The client library adds the time at which each series began.
    names = {name for name in re.findall(r"^# TYPE diffusion_operator_(\w+) ", text, re.MULTILINE) if not name.endswith("_created")}
    lines = [line.partition(":")[0] for line in page.splitlines() if line.startswith("- `")]
    assert {name for line in lines for name in re.findall(r"`(\w+)(?:\{[\w,]+\})?`", line)} == names


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (Result(), "ok"),
        (Result(gone=True), "gone"),
        (ClusterUnavailable("connection refused"), "error"),
        (Result(failure=ClusterUnavailable("of a part")), "part"),
    ],
)
async def test_a_pass_is_counted_with_its_time_by_kind_and_outcome(result: Result | ClusterUnavailable, outcome: str) -> None:
    async def reconcile(key: Key) -> Result:
        if isinstance(result, Exception):
            raise result
        return result

    def samples() -> list[float]:
        labels = {"kind": f"Test{outcome}", "outcome": "error" if outcome == "part" else outcome}
        return [REGISTRY.get_sample_value(f"diffusion_operator_reconcile_seconds_{end}", labels) or 0.0 for end in ("count", "sum")]

    with contextlib.suppress(ClusterUnavailable):
        await measured(reconcile, iter((10.0, 12.5)).__next__)(Key(f"Test{outcome}", "n", "a"))
    assert samples() == [1, 2.5]


def test_a_kind_s_watch_is_stalled_as_long_as_that_of_its_worst_namespace_and_refused_scopes_are_named() -> None:
    watched = [(DEPLOYMENT, 0.0, ""), (POD, 2.0, ""), (POD, 95.0, "forbidden"), (POD, 0.0, "")]
    listings: Any = [
        SimpleNamespace(scope=SimpleNamespace(kind=kind, namespace=f"n{number}"), stalled_s=stalled_s, refusal=refusal)
        for number, (kind, stalled_s, refusal) in enumerate(watched)
    ]
    stalled, refused = Watches(listings).collect()
    assert [(one.labels["kind"], one.value) for one in stalled.samples] == [("DiffusionDeployment", 0.0), ("Pod", 95.0)]
    assert [(one.labels, one.value) for one in refused.samples] == [({"kind": "Pod", "object_namespace": "n2"}, 1)]


@pytest.mark.looptime
async def test_what_waits_for_its_turn_is_counted_with_the_age_of_the_first() -> None:
    async def slow(key: Key) -> Result:
        await asyncio.sleep(10)
        return Result()

    queue = KeyedQueue(slow, resync_s=100, parallel=1, random=lambda: 0.5)
    for name in ("a", "b", "c"):
        queue.wake(Key("DiffusionDeployment", "n", name))
    await asyncio.sleep(5)
    length, age = Waiting(lambda: queue).collect()
    assert length.samples[0].value == 2
    assert age.samples[0].value == pytest.approx(4.95)
    await asyncio.sleep(50)
    length, age = Waiting(lambda: queue).collect()
    assert (length.samples[0].value, age.samples[0].value) == (0, 0)
    await queue.close()


def test_a_code_that_no_worker_has_is_counted_as_other() -> None:
    registry = CollectorRegistry()
    meter = PrometheusMeter(registry)
    for code in ("OK", "Busy", "made-up-1", "made-up-2"):
        meter.called("wake", code, 0.1)
    counted = {sample.labels["code"] for metric in registry.collect() for sample in metric.samples if "code" in sample.labels}
    assert counted == {"OK", "Busy", "Other"}
