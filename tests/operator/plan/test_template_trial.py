# SPDX-License-Identifier: Apache-2.0
"""A changed template is tried by a dry run before an old replica is removed for it. A refused template removes nothing."""

from datetime import timedelta
from typing import Any

import pytest

from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.errors import ClusterError, ClusterRefused, ClusterUnavailable
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment
from diffusion_operator.plan.observed.observed import Answer, Observed, Poll, TemplateTrial
from diffusion_operator.plan.replicas.template_trial import RETRY, UNDECIDED_FOR, answer_of
from diffusion_operator.plan.results.actions import CreatePod, DeletePod
from support.operator.plan_builders import NOW, READY, REVISION, made, pod
from support.operator.rig import Rig, serving

INVALID = 'post pods default/*: 422 Pod "d-0-1" is invalid: spec.containers[0].resources.requests: Invalid value: "2": must be <= limit'
POLICY = "post pods default/*: 403 pods \"d-0-1\" is forbidden: ValidatingAdmissionPolicy 'p' denied request: no"
WEBHOOK = 'post pods default/*: 400 admission webhook "w" denied the request: no'
QUOTA = 'post pods default/*: 403 pods "d-0-1" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'
REFUSALS = [(422, INVALID), (403, POLICY), (400, WEBHOOK)]
OTHERS = [
    ClusterRefused(QUOTA, status=403),
    ClusterRefused('post pods default/*: 400 admission webhook "w" does not support dry run', status=400),
    ClusterUnavailable("post pods default/*: 429 too many requests", status=429),
    ClusterUnavailable("post pods default/*: 500 failed calling webhook", status=500),
    ClusterUnavailable("post pods default/*: TimeoutError"),
    ClusterRefused('post pods default/*: 403 pods is forbidden: User "o" cannot create resource "pods"', status=403),
]


@pytest.mark.parametrize(
    ("status", "message", "answer"),
    [
        *((status, message, Answer.REFUSED) for status, message in REFUSALS),
        (403, 'pods "d-0-1" is forbidden: violates PodSecurity "restricted:latest": privileged', Answer.REFUSED),
        (403, 'pods "d-0-1" is forbidden: maximum cpu usage per Container is 1, but limit is 2', Answer.REFUSED),
        (403, QUOTA, Answer.FINE),
        (400, 'admission webhook "w" does not support dry run', Answer.FINE),
        (403, 'pods is forbidden: User "o" cannot create resource "pods" in API group ""', Answer.UNDECIDED),
        (404, 'namespaces "n" not found', Answer.UNDECIDED),
        (429, "too many requests", Answer.UNDECIDED),
        (500, "failed calling webhook", Answer.UNDECIDED),
        (0, "TimeoutError", Answer.UNDECIDED),
    ],
)
def test_an_answer_is_about_the_template_or_not(status: int, message: str, answer: Answer) -> None:
    assert answer_of(status, message) is answer


def tried(
    answer: Answer = Answer.REFUSED, *, ago: timedelta = timedelta(0), revision: str = REVISION, generation: int = 3
) -> TemplateTrial:
    return TemplateTrial(revision=revision, generation=generation, answer=answer, tried_at=NOW - ago, since=NOW - ago, message=INVALID)


def looked(trial: TemplateTrial | None, *, revision: str = "old-1", status: dict[str, Any] | None = None, **spec: Any) -> DeploymentPlan:
    """Plan a deployment with two serving replicas of an older template."""
    pods = tuple(pod(index, revision=revision, routable=True) for index in range(2))
    polls = {one.uid: Poll(state=READY) for one in pods}
    deployment = made(status, **({"replicas": 2} | spec))
    return plan_deployment(Observed(deployment=deployment, default_image="worker:1", pods=pods, polls=polls, trial=trial), NOW)


def retired(plan: DeploymentPlan) -> bool:
    """Return true if the plan does anything to a pod but create it.

    Taking it out of the Service counts, because every removal begins so.
    """
    return bool([one for one in plan.pods if not isinstance(one, CreatePod)])


