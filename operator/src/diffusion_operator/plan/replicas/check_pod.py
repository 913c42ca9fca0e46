# SPDX-License-Identifier: Apache-2.0
"""A changed template runs once in a *check pod* before the last serving replica goes for it.

A check pod has no device, no mounts and no source. It pulls the new container image and has the worker read the new options, by
`serve --check`. If that fails the old replica stays, since nothing else would serve. If a rollout leaves another serving replica, the next
replica itself is the trial.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.meta import condition_of
from diffusion_operator.plan.observed.observed import Answer, Observed, TemplateCheck
from diffusion_operator.plan.observed.pods import Exit, Pod
from diffusion_operator.plan.observed.replica_state import QUIET_REASONS, Group, exit_text
from diffusion_operator.plan.replicas.rollout import to_replace, usable
from diffusion_operator.plan.replicas.template_trial import RETRY, WORDS
from diffusion_operator.plan.results.actions import DeletePod
from diffusion_operator.plan.results.events import EventType, PlannedEvent

FAILED = "the check pod of the changed template"
"""The beginning of the condition's message."""
WAITS_FOR = timedelta(minutes=1)
"""For a container that cannot be made: in that time the kubelet tries four times to pull an image."""

ACCEPTED = "a check pod pulled the container image of the changed template, and its worker accepts the new options"
PULLED = "a check pod pulled the container image of the changed template; its worker knows no --check, so its options are not checked"


class Check(msgspec.Struct, frozen=True):
    record: TemplateCheck | None = None
    """To be remembered."""
    makes: bool = False
    """The check pod is to be made."""
    nodes: tuple[str, ...] = ()
    """Nodes of the replicas that would go: the check pod goes there if it can, and leaves them the container image."""
    delete: tuple[DeletePod, ...] = ()
    holds: bool = False
    """No replica goes for the template's sake."""
    refusal: str = ""
    """The message of the condition, empty where the check has not failed."""
    again_at: datetime | None = None
    """When time alone changes the outcome."""

    @property
    def runs(self) -> bool:
        return self.holds and not self.refusal


def plan_check(observed: Observed, present: Sequence[Group], *, revision: str, now: datetime, tried: bool) -> Check:
    """Decide if old replicas wait for a check pod, if one is to be made, and which are to be deleted.

    `present` excludes replicas on their way out. Nothing is made before the template is `tried` by a dry run.
    """
    spec, there = observed.deployment.spec, [pod for pod in observed.checks if not pod.terminating]
    going = to_replace(spec.rollout, present, replicas=spec.wanted_replicas, revision=revision) if spec.wanted_replicas else ()
    record = _record(observed, revision, now)
    mine = next((pod for pod in there if pod.revision == revision), None)
    if mine is not None and record.answer is Answer.UNDECIDED:
        record = _judged(record, mine, timedelta(seconds=spec.rollout.progress_deadline_seconds), now)
    rolling = tried and any(group.pod.revision != revision for group in present)
    keeps = mine if rolling and record.answer is Answer.UNDECIDED else None
    delete = tuple(DeletePod(name=pod.name, uid=pod.uid, why="its check is over") for pod in there if pod is not keeps)
    if not tried or not _takes_the_last(going, present, revision) or record.answer is Answer.FINE:
        return Check(record=record if mine is not None else observed.check, delete=delete)
    return Check(
        record=record,
        makes=record.answer is Answer.UNDECIDED and not any(pod.revision == revision for pod in observed.checks),
        nodes=tuple(sorted({group.pod.node for group in going})),
        delete=delete,
        holds=True,
        refusal=record.message,
        again_at=record.again_at,
    )


def refused(record: TemplateCheck, words: str, *, again_at: datetime | None) -> TemplateCheck:
    """Return the record of a check that failed, or whose pod was refused; without `again_at` it waits for an edit."""
    advice = "; the operator tries again every minute" if again_at is not None else ""
    message = f"{FAILED} failed, so the last replica that serves stays: {words[:WORDS]}; correct the spec{advice}"
    return msgspec.structs.replace(record, answer=Answer.REFUSED, message=message, again_at=again_at)


def checked(before: TemplateCheck | None, after: TemplateCheck | None) -> tuple[PlannedEvent, ...]:
    """Return the Event of a check that has just passed, as a tuple of one."""
    if after is None or after.answer is not Answer.FINE or (before is not None and before.answer is Answer.FINE):
        return ()
    return (PlannedEvent(type=EventType.NORMAL, reason="TemplateChecked", message=after.words, key=after.revision),)


def _takes_the_last(going: Sequence[Group], present: Sequence[Group], revision: str) -> bool:
    """Return whether no replica serves when these are gone, though one may serve now."""
    leaving = {group.pod.uid for group in going}
    return any(group.live for group in going) and not any(usable(group, revision) for group in present if group.pod.uid not in leaving)


def _record(observed: Observed, revision: str, now: datetime) -> TemplateCheck:
    """Return what is known of this template, or begin a check; one that failed keeps its message until the next try is over."""
    known, generation = observed.check, observed.deployment.metadata.generation
    if known is None or known.revision != revision:
        told = condition_of(observed.deployment.status.conditions, "Progressing")
        same = told is not None and told.message.startswith(FAILED) and observed.deployment.status.update_revision == revision
        return TemplateCheck(revision=revision, generation=generation, since=now, message=told.message if same and told is not None else "")
    again = known.generation != generation or (known.again_at is not None and now >= known.again_at)
    if known.answer is Answer.REFUSED and again:
        return TemplateCheck(revision=revision, generation=generation, since=now, message=known.message)
    return known


def _judged(record: TemplateCheck, pod: Pod, deadline: timedelta, now: datetime) -> TemplateCheck:
    """Return the record with the verdict of the check pod, or with the time at which one is due."""
    ended, waits = pod.container.last_exit, pod.container.waiting_reason
    if ended is not None and (ended.code == 0 or _knows_no_check(ended)):
        words = PULLED if ended.code else ACCEPTED
        return msgspec.structs.replace(record, answer=Answer.FINE, words=words, message="", again_at=None)
    if ended is not None:
        return refused(record, exit_text(ended), again_at=None)
    since = (record.waits_since or now) if waits not in QUIET_REASONS else None
    words = pod.finished_message or (f"{waits}: {pod.container.waiting_message}" if since is not None else pod.unschedulable)
    due = since + WAITS_FOR if since is not None else record.since + deadline
    if pod.finished or now >= due:
        late = words or f"it did not end within {deadline.total_seconds():.0f} s (spec.rollout.progressDeadlineSeconds)"
        return refused(record, late, again_at=now + RETRY)
    return msgspec.structs.replace(record, waits_since=since, words=words, again_at=due)


def _knows_no_check(ended: Exit) -> bool:
    """Return whether a worker ended because it is older than this option, as parsers of command lines say it."""
    return "--check" in ended.message and any(words in ended.message.lower() for words in ("no such option", "unrecognized arguments"))
