# SPDX-License-Identifier: Apache-2.0
"""Pods that an earlier object of the same name left behind: some are adopted, and the others are replaced."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from diffusion_operator.api.worker_state import ModelReport, WorkerPhase, WorkerState
from diffusion_operator.plan.deployment import DeploymentPlan, plan_deployment
from diffusion_operator.plan.observed.observed import Answer, Observed, Poll, TemplateCheck, TemplateTrial
from diffusion_operator.plan.observed.pods import Container, Pod
from diffusion_operator.plan.results.actions import AdoptPod, CreatePod, DeletePod, SetRoutable
from support.operator.plan_builders import NOW, REVISION, made, pod, says


def worker(digest: str | None = "sha256:m", **more: Any) -> WorkerState:
    return says(WorkerPhase.READY, model=ModelReport(digest=digest), **more)


def orphan(index: int = 0, **facts: Any) -> Pod:
    return pod(index, **{"orphan": True, "owner_uid": "earlier", "routable": True} | facts)


def plan(
    *pods: Pod, states: dict[int, WorkerState | None] | None = None, status: Any = None, tried: bool = True, **spec: Any
) -> DeploymentPlan:
    """Plan a deployment with these pods; `tried` says that a dry run and a check pod accepted the template."""
    polls = {one.uid: Poll(state=(states or {}).get(one.index, worker()), failures=0) for one in pods if one.container.running}
    trial = TemplateTrial(revision=REVISION, generation=3, answer=Answer.FINE, tried_at=NOW, since=NOW) if tried else None
    check = TemplateCheck(revision=REVISION, answer=Answer.FINE, since=NOW)
    deployment = made(status, **spec)
    return plan_deployment(Observed(deployment=deployment, default_image="worker:1", pods=pods, polls=polls, trial=trial, check=check), NOW)


def adopted(made_plan: DeploymentPlan) -> list[str]:
    return [action.name for action in made_plan.pods if isinstance(action, AdoptPod)]


def unrouted(made_plan: DeploymentPlan) -> list[str]:
    return [action.name for action in made_plan.pods if isinstance(action, SetRoutable) and not action.routable]


@dataclass
class Case:
    what: str
    pods: list[Pod]
    adopted: list[str]
    states: dict[int, WorkerState | None] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    why: str = ""


PINNED = {"model": {"source": "/m", "digest": "sha256:pinned"}}
CASES = [
    Case("the same template and model", [orphan(), orphan(1)], ["d-0-0", "d-1-0"]),
    Case("another template", [orphan(revision="another")], [], why="it was made of another template"),
    Case("made by the first version", [orphan(owner_uid="")], [], why="it does not name the DiffusionDeployment that it was made for"),
    Case(
        "another model than a replica has",
        [pod(routable=True), orphan(1)],
        [],
        {1: worker("sha256:x")},
        why="has a model with the digest sha256:x, expected sha256:m",
    ),
    Case("another model than the first one", [orphan(), orphan(1)], ["d-0-0"], {1: worker("sha256:x")}, why="digest sha256:x"),
    Case("another model than the pinned one", [orphan()], [], {}, PINNED, why="expected sha256:pinned"),
    Case("no digest yet", [orphan()], [], {0: worker(None)}),
    Case("never a digest", [orphan()], [], {0: worker(None, state_age_seconds=600.0)}, why="reports no digest"),
    Case("a digest that comes after a long load", [orphan(routable=False)], [], {0: says(WorkerPhase.STARTING, state_age_seconds=900.0)}),
    Case("no answer yet", [orphan()], [], {0: None}),
    Case("on its way out", [orphan(terminating=True)], []),
    Case("somebody's own pod", [pod()], []),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_an_orphan_is_adopted_where_its_template_and_its_model_are_the_same(case: Case) -> None:
    result = plan(*case.pods, states=case.states, status=case.status, replicas=len(case.pods))
    assert adopted(result) == case.adopted
    messages = " ".join(group.message for group in result.groups)
    assert case.why in messages
    assert ("an earlier DiffusionDeployment of this name left the pod, and it is replaced" in messages) is bool(case.why)
    assert bool(unrouted(result)) is bool(case.why), "only what is to be replaced loses its traffic"
    assert not [action for action in result.pods if isinstance(action, CreatePod)] or case.what == "on its way out"


def test_orphans_are_replaced_one_after_the_other() -> None:
    left = [orphan(index, revision="another") for index in range(3)]
    asked = plan(*left, replicas=3, tried=False)
    assert asked.trial.pod is not None, "the API server is asked whether it would make a pod before one goes"
    assert unrouted(asked) == []
    assert len(unrouted(plan(*left, replicas=3))) == 1


def test_an_orphan_that_goes_says_that_it_is_one() -> None:
    gone = plan(orphan(revision="another", routable=False))
    (action,) = [one for one in gone.pods if isinstance(one, DeletePod)]
    assert action.orphan
    assert "it was made of another template" in action.why


def test_an_orphan_whose_worker_takes_no_token_counts_as_serving_while_its_probe_passes() -> None:
    poll = Poll(failures=9, failing_for=timedelta(minutes=1), error="status 401")
    pods = tuple(orphan(index, owner_uid="") for index in range(2))
    observed = Observed(deployment=made(replicas=2), default_image="worker:1", pods=pods, polls={one.uid: poll for one in pods})
    assert [group.state.value for group in plan_deployment(observed, NOW).groups] == ["Awake", "Awake"]


def test_no_call_goes_to_the_worker_of_an_orphan() -> None:
    assert not plan(orphan(), states={0: worker(None)}, sleep={"policy": "Asleep"}).calls
    assert plan(pod(), sleep={"policy": "Asleep"}).calls


def test_an_orphan_that_ended_for_good_is_not_adopted() -> None:
    assert adopted(plan(orphan(finished=True, container=Container()))) == []
