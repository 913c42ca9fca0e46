# SPDX-License-Identifier: Apache-2.0
"""A child that another client changed or deleted is repaired in the same pass, and an Event describes it. Our own writes make none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from diffusion_operator.api.names import (
    ANNOTATION_APPLIED,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    LABEL_DEPLOYMENT,
    LABEL_ROUTABLE,
    NETWORK_POLICY,
    POD,
    SECRET,
    SERVICE,
    Kind,
    control_policy_name,
)
from diffusion_operator.plan.results.drift import drift
from support.operator.rig import Rig, adapter, serving

LABELS = {LABEL_DEPLOYMENT: "d"}
WANTED: dict[str, Any] = {
    "kind": "Service",
    "metadata": {"name": "d", "labels": LABELS, "ownerReferences": [{"uid": "u"}]},
    "spec": {"type": "ClusterIP", "selector": LABELS, "ports": [{"name": "http", "port": 80}], "egress": []},
}


def edited(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the object as the API server holds it, with defaults and this change."""
    live = copy.deepcopy(WANTED)
    live["metadata"] |= {"uid": "1", "resourceVersion": "5"}
    live["metadata"]["labels"] = {**LABELS, "team": "a"}
    live["spec"] |= {"clusterIP": "10.0.0.1", "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]}
    live["status"] = {"loadBalancer": {}}
    del live["spec"]["egress"]
    change(live)
    return live


DRIFTS: list[tuple[str, Callable[[dict[str, Any]], object], tuple[str, ...]]] = [
    ("nothing", lambda live: None, ()),
    ("a port of another client", lambda live: live["spec"]["ports"].append({"name": "more", "port": 81}), ("spec.ports",)),
    ("an owner of another client", lambda live: live["metadata"]["ownerReferences"].append({"uid": "v"}), ()),
    ("our port", lambda live: live["spec"]["ports"][0].update(port=81), ("spec.ports",)),
    ("a selector that takes other pods", lambda live: live["spec"]["selector"].update(x="y"), ("spec.selector",)),
    ("a field and a label", lambda live: (live["spec"].update(type="NodePort"), live["metadata"]["labels"].pop(LABEL_DEPLOYMENT)),
     (f"metadata.labels.{LABEL_DEPLOYMENT}", "spec.type")),
    ("the owner", lambda live: live["metadata"].pop("ownerReferences"), ("metadata.ownerReferences",)),
    ("all of it", lambda live: live.pop("spec"), ("spec",)),
]  # fmt: skip


@pytest.mark.parametrize(("change", "paths"), [row[1:] for row in DRIFTS], ids=[row[0] for row in DRIFTS])
def test_what_of_a_child_is_not_as_it_was_rendered(change: Callable[[dict[str, Any]], object], paths: tuple[str, ...]) -> None:
    assert drift(edited(change), WANTED) == paths


def edit(rig: Rig, kind: Kind, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit an object as kubectl does, and deliver the watch's event."""
    found = rig.cluster.find(kind, name)
    assert found is not None
    before = copy.deepcopy(found)
    change(found)
    deployment = before["metadata"]["labels"][LABEL_DEPLOYMENT]
    rig.runtime.child_changed("default", deployment, kind.kind, name)


EDITS: list[tuple[Kind, str, Callable[[dict[str, Any]], object], str]] = [
    (
        SERVICE,
        "d",
        lambda live: live["spec"].update(selector={"app": "mine"}),
        "Service d was changed: spec.selector by another client; the operator repairs it",
    ),
    (
        CONFIG_MAP,
        "d-desired",
        lambda live: live["data"].clear(),
        "ConfigMap d-desired was changed: data.desired.json by another client; the operator repairs it",
    ),
    (DISRUPTION_BUDGET, "d", lambda live: live["spec"].clear(), "PodDisruptionBudget d was changed: spec"),
]


def content(found: dict[str, Any] | None) -> dict[str, Any]:
    """Return an object without the fields that the API server keeps for itself."""
    assert found is not None
    metadata = {name: value for name, value in found["metadata"].items() if name not in ("resourceVersion", "generation", "managedFields")}
    return found | {"metadata": metadata}


@pytest.mark.parametrize(("kind", "name", "change", "note"), EDITS, ids=[row[0].kind for row in EDITS])
async def test_an_edited_child_is_repaired_at_once_and_told(
    kind: Kind, name: str, change: Callable[[dict[str, Any]], object], note: str
) -> None:
    rig = await serving(2)
    before = copy.deepcopy(content(rig.cluster.find(kind, name)))
    edit(rig, kind, name, change)
    await rig.run(0.1)
    assert content(rig.cluster.find(kind, name)) == before
    [told] = rig.cluster.notes("Repaired")
    assert note in told


@pytest.mark.parametrize(("kind", "name"), [row[:2] for row in EDITS], ids=[row[0].kind for row in EDITS])
async def test_a_deleted_child_is_made_again_and_told(kind: Kind, name: str) -> None:
    rig = await serving(2)
    rig.cluster.remove(kind, name)
    await rig.run(0.1)
    assert rig.cluster.names(kind) == [name]
    assert rig.cluster.notes("Repaired") == [
        f"{kind.kind} {name} was deleted or its labels were removed by another client; the operator repairs it"
    ]


async def test_a_pod_that_the_cluster_preempted_is_not_said_to_be_deleted_by_a_client() -> None:
    rig = await serving(1)
    rig.cluster.graceful = True
    live = rig.cluster.find(POD, "d-0-0")
    assert live is not None
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "default-scheduler: preempting"}
    rig.cluster.pod_status("d-0-0", conditions=[*live["status"]["conditions"], target])
    rig.cluster.tell_to_go("d-0-0")
    await rig.run()
    (note,) = rig.cluster.notes("Repaired")
    assert note == "pod d-0-0 was deleted by PreemptionByScheduler: default-scheduler: preempting; the operator repairs it"


async def test_a_scale_down_is_an_event_that_says_which_pod_goes_and_why() -> None:
    rig = await serving(2)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=1))
    await rig.run(30)
    assert rig.cluster.notes("PodDeleted") == ["pod d-1-0 is deleted: there are more replicas than the spec asks for"]