SURGE = {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}
RECREATE = {"rollout": {"type": "Recreate"}}
LONG = timedelta(hours=1)
PLANS = [
    ("an unknown template is tried, and nothing goes or comes", None, {}, True, False, None),
    ("nor by surge", None, SURGE, True, False, None),
    ("nor to make room for all", None, RECREATE, True, False, None),
    ("a fine one is rolled out and not tried again", tried(Answer.FINE, ago=LONG), {}, False, True, None),
    ("a refused one is let alone", tried(ago=timedelta(seconds=20)), {}, False, False, 40.0),
    ("also by Recreate", tried(ago=timedelta(seconds=20)), RECREATE, False, False, 40.0),
    ("and tried each minute", tried(ago=RETRY), {}, True, False, 0.5),
    ("and when the spec changes", tried(generation=2), {}, True, False, 0.5),
    ("what was said of another template says nothing", tried(revision="other"), {}, True, False, None),
    ("no answer is waited for", tried(Answer.UNDECIDED, ago=timedelta(seconds=2)), {}, False, False, 3.0),
    ("and asked for again", tried(Answer.UNDECIDED, ago=timedelta(seconds=5)), {}, True, False, 0.5),
    ("and not for ever", tried(Answer.UNDECIDED, ago=UNDECIDED_FOR), {}, False, True, None),
]


@pytest.mark.parametrize(("trial", "spec", "asks", "goes", "again_s"), [row[1:] for row in PLANS], ids=[row[0] for row in PLANS])
def test_of_a_trial_comes(trial: TemplateTrial | None, spec: dict[str, Any], asks: bool, goes: bool, again_s: float | None) -> None:
    plan = looked(trial, **spec)
    assert (plan.trial.pod is not None, retired(plan)) == (asks, goes)
    assert again_s is None or plan.look_again_s == again_s
    if not goes:
        assert not plan.pods


def test_the_pod_that_is_tried_has_a_name_that_a_next_one_may_have() -> None:
    assert looked(None).trial.pod == CreatePod(index=0, incarnation=1)


@pytest.mark.parametrize("spec", [{"replicas": 0}, {"suspend": True}])
def test_nothing_is_tried_where_no_pod_is_to_be_made(spec: dict[str, Any]) -> None:
    plan = looked(None, **spec)
    assert plan.trial.pod is None
    assert retired(plan)


def test_nothing_is_tried_where_nothing_changed() -> None:
    assert looked(None, revision=REVISION).trial.pod is None


def test_a_refused_template_does_not_keep_replicas_from_being_fewer() -> None:
    plan = looked(tried(), replicas=1)
    assert [one for one in plan.pods if not isinstance(one, DeletePod)], "one is unrouted"
    assert plan.status.conditions[2].reason == "TemplateInvalid"


def refused(rig: Rig, error: ClusterError, *, value: str = "bad") -> None:
    """Let the API server refuse each pod whose container has the variable A with this value."""

    def judge(_verb: str, manifest: dict[str, Any]) -> ClusterError | None:
        containers = manifest["spec"]["containers"] if manifest["kind"] == POD.kind else []
        return error if any({"name": "A", "value": value} in one["env"] for one in containers[:1]) else None

    rig.cluster.refuse = judge


def edit(rig: Rig, value: str, **more: Any) -> None:
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"env": [{"name": "A", "value": value}]}, **more))


async def follow(rig: Rig, seconds: int = 20) -> None:
    """Run passes for `seconds`, one a second, with a kubelet that starts each new pod."""
    for _ in range(seconds):
        await rig.run(1)
        rig.start_all()


@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 1, "maxUnavailable": 0}, {"type": "Recreate"}], ids=str)
@pytest.mark.parametrize(("status", "message"), REFUSALS)
async def test_the_old_replicas_serve_on_when_no_pod_can_be_made_of_an_edit(rollout: dict[str, Any], status: int, message: str) -> None:
    rig = await serving(2, rollout=rollout)
    before, events = rig.cluster.names(POD), len(rig.cluster.events())
    refused(rig, ClusterRefused(message, status=status))
    edit(rig, "bad")
    await follow(rig)
    assert rig.cluster.names(POD) == rig.routable() == before
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.condition("Available") == ("True", "MinimumAvailable")
    assert rig.condition("Scheduled") == ("True", "AllScheduled")
    assert rig.condition("Progressing") == ("False", "TemplateInvalid")
    assert message in rig.message("Progressing")
    assert rig.cluster.events()[events:] == ["TemplateInvalid"]
    assert message in rig.cluster.notes("TemplateInvalid")[0]
    assert len(rig.cluster.dry_runs) == 1, "not in each pass"
    assert rig.errors == []


