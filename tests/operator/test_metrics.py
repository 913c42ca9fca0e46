# SPDX-License-Identifier: Apache-2.0
"""What the operator counts: objects by the reason of Ready, with no object's name in a label, and how long they wait."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from diffusion_operator.api.names import ADAPTER
from diffusion_operator.metrics import REGISTRY, ObjectsByReason, Waiting, register
from diffusion_operator.reconcile.keyed_queue import Key, KeyedQueue, Result
from operator_rig import Rig, adapter, serving


def scraped(rig: Rig) -> list[str]:
    registry = CollectorRegistry()
    registry.register(ObjectsByReason(rig.runtime.ready_reasons))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


async def test_objects_are_counted_by_kind_and_reason_and_forgotten_when_they_go() -> None:
    rig = await serving()
    for name in ("a", "b"):
        rig.cluster.put(adapter(name, f"/loras/{name}"))
    rig.cluster.put(adapter("c", "/loras/c", suspend=True))
    await rig.run()
    assert scraped(rig) == [
        'diffusion_operator_objects{kind="DiffusionDeployment",reason="Serving"} 1.0',
        'diffusion_operator_objects{kind="LoRAAdapter",reason="LoadedEverywhere"} 2.0',
        'diffusion_operator_objects{kind="LoRAAdapter",reason="Suspended"} 1.0',
    ]
    for name in ("a", "b", "c"):
        rig.cluster.remove(ADAPTER, name)
    await rig.run()
    assert scraped(rig) == ['diffusion_operator_objects{kind="DiffusionDeployment",reason="Serving"} 1.0']


async def nothing(key: Key) -> Result:
    return Result()


async def test_every_metric_of_the_operator_has_its_line_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("## The operator")[2]
    rig, queue = Rig(), KeyedQueue(nothing, resync_s=100, parallel=1, random=lambda: 0.5)
    collectors = register(rig.runtime, queue, ())
    try:
        text = generate_latest(REGISTRY).decode()
    finally:
        for collector in collectors:
            REGISTRY.unregister(collector)
    names = set(re.findall(r"^# TYPE diffusion_operator_(\w+) ", text, re.MULTILINE)) - {"reconcile_seconds_created"}
    assert {"queue_age_seconds", "watch_deaf_seconds", "groups", "held_requests", "objects"} <= names
    assert [name for name in sorted(names) if not re.search(rf"`{name.removesuffix('_created')}[`{{]", page)] == []


@pytest.mark.looptime
async def test_what_waits_for_its_turn_is_counted_with_the_age_of_the_first() -> None:
    async def slow(key: Key) -> Result:
        await asyncio.sleep(10)
        return Result()

    queue = KeyedQueue(slow, resync_s=100, parallel=1, random=lambda: 0.5)
    for name in ("a", "b", "c"):
        queue.wake(Key("DiffusionDeployment", "n", name))
    await asyncio.sleep(5)
    length, age = Waiting(queue).collect()
    assert length.samples[0].value == 2
    assert age.samples[0].value == pytest.approx(4.95)
    await asyncio.sleep(50)
    length, age = Waiting(queue).collect()
    assert (length.samples[0].value, age.samples[0].value) == (0, 0)
    await queue.close()
