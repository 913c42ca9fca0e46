# SPDX-License-Identifier: Apache-2.0
"""A changed template runs once in a *check pod* before the last serving replica goes for it.

A check pod has no device, no mounts and no source. It pulls the new container image and has the worker read the new options, by
`serve --check`. If that fails the old replica stays, since nothing else would serve. If a rollout leaves another serving replica, the next
replica itself is the trial.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.plan.observed.observed import Answer, Observed, TemplateCheck
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.observed.replica_state import QUIET_REASONS, Group, exit_text
from diffusion_operator.plan.replicas.rollout import to_replace, usable
from diffusion_operator.plan.replicas.template_trial import RETRY, WORDS, Trial, told_before
from diffusion_operator.plan.results.actions import CreateCheckPod, DeletePod
from diffusion_operator.plan.results.events import EventType, PlannedEvent

PULL_FOR = timedelta(minutes=1)
"""For a container that cannot be made: in that time the kubelet tries four times to pull an image."""

UNKNOWN_OPTION = ("no such option", "unrecognized arguments")


def with_check(trial: Trial, observed: Observed, present: Sequence[Group], *, revision: str, now: datetime) -> Trial:
    """Return the trial with the decisions about check pods: if old replicas wait for one, which to make and which to delete.

    `present` excludes replicas on their way out. No check pod is made before a dry run has passed.
    """
    spec, there = observed.deployment.spec, [pod for pod in observed.checks if not pod.terminating]
    going = to_replace(spec.rollout, present, replicas=spec.wanted_replicas, revision=revision) if spec.wanted_replicas else ()
    mine = next((pod for pod in there if pod.revision == revision), None)
    check = _known(observed, revision, now)
    if mine is not None and check.answer is Answer.UNDECIDED:
        check = _judged(check, mine, deadline_s=spec.rollout.progress_deadline_seconds, now=now)
    undecided = check.answer is Answer.UNDECIDED
    keeps = mine if undecided and any(group.pod.revision != revision for group in present) else None
    delete = tuple(DeletePod(name=pod.name, uid=pod.uid, why="its check is over") for pod in there if pod is not keeps)
    if trial.holds or check.answer is Answer.FINE or not _takes_the_last(going, present, revision):
        return msgspec.structs.replace(trial, check=check if mine is not None else observed.check, check_pods=delete)
    makes = undecided and not any(pod.revision == revision for pod in observed.checks)
    create = (CreateCheckPod(nodes=tuple(sorted({group.pod.node for group in going}))),) if makes else ()
    refusal = _failed(observed.refusal, "the operator tries again") if makes and observed.refusal else ""
    return Trial(refusal=check.message or refusal, again_at=check.again_at, stays=True, check=check, check_pods=(*create, *delete))


def checked(before: TemplateCheck | None, after: TemplateCheck | None) -> tuple[PlannedEvent, ...]:
    """Return the Event of a check that has just passed; none otherwise."""
    if after is None or after.answer is not Answer.FINE or (before is not None and before.answer is Answer.FINE):
        return ()
    return (PlannedEvent(type=EventType.NORMAL, reason="TemplateChecked", message=after.message, key=after.revision),)


def _takes_the_last(going: Sequence[Group], present: Sequence[Group], revision: str) -> bool:
    """Return whether no replica serves when these are gone, though one may serve now."""
    leaving = {group.pod.uid for group in going}
    return any(group.live for group in going) and not any(usable(group, revision) for group in present if group.pod.uid not in leaving)


def _known(observed: Observed, revision: str, now: datetime) -> TemplateCheck:
    """Return what is known of this template, or begin a check. After a failure the message stays until the next try is over."""
    known = observed.check
    if known is None or known.revision != revision:
        return TemplateCheck(revision=revision, since=now, message=told_before(observed.deployment.status, revision))
    if known.answer is Answer.REFUSED and known.again_at is not None and now >= known.again_at:
        return msgspec.structs.replace(known, answer=Answer.UNDECIDED, since=now, again_at=None)
    return known


def _judged(record: TemplateCheck, pod: Pod, *, deadline_s: int, now: datetime) -> TemplateCheck:
    """Return the record with the verdict of the check pod, or with the time at which one is due."""
    replace, ended, container = msgspec.structs.replace, pod.container.last_exit, pod.container
    pulled = "a check pod pulled the container image of the changed template, and its worker"
    if ended is not None and ended.code == 0:
        return replace(record, answer=Answer.FINE, message=f"{pulled} accepts the new options", again_at=None)
    if ended is not None and "--check" in ended.message and any(words in ended.message.lower() for words in UNKNOWN_OPTION):
        return replace(record, answer=Answer.FINE, message=f"{pulled} has no option --check, so its options are not checked", again_at=None)
    if ended is not None:
        return replace(record, answer=Answer.REFUSED, message=_failed(exit_text(ended), "correct the spec"), again_at=None)
    waits = container.waiting_reason not in QUIET_REASONS
    due = record.since + (PULL_FOR if waits else timedelta(seconds=deadline_s))
    if now < due and not pod.finished:
        return replace(record, again_at=due)
    why = f"{container.waiting_reason}: {container.waiting_message}" if waits else pod.finished_message or pod.unschedulable
    message = _failed(why or f"it did not end within {deadline_s} s", "correct the spec; the operator tries again every minute")
    return replace(record, answer=Answer.REFUSED, message=message, again_at=now + RETRY)


def _failed(words: str, advice: str) -> str:
    return f"the check pod of the changed template failed, so the last replica that serves stays: {words[:WORDS]}; {advice}"
