# SPDX-License-Identifier: Apache-2.0
"""The operator's program is killed before and after every kind of action in a deployment's life, with real processes. The API server is
real, the kubelet fake. `test_fault_points` has every single place in virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, SERVICE
from support.apiserver.rest_client import RestClient
from support.operator.fake_kubelet import FakeKubelet
from support.operator.sole_operator import Namespaces, adapter, complaints, deployment, eventually_nothing
from support.soak.operator_process import OperatorProcess

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]
STEP_S = 120.0
QUIET_S = 2.0
ACTIONS = {"create", "apply", "patch", "apply_status", "set_labels", "delete", "sleep", "wake", "drain", "put_adapter", "remove_adapter"}

Step = Callable[[RestClient], Awaitable[Any]]


def edit(**spec: Any) -> Step:
    return lambda client: client.patch(DEPLOYMENT, "killed", "d", {"spec": spec})


STORY: dict[str, Step] = {
    "make": lambda client: client.create(DEPLOYMENT, "killed", deployment(replicas=2)),
    "adapter": lambda client: client.create(ADAPTER, "killed", adapter()),
    "sleep": edit(sleep={"policy": "Asleep"}),
    "wake": edit(sleep={"policy": "AlwaysAwake"}),
    "roll out": edit(engine={"maxBatchSize": 2}),
    "repair": lambda client: client.delete(SERVICE, "killed", "d"),
    "scale down": edit(replicas=1),
    "unload": lambda client: client.delete(ADAPTER, "killed", "a"),
}


async def test_the_process_may_be_killed_before_and_after_every_kind_of_action(
    kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    there = Namespaces(client, kubelet, "killed")
    await there.make()
    died_at = tmp_path / "died-at"
    died_at.touch()
    operator = OperatorProcess(tmp_path, kubeconfig, control_port=kubelet.port)

    async def unsettled() -> list[str]:
        """Return the problems, or the places at which the operator died in the last QUIET_S seconds; empty without either."""
        before = died_at.read_text()
        if wrong := await there.untrue():
            return [f"{wrong}"]
        await asyncio.sleep(QUIET_S)
        return died_at.read_text().removeprefix(before).splitlines()

    operator.start(died_at=died_at)
    try:
        for name, step in STORY.items():
            await step(client)
            await eventually_nothing(unsettled, within_s=STEP_S)
            if name == "wake":
                workers = [one.worker for one in kubelet.containers.values()]
    finally:
        await asyncio.to_thread(operator.kill)
    deaths = died_at.read_text().splitlines()
    assert {place.split()[1] for place in deaths} == ACTIONS
    assert len(deaths) == len(set(deaths)) > 2 * len(ACTIONS), "before and after"
    operations = [[call.split()[0] for call in worker.calls if call.startswith(("sleep", "wake"))] for worker in workers]
    assert operations == [["sleep", "wake"]] * 2, "no worker does anything twice"
    assert [worker.loads for worker in workers] == [["a"], ["a"]]
    assert await there.pods() in (["killed/d-0-1"], ["killed/d-1-1"]), "each replica was replaced once"
    assert set(kubelet.pods_made.values()) == {1}
    assert kubelet.wrong == []
    assert complaints(operator) == []