async def test_the_routable_label_is_put_back() -> None:
    rig = await serving(1)
    edit(rig, POD, "d-0-0", lambda live: live["metadata"]["labels"].pop(LABEL_ROUTABLE))
    await rig.run()
    assert rig.routable() == ["d-0-0"]
    [told] = rig.cluster.notes("Repaired")
    assert f"label {LABEL_ROUTABLE} of pod d-0-0 was changed" in told


async def test_what_the_operator_does_itself_is_no_repair() -> None:
    rig = await serving(2)
    for spec in (
        {"replicas": 3},
        {"replicas": 1},
        {"service": {"port": 8080}},
        {"engine": {"env": [{"name": "A", "value": "1"}]}},
        {"podDisruptionBudget": "None"},
        {"podDisruptionBudget": "Auto"},
        {"sleep": {"policy": "Asleep"}},
        {"sleep": {}},
        {"replicas": 0},
        {"replicas": 2},
    ):
        rig.cluster.change(DEPLOYMENT, "d", lambda now, spec=spec: now.update(spec))
        await rig.run(10)
        rig.start_all()
        await rig.run(10)
    rig.cluster.put(adapter())
    await rig.run(60)
    rig.restart_operator()
    await rig.run(60)
    rig.cluster.remove(DEPLOYMENT, "d")
    await rig.run(60)
    assert rig.cluster.notes("Repaired") == []
    assert rig.errors == []