async def test_a_refused_edit_is_tried_each_minute_and_rolled_out_when_the_policy_goes() -> None:
    rig = await serving(2, rollout={"progressDeadlineSeconds": 60})
    refused(rig, ClusterRefused(POLICY, status=403))
    edit(rig, "bad")
    await rig.run(600)
    assert len(rig.cluster.dry_runs) in (10, 11)
    assert rig.condition("Progressing") == ("False", "TemplateInvalid"), "there is no rollout whose deadline could pass"
    writes = rig.cluster.status_writes
    await rig.run(300)
    assert rig.cluster.status_writes == writes
    rig.cluster.refuse = lambda verb, manifest: None
    await follow(rig, 90)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert set(rig.cluster.names(POD)) == {"d-0-1", "d-1-1"}
    assert rig.cluster.events().count("TemplateInvalid") == 1


async def test_a_corrected_edit_is_tried_at_once_and_one_taken_back_needs_no_trial() -> None:
    rig = await serving(2)
    refused(rig, ClusterRefused(INVALID, status=422))
    edit(rig, "bad")
    await follow(rig)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.pop("engine"))
    await follow(rig, 3)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert (rig.cluster.names(POD), len(rig.cluster.dry_runs)) == (["d-0-0", "d-1-0"], 1)
    edit(rig, "bad")
    await follow(rig, 3)
    edit(rig, "good")
    await follow(rig)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert set(rig.cluster.names(POD)) == {"d-0-1", "d-1-1"}


@pytest.mark.parametrize("error", OTHERS, ids=str)
async def test_what_says_nothing_of_the_template_does_not_hold_a_rollout_up(error: ClusterError) -> None:
    rig = await serving(2)
    tries = rig.cluster.try_create

    async def try_create(manifest: dict[str, Any]) -> None:
        await tries(manifest)
        raise error

    rig.cluster.try_create = try_create  # type: ignore[method-assign]
    edit(rig, "good")
    await follow(rig, 60)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert "TemplateInvalid" not in rig.cluster.events()
    assert 1 <= len(rig.cluster.dry_runs) <= 7
    assert rig.errors == []


async def test_a_restarted_operator_says_no_other_thing_of_a_refused_template() -> None:
    rig = await serving(2)
    refused(rig, ClusterRefused(INVALID, status=422))
    edit(rig, "bad")
    await follow(rig, 5)
    writes, told = rig.cluster.status_writes, rig.message("Progressing")
    rig.restart_operator()
    await follow(rig, 30)
    assert rig.cluster.status_writes == writes
    assert rig.message("Progressing") == told
    assert len(rig.cluster.dry_runs) == 2
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]


async def test_a_fine_edit_costs_one_dry_run() -> None:
    rig = await serving(3)
    edit(rig, "good")
    await follow(rig)
    assert rig.condition("Progressing") == ("True", "RolloutComplete")
    assert rig.cluster.dry_runs == ["d-0-1"]


async def test_a_first_start_costs_none() -> None:
    assert (await serving(2)).cluster.dry_runs == []


async def test_replicas_that_fail_are_not_given_up_for_a_template_that_cannot_be_made() -> None:
    rig = await serving(2)
    refused(rig, ClusterRefused(INVALID, status=422))
    edit(rig, "bad")
    await follow(rig, 5)
    rig.cluster.crashed("d-0-0", code=70, message="rank 1 died", restarts=9)
    await follow(rig, 120)
    assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"]
    assert rig.condition("Ready")[0] == "True"
    assert rig.condition("Progressing") == ("False", "TemplateInvalid")


async def test_a_trial_that_fails_in_a_way_nobody_expected_ends_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await serving(1)
    rig.survives = Exception

    async def broken(_: Any) -> None:
        raise ValueError("nobody expected this")

    monkeypatch.setattr(rig.cluster, "try_create", broken)
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(engine={"maxBatchSize": 2}))
    await rig.run(3)
    assert rig.status()["observedGeneration"] == 2
    assert rig.condition("Ready") == ("True", "Serving")
    assert "nobody expected this" in rig.errors
