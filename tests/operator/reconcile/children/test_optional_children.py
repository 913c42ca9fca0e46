# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicy and PodDisruptionBudget: there while the spec asks for them, removed otherwise, and never in the way of serving."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from diffusion_operator.api.names import (
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    LABEL_DEPLOYMENT,
    LABEL_MANAGED_BY,
    NETWORK_POLICY,
    Kind,
)
from diffusion_operator.plan.observed.control_security import PolicyOutcome, control_secured
from support.operator.plan_builders import made
from support.operator.rig import deployment, serving

OFF: Mapping[Kind, dict[str, Any]] = {
    NETWORK_POLICY: {"control": {"networkPolicy": "None"}},
    DISRUPTION_BUDGET: {"podDisruptionBudget": "None"},
}


@pytest.mark.parametrize("kind", OFF, ids=lambda kind: kind.kind)
async def test_one_that_an_earlier_process_made_is_removed_too_and_a_strangers_is_not(kind: Kind) -> None:
    rig = await serving()
    (name,) = rig.cluster.names(kind)
    strange = {**(rig.cluster.find(kind, name) or {})}
    strange["metadata"] = {**strange["metadata"], "name": "strange", "ownerReferences": []}
    rig.cluster.put(strange)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(OFF[kind]))
    rig.restart_operator()
    await rig.run()
    assert rig.cluster.names(kind) == ["strange"]


@pytest.mark.parametrize("kind", OFF, ids=lambda kind: kind.kind)
@pytest.mark.parametrize("wanted", [True, False], ids=["wanted", "not wanted"])
async def test_one_that_was_left_without_an_owner_is_adopted_or_removed_as_the_spec_asks(kind: Kind, wanted: bool) -> None:
    """Delete a deployment without its children, and create it again. The optional child is adopted if the spec wants it, and otherwise
    removed."""
    rig = await serving()
    (name,) = rig.cluster.names(kind)
    before = copy.deepcopy(rig.cluster.find(kind, name) or {})
    rig.cluster.remove_alone(DEPLOYMENT, "d")
    await rig.run()
    rig.cluster.put(deployment(**({} if wanted else OFF[kind])))
    await rig.run(20)
    owner = (rig.cluster.find(DEPLOYMENT, "d") or {})["metadata"]["uid"]
    after = rig.cluster.find(kind, name)
    found = [(after["metadata"]["uid"], after["metadata"]["ownerReferences"][0]["uid"])] if after else []
    assert found == ([(before["metadata"]["uid"], owner)] if wanted else [])
    assert rig.condition("ChildrenReady") == ("True", "AllApplied")


@pytest.mark.parametrize("kind", OFF, ids=lambda kind: kind.kind)
async def test_one_whose_owner_is_edited_away_after_the_spec_did_without_it_is_removed(kind: Kind) -> None:
    rig = await serving()
    (name,) = rig.cluster.names(kind)
    orphan = copy.deepcopy(rig.cluster.find(kind, name) or {})
    del orphan["metadata"]["ownerReferences"]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(OFF[kind]))
    await rig.run()
    rig.cluster.put(orphan)
    await rig.run()
    assert rig.cluster.names(kind) == []


@pytest.mark.parametrize("kind", OFF, ids=lambda kind: kind.kind)
async def test_a_strangers_with_our_labels_and_name_is_left_and_named_where_the_spec_does_without_it(kind: Kind) -> None:
    """Check that the operator leaves another client's object with a child's name and labels, and reports NameConflict.

    A restored backup writes such an object. The spec needs no child of that kind here.
    """
    rig = await serving(**OFF[kind])
    name = "d-control" if kind == NETWORK_POLICY else "d"
    labels = {LABEL_MANAGED_BY: "diffusion-operator", LABEL_DEPLOYMENT: "d"}
    body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, "namespace": "default", "labels": labels}}
    rig.cluster.put(body | {"spec": {"theirs": True}})
    theirs = copy.deepcopy(rig.cluster.find(kind, name))
    await rig.run(20)
    assert rig.cluster.find(kind, name) == theirs
    assert rig.condition("ChildrenReady") == ("False", "NameConflict")
    assert f"{kind.kind} {name} is not managed by this DiffusionDeployment and is left alone" in rig.message("ChildrenReady")
    assert len(rig.cluster.notes("NameConflict")) == 1
    rig.cluster.remove(kind, name)
    await rig.run(61)
    assert rig.condition("ChildrenReady") == ("True", "AllApplied")


async def test_what_guards_the_control_port_is_told() -> None:
    rig = await serving()
    assert rig.condition("ControlSecured") == ("True", "TokenAndPolicy")
    assert "depends on the cluster's network plugin" in rig.message("ControlSecured")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(OFF[NETWORK_POLICY]))
    await rig.run()
    assert rig.condition("ControlSecured") == ("True", "TokenOnly")


async def test_an_operator_outside_the_cluster_makes_no_policy_that_would_shut_it_out() -> None:
    verdict = control_secured(made().spec, PolicyOutcome(possible=False))
    assert (verdict.status, verdict.reason) == ("True", "TokenOnly")
    assert "--operator-namespace" in verdict.message