async def test_a_watch_event_alone_is_no_proof() -> None:
    rig = await serving(1)
    for kind, name in ((SERVICE, "d"), (CONFIG_MAP, "d-desired"), (POD, "d-0-0"), (DISRUPTION_BUDGET, "d")):
        rig.runtime.child_changed("default", "d", kind.kind, name)
    await rig.run(60)
    assert rig.cluster.notes("Repaired") == []


async def test_who_edits_all_the_time_is_told_of_once_a_minute() -> None:
    rig = await serving(1)
    for _ in range(50):
        edit(rig, SERVICE, "d", lambda live: live["spec"].update(type="NodePort"))
        await rig.run(1)
    assert 1 <= len(rig.cluster.notes("Repaired")) <= 2


POLICY_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a rule that lets everybody in": lambda spec: spec["ingress"].append({}),
    "a rule for fewer clients": lambda spec: spec["ingress"][0].update({"from": [{"podSelector": {}}]}),
    "fewer pods": lambda spec: spec["podSelector"]["matchLabels"].update(team="a"),
    "a block of what pods send": lambda spec: spec["policyTypes"].append("Egress"),
}


@pytest.mark.parametrize("change", POLICY_EDITS.values(), ids=POLICY_EDITS)
async def test_a_policy_that_another_client_changed_is_put_back(change: Callable[[dict[str, Any]], object]) -> None:
    rig = await serving(1)
    name = control_policy_name("d")
    before = copy.deepcopy(content(rig.cluster.find(NETWORK_POLICY, name)))
    edit(rig, NETWORK_POLICY, name, lambda live: change(live["spec"]))
    await rig.run(1)
    assert content(rig.cluster.find(NETWORK_POLICY, name)) == before
    assert len(rig.cluster.notes("Repaired")) == 1
    assert rig.condition("ControlSecured")[0] == "True"


async def test_a_service_that_publishes_pods_which_are_not_ready_is_put_back() -> None:
    rig = await serving(1)
    edit(rig, SERVICE, "d", lambda live: live["spec"].update(publishNotReadyAddresses=True))
    await rig.run(1)
    assert content(rig.cluster.find(SERVICE, "d"))["spec"]["publishNotReadyAddresses"] is False


async def fought(kind: Kind, name: str, change: Callable[[dict[str, Any]], object], *, minutes: int) -> tuple[Rig, int]:
    """Let another client change a child every five seconds for `minutes`. Return the rig, and how often the child was put back."""
    rig = await serving(1)
    repairs = 0
    for _ in range(12 * minutes):
        before = rig.cluster.find(kind, name)
        assert before is not None
        wanted = copy.deepcopy(before["spec"])
        edit(rig, kind, name, change)
        await rig.run(5)
        found = rig.cluster.find(kind, name)
        assert found is not None
        repairs += found["spec"] != wanted if wanted == changed_spec(wanted, change) else found["spec"] == wanted
    return rig, repairs


def changed_spec(spec: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    live = {"spec": copy.deepcopy(spec)}
    change(live)
    return live["spec"]


async def test_a_child_that_another_client_changes_again_and_again_is_put_back_every_ten_minutes() -> None:
    rig, repairs = await fought(SERVICE, "d", lambda live: live["spec"].update(type="NodePort"), minutes=22)
    assert repairs == 3 + 2
    status, reason = rig.condition("ChildrenReady")
    assert (status, reason) == ("False", "ChildContested")
    await rig.run(700)
    assert rig.condition("ChildrenReady") == ("True", "AllApplied"), "the other client has stopped"


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        (lambda live: live["spec"].update(selector={"app": "mine"}), False),
        (lambda live: live["spec"]["ports"][0].update(port=81), False),
        (lambda live: live["spec"]["ports"].append({"name": "more", "port": 81, "protocol": "TCP"}), True),
    ],
    ids=["to other pods", "without its port", "with one more port"],
)
async def test_a_contested_service_that_leads_elsewhere_is_put_back_every_minute_and_not_called_ready(
    change: Callable[[dict[str, Any]], object], reached: bool
) -> None:
    rig, repairs = await fought(SERVICE, "d", change, minutes=5)
    assert (repairs > 3) is not reached
    edit(rig, SERVICE, "d", change)
    await rig.run(1)
    assert rig.condition("ChildrenReady") == ("False", "ChildContested")
    assert rig.condition("Ready") == (("True", "Serving") if reached else ("False", "NoService"))
    await rig.run(700)
    assert rig.condition("Ready") == ("True", "Serving")


