# SPDX-License-Identifier: Apache-2.0
"""The operator keeps nothing in memory of an object or a pod that is gone."""

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT
from diffusion_operator.api.worker_state import WireError
from support.operator.rig import adapter, with_adapter


async def test_of_a_deployment_and_its_adapter_that_are_deleted_nothing_is_kept() -> None:
    rig = await with_adapter()
    assert rig.runtime.memories.keys() == {("default", "d")}
    rig.cluster.remove(ADAPTER, "x")
    rig.cluster.remove(DEPLOYMENT, "d")
    await rig.run()
    runtime = rig.runtime
    assert (runtime.memories, runtime.adapter_backoffs, runtime.ready_reasons, runtime.statuses) == ({}, {}, {}, {})
    assert rig.watches._followed == {}
    assert rig._due == {}, "no key of it is looked at again"


async def test_of_an_adapter_that_is_deleted_its_deployment_keeps_nothing() -> None:
    rig = await with_adapter()
    worker = rig.workers.at("10.0.0.1")
    worker.refusals["/loras/y"] = WireError(code="NetworkError", message="connection refused", retryable=True)
    rig.cluster.put(adapter("y", "/loras/y"))
    await rig.run(60)
    uid = (rig.cluster.find(ADAPTER, "y") or {})["metadata"]["uid"]
    memory = rig.runtime.memories["default", "d"]
    assert uid in memory.views
    rig.cluster.remove(ADAPTER, "y")
    await rig.run(60)
    assert uid not in {*memory.views, *memory.published_at, *memory.unpublished, *memory.adapters.rows, *memory.adapters.refusals}
    assert [key for key in memory.attempts if key.adapter_uid == uid] == []
    assert all(key.name != "y" for key in (*rig.runtime.adapter_backoffs, *rig.runtime.ready_reasons))
    assert "y" not in {one.metadata.name for one in memory.parsed.all}
