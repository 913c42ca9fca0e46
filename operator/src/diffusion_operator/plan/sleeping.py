# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake by policy: which calls to start now. They are started, then observed in the state document.

An operation id names the spec's generation and the attempt, so a call repeated after an operator's restart is the same call to the
worker, and a new attempt after a failure is a new one.
"""

from collections.abc import Sequence
from datetime import datetime

from diffusion_operator.api.deployment import DrainMode, SleepPolicy
from diffusion_operator.api.worker_state import Operation, WorkerPhase
from diffusion_operator.plan.actions import SleepWorker, WakeWorker
from diffusion_operator.plan.groups import Group
from diffusion_operator.plan.instances import worker_address
from diffusion_operator.plan.observed import Observed


def plan_sleep(observed: Observed, groups: Sequence[Group], now: datetime) -> tuple[SleepWorker | WakeWorker, ...]:
    calls = (_call(observed, group) for group in groups)
    return tuple(call for call in calls if call is not None and now >= observed.operation_not_before.get(retry_key(call), now))


def retry_key(call: SleepWorker | WakeWorker) -> str:
    """One backoff for each pod, kind and generation: a wake never waits for what a sleep had to."""
    return f"{call.worker.pod_uid}/{call.operation_id.rpartition('-')[0]}"


def _call(observed: Observed, group: Group) -> SleepWorker | WakeWorker | None:
    document, address = group.document, worker_address(group)
    if document is None or address is None or document.operation is not None:
        return None
    sleep, generation = observed.deployment.spec.sleep, observed.deployment.metadata.generation
    if sleep.policy is SleepPolicy.ASLEEP and document.state is WorkerPhase.READY:
        operation_id, attempt = _operation("sleep", generation, document.last_operation)
        patient = sleep.drain_timeout_seconds > 0  # no time to drain is Abort, and a deadline must be positive
        return SleepWorker(
            worker=address,
            operation_id=operation_id,
            attempt=attempt,
            mode=sleep.drain if patient else DrainMode.ABORT,
            deadline_s=max(1, sleep.drain_timeout_seconds),
            level=sleep.level,
            policy=sleep.policy,
        )
    if sleep.policy is SleepPolicy.ALWAYS_AWAKE and document.state is WorkerPhase.ASLEEP:
        operation_id, attempt = _operation("wake", generation, document.last_operation)
        return WakeWorker(
            worker=address, operation_id=operation_id, attempt=attempt, deadline_s=sleep.wake_timeout_seconds, policy=sleep.policy
        )
    return None


def _operation(kind: str, generation: int, last: Operation | None) -> tuple[str, int]:
    prefix = f"{kind}-{generation}-"
    tried = last.operation_id.removeprefix(prefix) if last is not None and last.operation_id.startswith(prefix) else "0"
    attempt = (int(tried) if tried.isdecimal() else 0) + 1
    return f"{prefix}{attempt}", attempt