async def test_an_operator_of_another_release_is_no_contest_and_what_it_wrote_is_put_back_when_it_has_ended() -> None:
    """Let an earlier operator remove `publishNotReadyAddresses` each second for a minute. It is put back a few times, and at the end."""
    rig = await serving(1)
    wanted, repairs = copy.deepcopy(content(rig.cluster.find(SERVICE, "d"))), 0

    def write(live: dict[str, Any]) -> None:
        live["spec"].pop("publishNotReadyAddresses", None)
        live["metadata"]["annotations"][ANNOTATION_APPLIED] = "another"

    for _ in range(60):
        edit(rig, SERVICE, "d", write)
        await rig.run(1)
        repairs += content(rig.cluster.find(SERVICE, "d")) == wanted
        assert rig.condition("ChildrenReady") == ("True", "AllApplied")
    assert 4 <= repairs <= 7
    await rig.run(11)
    assert content(rig.cluster.find(SERVICE, "d")) == wanted
    assert rig.cluster.notes("Repaired") == []


async def test_a_contested_policy_is_put_back_every_minute_and_the_control_port_is_not_called_secured() -> None:
    name = control_policy_name("d")
    rig, repairs = await fought(NETWORK_POLICY, name, lambda live: live["spec"].update(ingress=[{}]), minutes=5)
    assert 3 + 3 <= repairs <= 3 + 5
    assert rig.condition("ControlSecured") == ("False", "PolicyRefused")
    await rig.run(120)
    assert rig.condition("ControlSecured")[0] == "True"


async def test_a_webhook_that_changes_each_write_is_told_and_not_fought() -> None:
    rig = await serving(1)
    replace, writes = rig.cluster._replace, 0

    def mutated(existing: dict[str, Any], updated: dict[str, Any]) -> dict[str, Any]:
        nonlocal writes
        if updated["kind"] == SERVICE.kind:
            writes += 1
            updated["spec"]["type"] = "LoadBalancer"
        return replace(existing, updated)

    rig.cluster._replace = mutated  # type: ignore[method-assign]
    rig.cluster.change(DEPLOYMENT, "d", lambda now: now.update(service={"port": 8080}))
    await rig.run(300)
    assert writes <= 3 * 4, "three requests each"
    assert rig.condition("ChildrenReady") == ("False", "ChildContested")


async def without_its_secret() -> Rig:
    """Return a rig that serves and whose Secret is gone without an event, because Secrets are not watched."""
    rig = await serving(1)
    record_event, rig.cluster.on_change = rig.cluster.on_change, lambda change, manifest: None
    rig.cluster.remove(SECRET, "d-control")
    rig.cluster.on_change = record_event
    await rig.run(30)
    assert rig.cluster.names(SECRET) == []
    return rig


async def test_a_secret_of_ours_that_is_gone_comes_back_where_a_pod_waits_for_it() -> None:
    rig = await without_its_secret()
    rig.cluster.remove(POD, "d-0-0")
    await rig.run()
    rig.cluster.waiting("d-0-1", "ContainerCreating")
    await rig.run(60)
    assert rig.cluster.names(SECRET) == ["d-control"]


async def test_a_secret_of_ours_that_is_gone_comes_back_in_time_without_anybody_waiting() -> None:
    rig = await without_its_secret()
    await rig.run(rig.runtime.settings.resync_s + 60)
    assert rig.cluster.names(SECRET) == ["d-control"]
    assert rig.condition("Ready") == ("True", "Serving"), "what runs has mounted it"
