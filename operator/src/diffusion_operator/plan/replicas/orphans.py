# SPDX-License-Identifier: Apache-2.0
"""Pods that an earlier object of the deployment's name left behind, as `kubectl delete --cascade=orphan` does.

A pod of the same template, whose worker reports the same model, is adopted and serves on. The others are replaced like replicas of an
older template: one after the other, as `spec.rollout` allows.
"""

from collections.abc import Iterator

import msgspec

from diffusion_operator.api.worker_state import WorkerState
from diffusion_operator.plan.observed.observed import Observed, Poll
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.observed.states import RESTING_PHASES, SERVING_PHASES
from diffusion_operator.plan.results.actions import AdoptPod

DIGEST_WITHIN_S = 600.0
"""A worker hashes the files of its model after they are loaded, which takes minutes for large ones."""


def judge_orphans(observed: Observed, *, revision: str) -> tuple[Observed, tuple[AdoptPod, ...]]:
    """Return what was observed, with the reason at each orphan that is to be replaced, and the adoptions of those that agree.

    Orphans whose worker has yet to say which model it has are in neither group.
    """
    if not any(pod.orphan for pod in observed.pods):
        return observed, ()
    digest = _expected_digest(observed, revision)
    judged = tuple(_judged(pod, observed.polls.get(pod.uid, Poll()), digest, revision) for pod in observed.pods)
    polls = observed.polls
    adopted = tuple(AdoptPod(name=pod.name, uid=pod.uid, index=pod.index) for pod in judged if _agrees(pod, polls.get(pod.uid), digest))
    return msgspec.structs.replace(observed, pods=judged), adopted


def _judged(pod: Pod, poll: Poll, digest: str | None, revision: str) -> Pod:
    """Return the pod; an orphan that must be replaced gets the reason in `left`, and no revision any more.

    So it counts as a pod of another template.
    """
    if not pod.orphan or pod.terminating or not (why := _why_pod_is_replaced(pod, poll, digest, revision)):
        return pod
    left = f"an earlier DiffusionDeployment of this name left the pod, and it is replaced, because {why}"
    return msgspec.structs.replace(pod, left=left, revision="")


def _why_pod_is_replaced(pod: Pod, poll: Poll, digest: str | None, revision: str) -> str:
    """Return why an orphan is to be replaced; empty if it agrees, or has yet to say which model it has."""
    if not pod.owner_uid:
        return "it does not name the DiffusionDeployment that it was made for"
    if pod.revision != revision:
        return "it was made of another template"
    if poll.unreachable:
        return f"its worker does not answer the operator: {poll.error}"
    if poll.state is None:
        return ""
    found = poll.state.model.digest
    if found is None:
        return "its worker reports no digest of its model after ten minutes" if _should_know(poll, poll.state) else ""
    return "" if found == digest else f"its worker has a model with the digest {found}, expected {digest}"


def _should_know(poll: Poll, state: WorkerState) -> bool:
    return state.state in SERVING_PHASES + RESTING_PHASES and poll.state_age_s >= DIGEST_WITHIN_S


def _agrees(pod: Pod, poll: Poll | None, digest: str | None) -> bool:
    adoptable = pod.orphan and not pod.left and not pod.terminating and not pod.finished
    return adoptable and poll is not None and poll.fresh and poll.state is not None and poll.state.model.digest == digest is not None


def _expected_digest(observed: Observed, revision: str) -> str | None:
    """Return the pinned digest of the model, else that of a replica that is there already, else that of the first orphan, else None."""
    pinned = observed.deployment.status.model
    if pinned is not None and pinned.digest is not None:
        return pinned.digest
    return next(_reported(observed, revision), None)


def _reported(observed: Observed, revision: str) -> Iterator[str]:
    for pod in sorted(observed.pods, key=lambda pod: (pod.orphan, pod.index, pod.incarnation)):
        state = observed.polls.get(pod.uid, Poll()).state
        comparable = pod.revision == revision and (pod.owner_uid or not pod.orphan)
        if comparable and state is not None and state.model.digest is not None:
            yield state.model.digest
