# SPDX-License-Identifier: Apache-2.0
"""A changed template is tried before an old replica goes for it: the API server is asked whether it would make such a pod.

A dry run goes through defaults, validation and admission, and makes nothing. A template that is refused there would leave nothing that
serves: the old replica is gone and the new one cannot be made. So the old ones stay until the spec or the policy changes. A full quota
says nothing of the template, since the old replica gives its share back: the rollout goes on.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import condition_of
from diffusion_operator.plan.observed.observed import Answer, Observed, TemplateCheck, TemplateTrial
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.replicas.scaling import pods_to_make
from diffusion_operator.plan.results.actions import CreateCheckPod, CreatePod, DeletePod

TEMPLATE_INVALID = "TemplateInvalid"
WORDS = 1200
"""Characters of the API server's words that a condition repeats."""
RETRY = timedelta(minutes=1)
"""A refused template is tried again after so long, because a policy may go away."""
UNDECIDED_RETRY = timedelta(seconds=5)
UNDECIDED_FOR = timedelta(seconds=30)
"""After so long without an answer to the point the rollout goes on: a dry run is not what keeps a cluster from working."""

_INVALID = (400, 422)
_FORBIDDEN = 403


class Trial(msgspec.Struct, frozen=True):
    pod: CreatePod | None = None
    """To be tried now."""
    holds: bool = False
    """No replica goes for the template's sake or for a new pod, as there may be none."""
    refusal: str = ""
    """The message of the condition, empty where the template is not refused."""
    again_at: datetime | None = None
    """When it is to be tried once more, or time alone changes the outcome."""
    stays: bool = False
    """No replica goes for the template's sake, as its check pod has not passed; see check_pod.py."""
    check: TemplateCheck | None = None
    """To be remembered."""
    check_pods: tuple[CreateCheckPod | DeletePod, ...] = ()


def plan_trial(observed: Observed, present: Sequence[Group], *, revision: str, now: datetime) -> Trial:
    """Decide if a dry run of a pod of the new template is due, and if old replicas must stay meanwhile.

    `present` excludes replicas on their way out. Nothing is tried if it is empty, if a replica has the new template already, or if the spec
    wants no replicas.
    """
    made = not present or any(group.pod.revision == revision for group in present)
    if made or not observed.deployment.spec.wanted_replicas:
        return Trial()
    known = observed.trial if observed.trial is not None and observed.trial.revision == revision else None
    if known is None:
        refusal = told_before(observed.deployment.status, revision)
        return Trial(pod=_next_pod(observed), holds=True, refusal=refusal)
    if known.answer is Answer.REFUSED:
        changed = known.generation != observed.deployment.metadata.generation
        due = changed or now - known.tried_at >= RETRY
        again_at = known.tried_at + RETRY
        return Trial(pod=_next_pod(observed) if due else None, holds=True, refusal=_message(known.message), again_at=again_at)
    if known.answer is Answer.FINE or now - known.since >= UNDECIDED_FOR:
        return Trial()
    again_at = known.tried_at + UNDECIDED_RETRY
    return Trial(pod=_next_pod(observed) if now >= again_at else None, holds=True, again_at=again_at)


def answer_of(status: int, message: str) -> Answer:
    """Judge a template by the HTTP status and message with which a dry run of its pod failed; status 0 means no answer.

    Fine: an exceeded quota, or a webhook that does not support dry runs; neither is about the template. Refused: other answers with 400,
    422, or 403 unless it is the operator that lacks the right. Policies, Pod Security and LimitRanges use 403 or 422, a webhook 400 by
    default. Undecided: everything else.
    """
    if status == _FORBIDDEN and "exceeded quota" in message:
        return Answer.FINE  # quota is looked at last: everything else was taken
    if "dry run" in message and "not support" in message:
        return Answer.FINE
    if status in _INVALID or (status == _FORBIDDEN and "cannot create resource" not in message):
        return Answer.REFUSED
    return Answer.UNDECIDED


def remembered(before: TemplateTrial | None, trial: TemplateTrial) -> TemplateTrial:
    """Return `trial`; if `before` has the same template and answer, with its `since`, the time of the first such answer in a row."""
    same = before is not None and (before.revision, before.answer) == (trial.revision, trial.answer)
    return msgspec.structs.replace(trial, since=before.since) if same and before is not None else trial


def _next_pod(observed: Observed) -> CreatePod:
    """Return the pod to try in a dry run: replica 0, with an incarnation above all that were seen there, so its name is free."""
    (first,) = pods_to_make(frozenset(), 1, observed)
    return first


def _message(words: str) -> str:
    text = f"a pod of the changed template is refused, so the old replicas stay: {words[:WORDS]}"
    return f"{text}; correct the spec, or the policy that refuses the pod; the operator tries again every minute"


def told_before(status: DeploymentStatus, revision: str) -> str:
    """Return the message of the condition Progressing if it already reports this template as invalid; else an empty string.

    So the message stays while a restarted operator tries the template again.
    """
    told = condition_of(status.conditions, "Progressing")
    same = told is not None and told.reason == TEMPLATE_INVALID and status.update_revision == revision
    return told.message if same and told is not None else ""
