# SPDX-License-Identifier: Apache-2.0
"""Events and conditions for refused pods, images that cannot be pulled, a suspend, and a lost control Secret."""

import pytest

from diffusion_operator.api.names import DEPLOYMENT, POD, SECRET
from diffusion_operator.errors import ClusterRefused
from support.operator.rig import Rig, deployment, serving

QUOTA = 'pods "d-0-0" is forbidden: exceeded quota: q'
POLICY = 'pods "d-0-0" is forbidden: violates PodSecurity "restricted:latest"'


@pytest.mark.parametrize(("words", "reason"), [(QUOTA, "QuotaExceeded"), (POLICY, "PodsRefused")])
async def test_a_refused_pod_is_an_event_once_and_degraded_until_it_is_made(words: str, reason: str) -> None:
    rig = Rig()
    refusal = ClusterRefused(words, status=403)
    rig.cluster.refuse = lambda verb, manifest: refusal if manifest["kind"] == POD.kind else None
    rig.cluster.put(deployment())
    await rig.run(120)
    assert rig.cluster.notes(reason) == [words]
    assert rig.condition("Degraded") == ("True", reason)
    assert rig.message("Degraded") == words
    rig.cluster.refuse = lambda verb, manifest: None
    await rig.run(60)
    rig.start_all()
    await rig.run(10)
    assert rig.condition("Degraded") == ("False", "AsExpected")


async def test_a_replica_that_is_refused_beside_one_that_serves_is_degraded() -> None:
    rig = await serving(1)
    refusal = ClusterRefused(QUOTA, status=403)
    rig.cluster.refuse = lambda verb, manifest: refusal if (verb, manifest["kind"]) == ("create", POD.kind) else None
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run(30)
    assert (rig.condition("Ready"), rig.condition("Degraded")) == (("True", "ServingDegraded"), ("True", "QuotaExceeded"))
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=1))
    await rig.run(30)
    assert rig.condition("Degraded") == ("False", "AsExpected"), "nothing is missing"


async def test_an_image_that_cannot_be_pulled_is_an_event_once() -> None:
    rig = Rig()
    rig.cluster.put(deployment())
    await rig.run()
    for reason in ("ErrImagePull", "ImagePullBackOff", "ErrImagePull"):
        rig.cluster.waiting("d-0-0", reason, "registry.invalid/none:1: not found")
        await rig.run(10)
    (note,) = rig.cluster.notes("ImagePullError")
    assert note == "replica 0: ErrImagePull: registry.invalid/none:1: not found"


async def test_a_suspend_and_its_end_are_events() -> None:
    rig = await serving(1)
    for suspend in (True, False, True):
        rig.cluster.change(DEPLOYMENT, "d", lambda spec, suspend=suspend: spec.update(suspend=suspend))
        await rig.run(20)
        rig.start_all()
        await rig.run(10)
    assert (len(rig.cluster.notes("Suspended")), len(rig.cluster.notes("Resumed"))) == (2, 1)


async def test_the_control_secret_is_there_before_each_pod_is_made() -> None:
    rig = await serving(1)
    rig.cluster.remove(SECRET, "d-control")
    there: list[bool] = []

    def look(verb: str, manifest: dict[str, object]) -> None:
        if (verb, manifest["kind"]) == ("create", POD.kind):
            there.append(rig.cluster.find(SECRET, "d-control") is not None)

    rig.cluster.refuse = look  # type: ignore[assignment]
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
    await rig.run()
    assert there == [True]
    assert rig.cluster.names(SECRET) == ["d-control"]
