# SPDX-License-Identifier: Apache-2.0
"""kopf brings events, and nothing of an event outlives its handler, because there may be ten thousand objects.

Real: the process's handler, its store and its queue. Not real: kopf itself, whose context variable the test sets, and the pass.
"""

import asyncio
from contextvars import ContextVar

import pytest
from kubernetes.aio.client import Configuration

from diffusion_operator import connected
from diffusion_operator.api.names import DEPLOYMENT
from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.handlers import Process, build_kopf_settings
from diffusion_operator.reconcile.keyed_queue import Result
from diffusion_operator.settings import Settings

CAUSE: ContextVar[object] = ContextVar("CAUSE", default=None)
METADATA = {"name": "d", "namespace": "n", "uid": "u", "resourceVersion": "1"}


async def test_a_pass_that_an_event_leads_to_keeps_no_variable_of_kopf(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: asyncio.Queue[object] = asyncio.Queue()

    async def reconcile(*_: object) -> Result:
        passed.put_nowait(CAUSE.get())
        return Result()

    monkeypatch.setattr(connected, "reconcile", reconcile)
    settings = Settings(engine_image="i", operator_key=b"k" * 32)
    process = Process(settings)
    process.connected = connected.Connected(settings, KubernetesCluster(Configuration()))
    process.connected._lead(again=False)
    CAUSE.set("an event, with its object")
    await process.event_handler(DEPLOYMENT)(event={"type": "ADDED", "object": {"metadata": METADATA, "spec": {}}})
    async with asyncio.timeout(30):
        assert await passed.get() is None
    await process.connected.close()


def test_kopfs_task_of_an_object_ends_at_once() -> None:
    assert 0 < build_kopf_settings().queueing.idle_timeout <= 0.5
