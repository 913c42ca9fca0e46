# SPDX-License-Identifier: Apache-2.0
"""An object belongs to the release that its status names; another release steps back, and takes over when the first ended (faults 78 to
80).
"""

from datetime import timedelta
from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD, Kind
from diffusion_operator.election.lease import Manifest
from diffusion_operator.election.other_releases import OtherReleases
from diffusion_operator.errors import ClusterError, ClusterRefused
from support.operator.fake_cluster import FakeCluster
from support.operator.rig import Rig, adapter, deployment, serving, with_adapter

OURS, THEIRS = "ops/ours", "other/theirs"


def lease(renewed: str, *, holder: str | None = "them") -> Manifest:
    spec = {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}
    return {"metadata": {"uid": "u", "resourceVersion": "1"}, "spec": spec}


class TheirLease:
    """The Lease of the other release. Not real: everything else of an API server."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = lease("0")
        self.asked: list[tuple[str, str]] = []
        self.refusal: ClusterError | None = None

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        self.asked.append((namespace, name))
        if self.refusal is not None:
            raise self.refusal
        return self.manifest

    async def create(self, manifest: Manifest) -> bool:
        raise AssertionError("the Lease of another release is read only")

    async def merge(self, manifest: Manifest) -> Manifest:
        raise AssertionError("the Lease of another release is read only")


def managed(rig: Rig, release: str | None) -> None:
    """Write this release into all statuses, as its operator does; None removes the name."""
    for kind in (DEPLOYMENT, ADAPTER):
        for name in rig.cluster.names(kind):
            found = rig.cluster.find(kind, name)
            assert found is not None
            status = {key: value for key, value in found.get("status", {}).items() if key != "operator"}
            rig.cluster._changed(found, status=status | ({"operator": release} if release is not None else {}))


def versions(rig: Rig) -> dict[Any, str]:
    return {key: found["metadata"]["resourceVersion"] for key, found in rig.cluster._objects.items()}


def our_rig() -> Rig:
    rig = Rig()
    rig.runtime.release = OURS
    return rig


async def test_an_object_is_claimed_before_anything_is_made_for_it() -> None:
    rig = our_rig()
    statuses: list[tuple[dict[str, Any], list[str]]] = []
    write = rig.cluster.apply_status

    async def noted(*given: Any, status: dict[str, Any], version: str) -> None:
        statuses.append((status, rig.cluster.names(POD)))
        await write(*given, status=status, version=version)

    rig.cluster.apply_status = noted  # type: ignore[method-assign]
    rig.cluster.put(deployment())
    await rig.run()
    assert statuses[0] == ({"operator": OURS}, [])
    assert (rig.status()["operator"], rig.cluster.names(POD)) == (OURS, ["d-0-0"])


async def test_a_claim_is_one_write_in_an_objects_life() -> None:
    rig = our_rig()
    rig.cluster.put(deployment())
    await rig.run()
    rig.start_all()
    rig.cluster.put(adapter())
    await rig.run(30)
    assert (rig.status()["operator"], rig.adapter_status()["operator"]) == (OURS, OURS)
    before = rig.cluster.status_writes
    rig.restart_operator()
    rig.runtime.release = OURS
    await rig.run(60)
    assert rig.cluster.status_writes == before


async def test_what_another_release_manages_is_neither_written_nor_called() -> None:
    rig = await with_adapter()
    worker = next(iter(rig.workers))
    rig.runtime.release = OURS
    managed(rig, THEIRS)
    before, calls = versions(rig), list(worker.calls)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=3))
    rig.cluster.put(adapter("y", "/loras/y"))
    await rig.run(120)
    changed = {key for key, version in versions(rig).items() if before.get(key) != version}
    assert changed == {("DiffusionDeployment", "default", "d"), ("LoRAAdapter", "default", "y")}, "as the user left them"
    assert worker.calls == calls
    assert rig.errors == []
    assert set(rig.runtime.ready_reasons.values()) == {"ManagedByAnotherRelease"}


async def test_an_operator_without_election_steps_back_from_a_release_as_well_and_claims_nothing() -> None:
    rig = await serving()
    assert "operator" not in rig.status()
    managed(rig, THEIRS)
    before = versions(rig)
    await rig.run(120)
    assert versions(rig) == before


@pytest.mark.parametrize("there", [lease("0"), lease("0", holder=None), None], ids=["silent", "given up", "deleted"])
async def test_a_release_whose_lease_does_not_change_is_taken_over_from(there: Manifest | None) -> None:
    rig, theirs = await serving(), TheirLease()
    rig.runtime.release = OURS
    rig.runtime.others = OtherReleases(theirs, clock=lambda: rig.now.timestamp())
    managed(rig, THEIRS)
    for second in range(60):
        theirs.manifest = lease(str(second))
        await rig.run(1)
    assert rig.status()["operator"] == THEIRS
    theirs.manifest = there
    begun = rig.now
    while rig.status().get("operator") != OURS:
        await rig.run(1)
        assert rig.now - begun < timedelta(seconds=90)
    assert rig.now - begun >= timedelta(seconds=15)
    assert set(theirs.asked) == {("other", "theirs")}
    assert rig.states() == ["Awake"]


async def test_without_the_right_to_read_a_lease_nothing_is_taken_over_until_somebody_says_so() -> None:
    rig, theirs = await serving(), TheirLease()
    theirs.refusal = ClusterRefused("leases is forbidden", status=403, reason="Forbidden")
    rig.runtime.release = OURS
    rig.runtime.others = OtherReleases(theirs, clock=lambda: rig.now.timestamp())
    managed(rig, THEIRS)
    await rig.run(300)
    assert rig.status()["operator"] == THEIRS
    managed(rig, None)  # the command in docs/operations.md does the same
    await rig.run()
    assert rig.status()["operator"] == OURS


@pytest.mark.parametrize("name", ["theirs", "../secrets/x", "a/b/c", "Other/theirs", "other/the irs"])
async def test_a_name_in_a_status_that_is_none_of_a_lease_is_never_asked_for(name: str) -> None:
    theirs = TheirLease()
    seconds = iter(range(0, 1000, 10))
    others = OtherReleases(theirs, clock=lambda: next(seconds))
    assert [await others.has_expired(name) for _ in range(5)][-1], "no release has that name, so nobody is waited for"
    assert theirs.asked == []


async def test_a_claim_that_an_earlier_operator_overwrites_is_made_again_only_after_a_while() -> None:
    """Drop the release's name from a status, as an operator of commit 3e8db6b does. It is written again only later: two that write in
    turn would make 40 versions a second."""
    rig = our_rig()
    rig.cluster.put(deployment())
    await rig.run()
    rig.start_all()
    await rig.run()
    rig.restart_operator()
    rig.runtime.release = OURS
    managed(rig, None)
    await rig.run(1)
    assert rig.status()["operator"] == OURS, "one that begins claims what has no name"
    managed(rig, None)
    before = versions(rig)
    await rig.run(10)
    assert versions(rig) == before
    await rig.run(10)
    assert rig.status()["operator"] == OURS


async def test_a_claim_that_is_refused_holds_nothing_up() -> None:
    rig = our_rig()
    rig.cluster.refuse = lambda verb, _: ClusterRefused("no statuses", status=403, reason="Forbidden") if verb == "apply_status" else None
    rig.cluster.put(deployment())
    await rig.run()
    assert rig.cluster.names(POD) == ["d-0-0"]


async def test_two_releases_that_claim_at_once_leave_it_to_the_one_that_was_first() -> None:
    rig = our_rig()
    write = FakeCluster.apply_status
    raced: list[str] = []

    async def after_the_other(kind: Kind, namespace: str, name: str, *, status: dict[str, Any], version: str) -> None:
        if not raced:
            raced.append(name)
            managed(rig, THEIRS)
        await write(rig.cluster, kind, namespace, name, status=status, version=version)

    rig.cluster.apply_status = after_the_other  # type: ignore[method-assign]
    rig.cluster.put(deployment())
    await rig.run(60)
    assert (rig.status(), rig.cluster.names(POD), rig.errors) == ({"operator": THEIRS}, [], [])


async def test_a_status_is_not_written_over_a_version_that_the_pass_has_not_seen_and_the_next_pass_writes_it() -> None:
    rig = await serving()
    write = FakeCluster.apply_status
    raced: list[str] = []

    async def after_an_edit(kind: Kind, namespace: str, name: str, *, status: dict[str, Any], version: str) -> None:
        if not raced:
            raced.append(name)
            rig.cluster._changed(rig.cluster.find(kind, name) or {})
        await write(rig.cluster, kind, namespace, name, status=status, version=version)

    rig.cluster.apply_status = after_an_edit  # type: ignore[method-assign]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run(10)
    assert raced == ["d"]
    assert (rig.status()["observedGeneration"], len(rig.states()), rig.errors) == (2, 2, [])
