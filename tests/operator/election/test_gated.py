# SPDX-License-Identifier: Apache-2.0
"""The gate of a follower covers every call of the two ports that changes anything."""

import asyncio
import inspect
from typing import Any

import pytest

from diffusion_operator.cluster import Cluster
from diffusion_operator.election.gated import GatedCluster, GatedWorkers
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.errors import NotLeading
from diffusion_operator.worker_client import WorkerClient

READS = {"get", "list", "adapter_versions", "look_up", "warnings"}


class Port:
    """A stand-in for a port: it answers every call and notes its name."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: object, **__: object) -> Any:
            self.asked.append(name)
            return self

        self.operator_epoch = 5
        return answer


def methods(protocol: type) -> list[str]:
    return [name for name, found in vars(protocol).items() if inspect.iscoroutinefunction(found) and not name.startswith("_")]


async def call(port: object, protocol: type, name: str) -> None:
    """Call the method `name` of the port with None for each parameter that it has in the protocol."""
    parameters = list(inspect.signature(getattr(protocol, name)).parameters.values())[1:]
    given = [None for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    await getattr(port, name)(*given, **{one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY})


PORTS = [(GatedCluster, Cluster), (GatedWorkers, WorkerClient)]
ALL = [(gated, protocol, name) for gated, protocol in PORTS for name in methods(protocol)]


@pytest.mark.parametrize(("gated", "protocol", "name"), ALL, ids=lambda one: getattr(one, "__name__", one))
async def test_a_follower_reads_and_does_nothing_else(gated: Any, protocol: type, name: str) -> None:
    port = Port()
    closed = gated(port, Leadership())
    if name in READS:
        await call(closed, protocol, name)
    else:
        with pytest.raises(NotLeading):
            await call(closed, protocol, name)
    assert port.asked == ([name] if name in READS else [])


@pytest.mark.parametrize(("gated", "protocol", "name"), ALL, ids=lambda one: getattr(one, "__name__", one))
async def test_a_leader_does_everything_until_its_time_is_over(gated: Any, protocol: type, name: str) -> None:
    port, leadership = Port(), Leadership()
    now = asyncio.get_running_loop().time()
    leadership.open(1, renewed_at=now, until=now + 100)
    await call(gated(port, leadership), protocol, name)
    assert port.asked == [name]


async def test_the_epoch_that_a_worker_has_seen_is_handed_on() -> None:
    leadership = Leadership.for_ever()
    await GatedWorkers(Port(), leadership).state("10.0.0.1", token="t")  # type: ignore[arg-type]
    assert leadership.highest_reported == 5
