# SPDX-License-Identifier: Apache-2.0
"""Repeated rotation of the operator's key over a real worker, whose token arrives at any time: nothing fails.

The steps are those of docs/security.md. The new key goes before the old one, the operator starts again, and the kubelet brings the token
later. No call fails, no poll is missed, no condition changes.
"""

import asyncio
import base64
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, SECRET
from diffusion_operator.render.control_secret import control_token
from support.operator.reconcile_story import Story, story
from support.operator.rig import Rig, adapter
from support.worker.process import DIGITS

pytestmark = pytest.mark.slow
ROUNDS = 12


def token_of(rig: Rig, key: bytes) -> str:
    return control_token(key, msgspec.convert(rig.cluster.find(DEPLOYMENT, "d"), DiffusionDeployment).metadata)


def settled(rig: Rig) -> dict[str, Any]:
    """Return each condition of both objects with its last transition time, which changes whenever the condition does."""
    found = {"d": rig.status(), "x": rig.adapter_status()}
    return {
        f"{name} {one['type']}": (one["status"], one["reason"], one["lastTransitionTime"])
        for name, status in found.items()
        for one in status["conditions"]
    }


def polled(rig: Rig) -> Any:
    """Return the worker's state as the operator polled it last; fail if that poll failed."""
    (memory,) = rig.runtime.memories.values()
    (record,) = memory.polls.values()
    assert (record.failures, record.error) == (0, "")
    assert record.state is not None
    return record.state


async def rotate(told: Story, key: bytes, *, token_after_s: float) -> None:
    """Restart the operator with a new key while an adapter changes, and write the worker's new token after `token_after_s`.

    Return once the worker has the adapter's change. No poll may fail meanwhile.
    """
    rig = told.rig
    rig.keys = (key, rig.keys[0])
    rig.restart_operator()
    assert told.worker.control("GET", "/v1/state", token=token_of(rig, key)).status_code == 401

    async def bring_token() -> None:
        await asyncio.sleep(token_after_s)
        told.worker.write_token(token_of(rig, key))

    kubelet = asyncio.create_task(bring_token())
    scale = f"0.{random.randrange(1, 1000):03}"
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(defaultScale=scale))
    await told.step()
    while not kubelet.done() or polled(rig).adapters[0].scale != float(scale):
        # The operator's time runs fifty times as fast as the worker's, so wait for a worker that gets no processor.
        await asyncio.to_thread(told.worker.get, "/healthz")
        await told.step()
        polled(rig)
    await kubelet


async def test_keys_rotated_in_a_loop_fail_no_call_and_move_no_condition(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(shutil.copytree(DIGITS / "loras" / "frame", tmp_path / "x"))
    async with asyncio.timeout(60), story() as told:
        rig = told.rig
        rig.cluster.put(adapter("x", path))
        await told.until("Ready", "True", "LoadedEverywhere", name="x")
        before = settled(rig)
        for number in range(ROUNDS):
            await rotate(told, b"%032d" % number, token_after_s=random.uniform(0, 0.3))
            assert settled(rig) == before
        secret = rig.cluster.find(SECRET, "d-control") or {}
        assert base64.b64decode(secret["data"]["token"]).decode() == token_of(rig, rig.keys[0])
        rig.keys = rig.keys[:1]  # the old key is removed once every worker has the new token
        rig.restart_operator()
        await told.step()
        polled(rig)
        assert settled(rig) == before
    assert not [record for record in caplog.records if "failed" in record.message]


async def test_a_key_that_was_replaced_and_not_kept_shuts_the_operator_out_until_the_token_arrives() -> None:
    """Replace the key in the file without keeping the old one second; the second key in the file exists for this case."""
    async with asyncio.timeout(60), story() as told:
        rig = told.rig
        await told.until_deployment("Ready", "True", "Serving")
        rig.keys = (b"n" * 32,)
        rig.restart_operator()
        await rig.run(30)
        assert rig.condition("Degraded") == ("True", "ControlUnreachable")
        told.worker.write_token(token_of(rig, b"n" * 32))
        await told.until_deployment("Ready", "True", "Serving")
