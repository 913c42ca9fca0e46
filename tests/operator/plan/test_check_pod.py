# SPDX-License-Identifier: Apache-2.0
"""A check pod tries a changed template before the last serving replica goes for it. A template that fails there ends nothing."""

from typing import Any

import pytest

from diffusion_operator.api.names import DEPLOYMENT, LABEL_DEPLOYMENT, POD
from diffusion_operator.errors import ClusterRefused
from support.operator.rig import Rig, serving

NO_OPTION = "Error: No such option: --batch"
PULL = 'Back-off pulling image "typo:1": ErrImagePull: not found'
QUOTA = 'post pods default/*: 403 pods "d-check-1" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'
SURGE = {"maxSurge": 1, "maxUnavailable": 0}


def edit(rig: Rig, image: str) -> None:
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"image": image}))


def checks(rig: Rig) -> list[str]:
    return [name for name in rig.cluster.names(POD) if name.startswith("d-check-")]


async def follow(rig: Rig, seconds: int = 20) -> None:
    """Run passes for `seconds`, one a second, with a kubelet that starts each new replica."""
    for _ in range(seconds):
        await rig.run(1)
        if not checks(rig):
            rig.start_all()


async def edited(*, replicas: int = 1, **rollout: Any) -> tuple[Rig, str]:
    """Return a rig whose replicas serve and whose template has a new image, and the name of the check pod, which has not ended."""
    rig = await serving(replicas, rollout=rollout)
    rig.cluster.check_ends = None
    edit(rig, "typo:1")
    await rig.run(3)
    [check] = checks(rig)
    return rig, check


def is_stopped(rig: Rig, words: str) -> None:
    """Assert that the old replica serves on and the rollout says why, in an Event too."""
    assert rig.cluster.names(POD) == rig.routable() == ["d-0-0"]
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.condition("Progressing") == ("False", "TemplateInvalid")
    assert words in rig.message("Progressing")
    assert words in rig.cluster.notes("TemplateInvalid")[-1]


async def test_the_last_replica_goes_when_the_check_pod_has_accepted_the_template() -> None:
    rig, check = await edited()
    assert rig.routable() == ["d-0-0"]
    assert "a check pod tries the new template" in rig.message("Progressing")
    rig.cluster.check_ended(check, 0, "")
    await follow(rig)
    assert rig.cluster.names(POD) == ["d-0-1"]
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert "accepts the new options" in rig.cluster.notes("TemplateChecked")[0]


async def test_options_that_the_new_worker_refuses_end_nothing_until_an_edit() -> None:
    rig, check = await edited()
    rig.cluster.check_ended(check, 1, NO_OPTION)
    await rig.run(3600)
    is_stopped(rig, NO_OPTION)
    assert rig.cluster.names(POD) == ["d-0-0"], "it is tried once"
    writes = rig.cluster.status_writes
    rig.restart_operator()
    rig.cluster.check_ends = (1, NO_OPTION)
    await rig.run(60)
    assert rig.cluster.status_writes == writes, "a restarted operator says no other thing"
    rig.cluster.check_ends = (0, "")
    edit(rig, "right:1")
    await follow(rig)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert rig.cluster.names(POD) == ["d-0-1"]


async def test_an_edit_that_is_taken_back_needs_no_check_and_leaves_no_check_pod() -> None:
    rig, _ = await edited()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.pop("engine"))
    await rig.run(3)
    assert rig.cluster.names(POD) == rig.routable() == ["d-0-0"]
    assert rig.condition("Progressing") == ("True", "RolloutComplete")


async def test_an_image_that_cannot_be_pulled_ends_nothing_and_is_tried_again_until_it_is_there() -> None:
    rig, check = await edited()
    rig.cluster.waiting(check, "ErrImagePull", PULL)
    await rig.run(30)
    assert checks(rig) == [check], "the kubelet tries more than once"
    rig.cluster.waiting(check, "ImagePullBackOff", PULL)
    await rig.run(40)
    is_stopped(rig, PULL)
    rig.cluster.check_ends = (0, "")
    await follow(rig, 80)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert rig.cluster.names(POD) == ["d-0-1"]


async def test_a_check_pod_that_finds_no_node_is_given_up_at_the_deadline() -> None:
    rig, check = await edited(progressDeadlineSeconds=60)
    rig.cluster.unschedulable(check, "0/1 nodes are available: 1 node is tainted")
    await rig.run(50)
    assert rig.condition("Progressing") == ("True", "RolloutProgressing")
    await rig.run(20)
    is_stopped(rig, "1 node is tainted")


async def test_a_check_pod_that_a_quota_refuses_stops_the_rollout_until_there_is_room() -> None:
    rig = await serving(1)
    refusal = ClusterRefused(QUOTA, status=403)
    rig.cluster.refuse = lambda verb, manifest: refusal if manifest["metadata"]["name"].startswith("d-check-") else None
    edit(rig, "right:1")
    await follow(rig, 90)
    is_stopped(rig, "exceeded quota")
    rig.cluster.refuse = lambda verb, manifest: None
    await follow(rig, 70)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")


@pytest.mark.parametrize(
    "words", ["Error: No such option: --check Did you mean --check-sharing?", "error: unrecognized arguments: --check"]
)
async def test_an_image_that_knows_no_check_counts_as_pulled_and_it_is_said(words: str) -> None:
    rig, check = await edited()
    rig.cluster.check_ended(check, 2, words)
    await follow(rig)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert "its options are not checked" in rig.cluster.notes("TemplateChecked")[0]


LAST = [
    ("all go at once", 2, {"type": "Recreate"}, True),
    ("all may be missing", 2, {"maxUnavailable": "100%"}, True),
    ("a surge does not keep the last", 1, {"maxSurge": 1, "maxUnavailable": 1}, True),
    ("the new one comes first", 1, SURGE, False),
    ("another serves meanwhile", 2, {}, False),
]


@pytest.mark.parametrize(("replicas", "rollout", "runs"), [row[1:] for row in LAST], ids=[row[0] for row in LAST])
async def test_a_check_runs_only_where_the_last_serving_replica_would_go(replicas: int, rollout: dict[str, Any], runs: bool) -> None:
    rig = await serving(replicas, rollout=rollout)
    edit(rig, "new:1")
    await follow(rig, 30)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert bool(rig.cluster.notes("TemplateChecked")) is runs


async def test_a_replica_that_sleeps_is_the_last_one_too() -> None:
    rig = await serving(1, sleep={"policy": "Asleep"})
    await rig.run(30)
    rig.cluster.check_ends = (1, NO_OPTION)
    edit(rig, "new:1")
    await rig.run(30)
    assert rig.cluster.names(POD) == ["d-0-0"]
    assert rig.condition("Progressing") == ("False", "TemplateInvalid")


async def test_a_replica_that_serves_nothing_needs_no_check() -> None:
    rig = await serving(1)
    rig.cluster.crashed("d-0-0", code=1, message="no such model")
    edit(rig, "new:1")
    await follow(rig)
    assert rig.cluster.names(POD) == ["d-0-1"]
    assert not rig.cluster.notes("TemplateChecked")


async def test_a_check_pod_is_nobody_elses_and_never_in_the_service() -> None:
    rig, check = await edited()
    found = rig.cluster.find(POD, check)
    assert found is not None
    assert found["metadata"]["labels"][LABEL_DEPLOYMENT] == "d"
    assert check not in rig.routable()
    rig.cluster.remove(DEPLOYMENT, "d")
    assert rig.cluster.names(POD) == []
