# SPDX-License-Identifier: Apache-2.0
"""Objects that cannot be read, as those that were stored before a stricter schema: each says so, and no other is disturbed."""

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD
from diffusion_operator.errors import ClusterRefused
from support.operator.rig import Rig, adapter, deployment, serving, with_adapter

REFUSED = ClusterRefused("422 the object is invalid", status=422, reason="Invalid")
WRONG = {"replicas": "three"}
WHY = "spec.replicas: expected int, found str"


async def broken() -> Rig:
    """Return a rig with a serving deployment, whose spec then lost its meaning."""
    rig = await serving()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(WRONG))
    await rig.run()
    return rig


async def test_a_deployment_that_is_not_understood_names_the_field_and_serves_on() -> None:
    rig = await broken()
    assert rig.condition("Ready") == ("Unknown", "NotUnderstood")
    assert rig.message("Ready").startswith(f"{WHY}; the operator leaves everything as it is until the field is corrected, ")
    assert rig.condition("Available") == ("True", "MinimumAvailable"), "the rest of the status stays"
    assert rig.states() == ["Awake"]
    assert (rig.cluster.names(POD), rig.routable()) == (["d-0-0"], ["d-0-0"])
    assert [note.partition(";")[0] for note in rig.cluster.notes("NotUnderstood")] == [WHY]
    writes = rig.cluster.status_writes
    rig.restart_operator()
    await rig.run(60)
    assert (rig.cluster.status_writes, len(rig.cluster.notes("NotUnderstood"))) == (writes, 1), "said once"
    assert rig.errors == []


async def test_a_status_that_is_not_understood_says_how_it_can_be_corrected() -> None:
    """Check the message about a status that this operator cannot read, as a later release may have written it."""
    rig = await serving()
    found = rig.cluster.find(DEPLOYMENT, "d") or {}
    found["status"]["replicaStates"][0]["state"] = "Dreaming"
    rig.restart_operator()
    await rig.run()
    assert rig.condition("Ready") == ("Unknown", "NotUnderstood")
    assert rig.message("Ready").startswith("status.replicaStates[0].state: expected one of Pending, ")
    assert "found 'Dreaming'; " in rig.message("Ready")
    assert "corrected by `kubectl edit --subresource=status`" in rig.message("Ready")
    assert rig.states() == ["Dreaming"]


async def test_it_is_reconciled_as_soon_as_the_field_is_corrected() -> None:
    rig = await broken()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run()
    rig.start_all()
    await rig.run()
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]


async def test_one_that_was_never_understood_has_a_status_and_can_be_deleted() -> None:
    rig = Rig()
    rig.cluster.put(deployment(**WRONG))
    await rig.run()
    assert rig.condition("Ready") == ("Unknown", "NotUnderstood")
    assert rig.cluster.names(POD) == []
    rig.cluster.remove(DEPLOYMENT, "d")
    await rig.run()
    assert (rig.runtime.memories, rig.runtime.ready_reasons) == ({}, {})
    assert rig.errors == []


async def test_another_deployment_is_made_and_changed_meanwhile() -> None:
    rig = await broken()
    rig.cluster.put(deployment("e"))
    await rig.run()
    rig.start_all()
    await rig.run()
    assert rig.condition("Ready", "e") == ("True", "Serving")


async def test_a_status_that_is_refused_is_written_again_and_the_event_is_there() -> None:
    """Refuse writes of the status, as an older API server does, which checks the whole object. The status follows later, and the Event
    comes once."""
    rig = await serving()
    rig.cluster.refuse = lambda verb, manifest: REFUSED if verb == "apply_status" else None
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(WRONG))
    await rig.run()
    assert len(rig.cluster.notes("NotUnderstood")) == 1
    rig.cluster.refuse = lambda verb, manifest: None
    await rig.run(60)
    assert rig.condition("Ready") == ("Unknown", "NotUnderstood")
    assert len(rig.cluster.notes("NotUnderstood")) == 1


async def test_the_adapters_of_a_deployment_that_is_not_understood_say_so_until_it_is() -> None:
    rig = await with_adapter()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(WRONG))
    rig.restart_operator()
    await rig.run()
    assert rig.adapter_condition("Ready") == ("Unknown", "NotUnderstood")
    assert rig.adapter_message("Ready").startswith(f"DiffusionDeployment d is not understood: {WHY}")
    assert rig.adapter_status()["resolved"]["digest"] == "sha256:loras-x", "what was pinned stays"
    writes = rig.cluster.status_writes
    await rig.run(60)
    assert rig.cluster.status_writes == writes
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=1))
    await rig.run(20)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")


@pytest.mark.parametrize("restarted", [False, True], ids=["the same process", "another process"])
async def test_an_adapter_that_is_not_understood_names_the_field_and_disturbs_no_other(restarted: bool) -> None:
    rig = await with_adapter()
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(priority="high"))
    if restarted:
        rig.restart_operator()
    rig.cluster.put(adapter("y", "/loras/y"))
    await rig.run(20)
    assert rig.adapter_condition("Ready") == ("Unknown", "NotUnderstood")
    assert rig.adapter_message("Ready").startswith("spec.priority: expected int, found str")
    assert len(rig.cluster.notes("NotUnderstood")) == 1
    assert rig.adapter_condition("Ready", "y") == ("True", "LoadedEverywhere")
    assert rig.condition("Ready") == ("True", "Serving")
    assert ("x" in rig.workers.at("10.0.0.1").adapters) is not restarted, "the state that was understood last serves on"
    rig.cluster.change(ADAPTER, "x", lambda spec: spec.update(priority=3))
    await rig.run(20)
    assert rig.adapter_condition("Ready") == ("True", "LoadedEverywhere")
    assert rig.errors == []
