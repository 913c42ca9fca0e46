# SPDX-License-Identifier: Apache-2.0
"""The last steps of a replica that is to go: its pod is unrouted, its worker drained through the control port, its pod deleted.

A worker that may have a request is drained, also where its last word had none: counts in it may be fifteen seconds old. The pod of
one that sleeps without requests is deleted at once. So is that of a worker which does not take the call, or has no such call. The end
of the pod then drains it to the same bound.
"""

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.worker_state import WorkerPhase, WorkerState
from diffusion_operator.plan.observed.observed import Observed, Poll
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.results.actions import DeletePod, DrainWorker, WorkerAddress

UNROUTE_BEFORE = timedelta(seconds=2)
"""Until every node has heard that a pod is not routed to any more."""
ACCEPTING = (WorkerPhase.READY, WorkerPhase.RESTARTING)
"""States in which a worker takes requests without holding them, which it reports at once."""
MARGIN_S = 15.0
"""A worker ends its drain by itself at the deadline. So long after it the pod is deleted in any case."""


class Departure(msgspec.Struct, frozen=True):
    drain: tuple[DrainWorker, ...] = ()
    delete: tuple[DeletePod, ...] = ()


def plan_departure(observed: Observed, retire: Sequence[DeletePod], *, unrouted_now: Collection[str], now: datetime) -> Departure:
    """Plan the drains and deletions of pods that are to go: a worker that may be busy is drained, any other pod deleted.

    `retire` are the pods to go now. Those that lost their traffic in the last 2 s or in this pass (`unrouted_now`, UIDs) wait.
    Pods whose drain is over are deleted, too.
    """
    recently = {uid for uid, when in observed.unrouted_at.items() if now - when < UNROUTE_BEFORE}
    due = [action for action in retire if action.uid not in recently and action.uid not in unrouted_now]
    drain = {call.worker.pod_uid: call for call in _drains(observed, due)}
    drained = tuple(_drained(observed))
    delete = tuple(action for action in due if action.uid not in drain)
    return Departure(drain=tuple(drain.values()), delete=(*delete, *drained))


def _drains(observed: Observed, due: Sequence[DeletePod]) -> Iterator[DrainWorker]:
    leaving = {action.uid for action in due if not action.orphan} - observed.undrained
    for pod in observed.pods:
        poll = observed.polls.get(pod.uid, Poll())
        if pod.uid in leaving and poll.fresh and poll.state is not None and not poll.state.draining and _may_be_busy(poll.state):
            address = WorkerAddress(pod_uid=pod.uid, ip=pod.ip, boot_id=poll.state.boot_id)
            deadline_s = max(1, observed.deployment.spec.drain.timeout_seconds)
            yield DrainWorker(worker=address, operation_id=f"drain-{pod.uid}", deadline_s=deadline_s)


def _may_be_busy(state: WorkerState) -> bool:
    return state.busy or state.state in ACCEPTING


def _drained(observed: Observed) -> Iterator[DeletePod]:
    """Yield the pods whose worker has drained, or should have."""
    for pod in observed.pods:
        if _drains_now(observed, pod) and (why := _why_pod_is_deleted(observed, observed.polls[pod.uid])):
            yield DeletePod(name=pod.name, uid=pod.uid, why=why)


def _drains_now(observed: Observed, pod: Pod) -> bool:
    return not pod.terminating and not pod.orphan and observed.leaves(pod)


def _why_pod_is_deleted(observed: Observed, poll: Poll) -> str:
    """Return why a pod goes whose worker drains: no answer, no requests, or no time left; empty while it may still be busy."""
    if poll.state is None or poll.unreachable:
        return "its worker, which was finishing its last requests, does not answer"
    if poll.fresh and not poll.state.busy:
        return "its last requests are answered"
    over = poll.state_age_s >= observed.deployment.spec.drain.timeout_seconds + MARGIN_S
    return "the time for its last requests is over (spec.drain.timeoutSeconds)" if over else ""
