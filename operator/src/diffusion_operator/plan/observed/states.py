# SPDX-License-Identifier: Apache-2.0
"""The sets of states of replicas and workers: each meaning has one name."""

from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import WorkerPhase

LIVE_STATES = frozenset(
    {ReplicaState.VERIFYING, ReplicaState.AWAKE, ReplicaState.DRAINING, ReplicaState.SLEEPING, ReplicaState.ASLEEP, ReplicaState.WAKING}
)
"""The first load is done and the server answers, by policy if not with an image."""
SETTLED_STATES = frozenset({ReplicaState.AWAKE, ReplicaState.ASLEEP})
"""Nothing is going on."""
MOVING_STATES = (ReplicaState.VERIFYING, ReplicaState.DRAINING, ReplicaState.SLEEPING, ReplicaState.WAKING)
"""A sleep, a wake or its check is going on, and ends by itself."""
RESTING_STATES = (ReplicaState.DRAINING, ReplicaState.SLEEPING, ReplicaState.ASLEEP, ReplicaState.WAKING)
"""Asleep, or on the way to it or back."""
WAKING_STATES = (ReplicaState.WAKING, ReplicaState.VERIFYING)
"""On the way to awake."""
READY_STATES = (ReplicaState.AWAKE, ReplicaState.DRAINING, ReplicaState.SLEEPING, ReplicaState.ASLEEP, ReplicaState.WAKING)
"""Counted as ready, where the pod is."""
ADAPTER_CALL_STATES = (ReplicaState.AWAKE, ReplicaState.ASLEEP)
"""The worker takes calls about adapters."""
ADAPTER_SERVING_STATES = (ReplicaState.AWAKE, ReplicaState.VERIFYING)
"""Adapters that are loaded serve."""

SERVING_PHASES = (WorkerPhase.READY, WorkerPhase.DRAINING)
"""The worker makes images."""
RESTING_PHASES = (WorkerPhase.DRAINING, WorkerPhase.SLEEPING, WorkerPhase.ASLEEP)
"""The worker sleeps, or is on the way to it."""
