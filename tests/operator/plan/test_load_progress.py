# SPDX-License-Identifier: Apache-2.0
"""Load progress of a replica that is not ready yet: by a table, and its calm over a life."""

from datetime import timedelta
from typing import Any

import pytest

from diffusion_operator.api.deployment_status import LoadStatus
from diffusion_operator.api.names import CONTAINER
from diffusion_operator.api.worker_state import LoadReport, WorkerPhase
from diffusion_operator.plan.observed.observed import Poll
from diffusion_operator.plan.observed.pods import Container, read_pod
from diffusion_operator.plan.observed.replica_state import read_group
from diffusion_operator.plan.status.deployment import load_status
from support.operator.fake_cluster import EPOCH
from support.operator.plan_builders import READY, made, pod, says
from support.operator.rig import Rig, deployment

SET_UP, STARTED = EPOCH + timedelta(seconds=10), EPOCH + timedelta(seconds=60)
CREATING = Container(waiting_reason="ContainerCreating")
RUNNING = Container(running=True, started_at=STARTED)
HALFWAY = LoadReport(stage="Fetching", bytes_done=1, bytes_total=2)

LOADS = [
    ("waits for a node", {"scheduled": False, "container": Container()}, None, LoadStatus(stage="Scheduling", started_at=EPOCH)),
    ("waits for its volumes", {"container": CREATING}, None, None),
    ("waits for its image", {"container": CREATING, "set_up_at": SET_UP}, None, LoadStatus(stage="ImagePull", started_at=SET_UP)),
    ("its image is nowhere", {"container": Container(waiting_reason="ErrImagePull")}, None, LoadStatus(stage="ImagePull")),
    ("runs, and says nothing yet", {"container": RUNNING, "ready": False}, None, None),
    (
        "fetches",
        {"container": RUNNING},
        says(WorkerPhase.STARTING, load=HALFWAY),
        LoadStatus(stage="Fetching", bytes_done=1, bytes_total=2, percent=50, started_at=STARTED),
    ),
    (
        "starts its ranks again",
        {"container": RUNNING},
        says(WorkerPhase.RESTARTING, load=HALFWAY),
        LoadStatus(stage="Fetching", bytes_done=1, bytes_total=2, percent=50),
    ),
    ("is ready", {"container": RUNNING}, READY, None),
    ("is back off", {"container": Container(waiting_reason="CrashLoopBackOff", restarts=2)}, None, None),
]


@pytest.mark.parametrize(("facts", "report", "expected"), [row[1:] for row in LOADS], ids=[row[0] for row in LOADS])
def test_a_load_is_shown_as_far_as_it_is_known(facts: dict[str, Any], report: Any, expected: LoadStatus | None) -> None:
    assert load_status(read_group(pod(**facts), Poll(state=report), None, made())) == expected


def test_times_are_read_from_the_pod() -> None:
    status = {
        "conditions": [{"type": "PodReadyToStartContainers", "status": "True", "lastTransitionTime": "2026-01-01T00:00:10Z"}],
        "containerStatuses": [{"name": CONTAINER, "state": {"running": {"startedAt": "2026-01-01T00:01:00Z"}}}],
    }
    metadata = {"name": "d-0-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = read_pod({"metadata": metadata, "status": status}, index=0, incarnation=0)
    assert (found.set_up_at, found.container.started_at) == (SET_UP, STARTED)


async def test_a_load_that_takes_minutes_is_written_every_few_seconds() -> None:
    rig = Rig()
    rig.cluster.put(deployment())
    await rig.run()
    assert rig.status()["replicaStates"][0]["load"]["stage"] == "Scheduling"
    worker = rig.start("d-0-0", phase=WorkerPhase.STARTING)
    await rig.run()
    writes = rig.cluster.status_writes
    for second in range(120):
        worker.load = LoadReport(stage="LoadingWeights", bytes_done=second, bytes_total=120)
        await rig.run(1)
    assert rig.status()["replicaStates"][0]["load"]["percent"] >= 90
    assert rig.cluster.status_writes - writes <= 120 / 5 + 2
