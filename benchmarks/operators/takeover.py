# SPDX-License-Identifier: Apache-2.0
"""The take-over of P17: seconds from the death of the operator's leader to the first pod of an object that was applied at that moment.

Two processes of the operator look after 1,000 deployments. The leader is killed, or stopped, by turns. Each time another deployment is
applied in the same moment, and a new process joins before the next time. There is no kubelet and no worker, so each pass is as short as
it can be.

`python -m benchmarks.operators.takeover` runs it alone.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import statistics
import sys
import time

import msgspec

from benchmarks.operators.children import deployment
from benchmarks.operators.kube_changes import KubeChanges
from benchmarks.operators.place import NAMESPACE, Place, take
from benchmarks.operators.run import KUBECONFIG, OperatorRun, operator
from diffusion_operator.api.names import POD

STEP = 250
DEADLINE_S = 600.0


class Size(msgspec.Struct, frozen=True):
    """The size of a run: deployments that there are, and how often the leader is lost."""

    deployments: int = 1000
    faults: int = 6


TINY = Size(deployments=1, faults=1)


def take_over(*, tiny: bool = False) -> dict[str, float]:
    """Lose the leader several times, and measure the seconds until its successor made a pod.

    Returns the longest as `takeover_s`, and the median as `takeover_median_s`.
    """
    size = TINY if tiny else Size()
    seconds = take(functools.partial(_turn, size=size), quiet_s=0.2 if tiny else 5.0)
    _say(json.dumps([round(one, 2) for one in seconds]))
    return {"takeover_s": round(max(seconds), 3), "takeover_median_s": round(statistics.median(seconds), 3)}


async def _turn(place: Place, *, size: Size) -> list[float]:
    async with place.changes() as changes, Crew(place) as crew:
        await crew.join()
        await crew.leader()
        for first in range(0, size.deployments, STEP):
            await place.apply_all(changes, range(first, min(first + STEP, size.deployments)))
        return [await lose_leader(place, changes, crew, stopped=number % 2 == 1) for number in range(size.faults)]


class Crew:
    """The operator's processes, at most one of which leads; all end with the block. It begins with none: `join` starts each."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._numbers = itertools.count()
        self._stack = contextlib.AsyncExitStack()
        self.members: list[OperatorRun] = []

    async def __aenter__(self) -> "Crew":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def join(self) -> None:
        """Start one more process of the operator, and return when it has listed every object."""
        number = next(self._numbers)
        folder = self._place.folder / f"member-{number}"
        folder.mkdir()
        self._place.account.write_kubeconfig(folder / KUBECONFIG)
        member = await self._stack.enter_async_context(operator(folder, NAMESPACE, identity=f"member-{number}"))
        await member.passes(0)
        self.members.append(member)

    async def leader(self) -> OperatorRun:
        """Wait until one of the processes says that it leads, and return it.

        Raises:
            TimeoutError: none does within a minute.
        """
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for one in self.members:
                    if await one.leads():
                        return one
                await asyncio.sleep(0.1)


async def lose_leader(place: Place, changes: KubeChanges, crew: Crew, *, stopped: bool) -> float:
    """Let another process join, kill the leader, or suspend it with `stopped`, and create a deployment at once.

    Returns the seconds until the deployment's pod is there. Afterwards the old leader is killed, and one process is left.
    """
    await crew.join()
    leader, pods = await crew.leader(), changes.added(POD)
    begun = time.monotonic()
    if stopped:
        leader.stop()
    else:
        leader.kill()
    await place.make([deployment(f"applied-{begun:.3f}".replace(".", "-"), NAMESPACE)])
    await changes.until(lambda seen: seen.added(POD) > pods, stalled_s=DEADLINE_S)
    seconds = time.monotonic() - begun
    leader.kill()
    crew.members.remove(leader)
    return seconds


def _say(what: str) -> None:
    print(f"take-over: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(json.dumps(take_over()))
