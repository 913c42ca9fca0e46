# SPDX-License-Identifier: Apache-2.0
"""Nothing is written twice: one write for a child and one for a status, none at rest, none by an operator that only restarts."""

from diffusion_operator.api.names import ADAPTER, ANNOTATION_APPLIED, POD, SERVICE, Kind
from diffusion_operator.reconcile.dispatch import reconcile
from diffusion_operator.reconcile.runtime import deployment_key
from support.operator.fake_cluster import Manifest
from support.operator.fault_points import FaultPoints
from support.operator.rig import Rig, adapter, deployment, serving


def count_writes(rig: Rig) -> list[str]:
    """Record the place of every write from now on, and return the growing list."""
    points = FaultPoints(lambda place: None)
    rig.runtime.cluster = points.wrap(rig.cluster)
    return points.passed


def written(places: list[str]) -> list[str]:
    return sorted(place.removeprefix("before ") for place in places if place.startswith("before "))


async def test_a_new_deployment_costs_one_write_a_child_and_one_status() -> None:
    rig = Rig()
    places = count_writes(rig)
    rig.cluster.put(deployment())
    await rig.run(60)
    kinds = ("ConfigMap d-desired", "NetworkPolicy d-control", "PodDisruptionBudget d", "Secret d-control", "Service d")
    assert written(places) == sorted(["apply_status DiffusionDeployment d", "create Pod d-0-0", *("create " + kind for kind in kinds)])


async def with_five_adapters() -> Rig:
    rig = await serving(2)
    for number in range(5):
        rig.cluster.put(adapter(f"a{number}", f"/loras/{number}"))
    await rig.run(60)
    assert [rig.adapter_condition("Ready", f"a{number}")[0] for number in range(5)] == ["True"] * 5
    return rig


async def test_an_operator_that_starts_again_rewrites_no_status_of_an_adapter() -> None:
    rig = await with_five_adapters()
    rig.restart_operator()
    places = count_writes(rig)
    await rig.run(300)
    assert written(places) == []


async def test_a_change_of_one_adapter_is_written_for_that_alone() -> None:
    rig = await with_five_adapters()
    places = count_writes(rig)
    rig.cluster.change(ADAPTER, "a3", lambda spec: spec.update(defaultScale="0.5"))
    await rig.run(60)
    about_adapters = {place for place in written(places) if "LoRAAdapter" in place}
    assert about_adapters == {"apply_status LoRAAdapter a3"}


async def test_a_pass_reads_the_adapters_that_changed_and_no_others() -> None:
    rig = await with_five_adapters()
    reads: list[str] = []
    get = rig.cluster.get

    async def counted(kind: Kind, namespace: str, name: str) -> Manifest | None:
        reads.extend([name] if kind == ADAPTER else [])
        return await get(kind, namespace, name)

    rig.cluster.get = counted  # type: ignore[method-assign]
    await reconcile(rig.runtime, deployment_key("default", "d"))
    assert reads == []
    rig.cluster.change(ADAPTER, "a3", lambda spec: spec.update(defaultScale="0.5"))
    await reconcile(rig.runtime, deployment_key("default", "d"))
    assert reads == ["a3"]


async def test_at_rest_only_the_secret_that_cannot_be_read_is_looked_at_again() -> None:
    """Check that nothing but the Secret is written in 1300 s of rest.

    The operator may not read Secrets, so it creates the Secret, is refused because there is one, and patches it: twice in this time.
    """
    rig = await serving()
    places = count_writes(rig)
    await rig.run(1300)
    assert written(places) == [*(2 * ["create Secret d-control"]), *(2 * ["patch Secret d-control"])]


async def test_what_was_taken_from_a_spec_while_the_operator_was_away_is_taken_from_the_child() -> None:
    rig = await serving(service={"annotations": {"example.com/a": "1"}})
    before = _service(rig)["metadata"]["annotations"]
    assert before["example.com/a"] == "1"
    rig.cluster.on_change = lambda change, manifest: None
    rig.cluster.put(deployment(service={}))
    rig.cluster.on_change = rig._changed
    rig.restart_operator()
    await rig.run()
    after = _service(rig)["metadata"]["annotations"]
    assert "example.com/a" not in after
    assert after[ANNOTATION_APPLIED] != before[ANNOTATION_APPLIED]


def _service(rig: Rig) -> Manifest:
    return rig.cluster.find(SERVICE, "d") or {}


async def test_the_first_status_waits_for_the_first_pod_also_where_another_operator_made_it() -> None:
    """Record every status, and check that each lists the first pod's incarnation.

    If a status lacked it, the operator could later make another pod of that name.
    """
    rig, statuses = Rig(), []
    create, apply_status = rig.cluster.create, rig.cluster.apply_status

    async def create_after_the_other(manifest: Manifest) -> bool:
        await create(manifest)
        return await create(manifest) if manifest["kind"] == "Pod" else True

    async def note_status(kind: Kind, namespace: str, name: str, *, status: Manifest, version: str) -> None:
        statuses.append(status)
        await apply_status(kind, namespace, name, status=status, version=version)

    rig.cluster.create, rig.cluster.apply_status = create_after_the_other, note_status  # type: ignore[method-assign]
    rig.cluster.put(deployment())
    await rig.run(10)
    assert rig.cluster.names(POD) == ["d-0-0"]
    assert statuses and all(status["replicaStates"][0]["incarnation"] == 0 for status in statuses)
