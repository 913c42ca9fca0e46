# SPDX-License-Identifier: Apache-2.0
"""P12: the operator at 1,000 and 10,000 DiffusionDeployments, on a real API server and etcd without a kubelet.

Time: from the first of 1,000 objects being applied until each has its six children and a status, against a bare client, the same
library with as many requests at once, that makes the same children and nothing else, once before the operator's turn and once after;
and against the least that any operator costs, the bare client that applies the object first and writes its status last.
Writes: what a watch sees, so a request that changes nothing is none; such requests are given beside it. Idle: ten minutes with
1,000 objects. Restart: from the start of the process until it has looked at each of them. Memory: resident, at 0, 1,000 and 10,000
objects, per custom resource and per owned object, of which each has six. Beside it a plain kopf operator that makes the same children.

`python -m benchmarks.operator_scale --idle-seconds 30 --objects 200 --many 400` for a first look.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kube_changes import KubeChanges
from benchmarks.operator_children import (
    AT_ONCE,
    CHILD_KINDS,
    children,
    deployment,
    first_status,
    with_identity,
)
from benchmarks.operator_run import ROOT, OperatorRun, operator, running
from benchmarks.result import Measured
from diffusion_operator.api.names import DEPLOYMENT, Kind
from diffusion_operator.cluster import KubernetesCluster, connect
from tools.devcluster import programs
from tools.devcluster.apiserver import apiserver

OBJECTS, MANY, IDLE_S = 1000, 10_000, 600.0
NAMESPACE = "scale"
STALLED_S = 60.0
QUIET_S = 5.0
NOISE = 0.25
"""How far apart both turns of the bare client may be: they are minutes apart on a machine that does other things too."""
TARGETS = {
    "time_vs_bare_client": "<= 1.5",
    "extra_writes_per_object": "<= 0",
    "idle_writes": "<= 0",
    "base_rss_mb": "<= 110",
    "rss_kb_per_object": "<= 6",
    "rss_kb_per_owned_object": "<= 6",
    "restart_after_list_s": "<= 10",
    "restart_writes": "<= 0",
}


@dataclass(frozen=True)
class Place:
    """Where a turn is taken: an API server of its own, because one that keeps much is slower for everybody."""

    cluster: KubernetesCluster
    kubeconfig: Path
    folder: Path
    made: dict[str, dict[str, Any]]
    """The deployments as they were answered, by name."""

    def changes(self) -> KubeChanges:
        """From now on."""
        return KubeChanges(self.kubeconfig, NAMESPACE)


Sample = dict[str, float]
Turn = Callable[[Place], Awaitable[Sample]]


def measure(*, objects: int = OBJECTS, many: int = MANY, idle_s: float = IDLE_S, noise: float = NOISE) -> Measured:
    """All figures, one turn after another."""
    sample: Sample = {"objects": objects, "many": many, "idle_s": idle_s}

    def take(turn: Turn) -> Sample:
        taken = _take(turn)
        _say(json.dumps(taken))
        sample.update(taken)
        return taken

    bare_s = [take(lambda place: _bare(place, objects))["bare_s"]]
    take(lambda place: _ours(place, objects=objects, many=many, idle_s=idle_s))
    bare_s.append(take(lambda place: _bare(place, objects))["bare_s"])
    take(lambda place: _least(place, objects))
    take(lambda place: _twin(place, objects))
    if max(bare_s) / min(bare_s) - 1 > noise:
        raise RuntimeError(f"the bare client took {bare_s[0]:.1f} and {bare_s[1]:.1f} s: the machine is too busy")
    sample |= {"bare_s": statistics.mean(bare_s), "bare_1_s": bare_s[0], "bare_2_s": bare_s[1]}
    return Measured(results=_results(sample, objects=objects, many=many), targets=TARGETS, samples=[sample])


def _results(sample: Sample, *, objects: int, many: int) -> Sample:
    growth_kb = (sample[f"rss_mb_{many}"] - sample["rss_mb_0"]) * 1024
    results = {
        "time_vs_bare_client": sample["ours_s"] / sample["bare_s"],
        "time_vs_least": sample["ours_s"] / sample["least_s"],
        "least_vs_bare_client": sample["least_s"] / sample["bare_s"],
        "twin_vs_ours": sample["twin_s"] / sample["ours_s"],
        "extra_writes_per_object": sample["ours_writes"] / objects - len(CHILD_KINDS) - 2,
        "base_rss_mb": sample["rss_mb_0"],
        "rss_kb_per_object": growth_kb / many,
        "rss_kb_per_owned_object": growth_kb / (many * len(CHILD_KINDS)),
        "restart_after_list_s": sample["restart_s"] - sample["list_s"],
    }
    told = ("idle_writes", "bare_s", "least_s", "ours_s", "twin_s", "twin_writes", "restart_s", "restart_writes", "list_s")
    results |= {name: sample[name] for name in (*told, f"rss_mb_{objects}")}
    return {name: round(value, 3) for name, value in results.items()}


def _take(turn: Turn) -> Sample:
    with apiserver() as kubeconfig, tempfile.TemporaryDirectory() as folder:
        os.environ["KUBECONFIG"] = str(kubeconfig)
        _kubectl(kubeconfig, "apply", "--server-side", *(f"--filename={path}" for path in sorted((ROOT / "crds").glob("*.yaml"))))
        _kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
        _kubectl(kubeconfig, "create", "namespace", NAMESPACE)
        time.sleep(2 * QUIET_S)  # it compiles what it publishes of the CRDs
        return asyncio.run(_connected(turn, kubeconfig, Path(folder)))


async def _connected(turn: Turn, kubeconfig: Path, folder: Path) -> Sample:
    made: dict[str, dict[str, Any]] = {}

    def answered(kind: Kind, manifest: dict[str, Any]) -> None:
        if kind == DEPLOYMENT:
            made[manifest["metadata"]["name"]] = manifest

    async with await connect(answered) as cluster:
        return await turn(Place(cluster, kubeconfig, folder, made))


async def _bare(place: Place, objects: int) -> Sample:
    """Children of owners that nobody knows; without controllers nothing collects them."""
    owners = [with_identity(one, number) for number, one in enumerate(_deployments(range(objects)))]
    async with place.changes() as changes:
        begun = time.monotonic()
        await _at_once(lambda owner: _make(place, children(owner)), owners)
        await changes.until(lambda seen: all(seen.added(kind) >= objects for kind in CHILD_KINDS), stalled_s=STALLED_S)
        return {"bare_s": time.monotonic() - begun}


async def _least(place: Place, objects: int) -> Sample:
    """What no operator can do without: the object, its children, and a status as ours has it at first."""
    status = first_status(with_identity(deployment("d", NAMESPACE), 0))

    async def one(owner: dict[str, Any]) -> None:
        name = owner["metadata"]["name"]
        await _make(place, [owner])
        await _make(place, children(place.made[name]))
        await place.cluster.apply_status(DEPLOYMENT, NAMESPACE, name, status=status)

    async with place.changes() as changes:
        begun = time.monotonic()
        await _at_once(one, _deployments(range(objects)))
        await changes.until(lambda seen: seen.changed(DEPLOYMENT) >= objects, stalled_s=STALLED_S)
        return {"least_s": time.monotonic() - begun}


async def _ours(place: Place, *, objects: int, many: int, idle_s: float) -> Sample:
    sample: Sample = {}
    async with place.changes() as changes:
        async with operator(place.folder, NAMESPACE) as ours:
            await ours.passes(0)
            await asyncio.sleep(QUIET_S)
            sample["rss_mb_0"] = ours.rss_mb
            asked = await changes.requests()
            sample["ours_s"] = await _apply_all(place, changes, range(objects))
            sample["ours_cpu_s"] = ours.cpu_s
            _say(f"operator {sample['ours_s']:.1f} s, {sample['ours_cpu_s']:.1f} s of CPU; idle now for {idle_s:g} s")
            await asyncio.sleep(QUIET_S)
            sample["ours_writes"] = changes.total
            sample["ours_write_requests"] = sum((await changes.requests() - asked).values())
            sample["idle_cpu_s"] = -ours.cpu_s
            sample |= await _idle(changes, idle_s)
            sample["idle_cpu_s"] += ours.cpu_s
            sample[f"rss_mb_{objects}"] = ours.rss_mb
        return sample | await _restarted(place, changes, objects=objects, many=many)


async def _restarted(place: Place, changes: KubeChanges, *, objects: int, many: int) -> Sample:
    """A fresh process over what is there, and then with many more."""
    sample: Sample = {}
    begun = time.monotonic()
    for kind in (DEPLOYMENT, *CHILD_KINDS):
        await place.cluster.list(kind, NAMESPACE)
    sample["list_s"] = time.monotonic() - begun
    before, requests, begun = changes.total, await changes.requests(), time.monotonic()
    async with operator(place.folder, NAMESPACE) as ours:
        await ours.passes(objects)
        sample["restart_s"], sample["restart_cpu_s"] = time.monotonic() - begun, ours.cpu_s
        await asyncio.sleep(QUIET_S)
        sample["restart_writes"] = changes.total - before
        sample["restart_write_requests"] = sum((await changes.requests() - requests).values())
        _say(f"restart {sample['restart_s']:.1f} s, {sample['restart_write_requests']:.0f} requests to write; {many} objects now")
        sample["many_s"] = await _apply_all(place, changes, range(objects, many))
        await asyncio.sleep(QUIET_S)
        sample[f"rss_mb_{many}"] = ours.rss_mb
        sample["many_writes"] = changes.total
    return sample


async def _idle(changes: KubeChanges, idle_s: float) -> Sample:
    before, requests = changes.total, await changes.requests()
    await asyncio.sleep(idle_s)
    asked = await changes.requests() - requests
    counted: Sample = {f"idle_requests_{resource}": number for resource, number in asked.items()}
    return counted | {"idle_writes": changes.total - before, "idle_write_requests": sum(asked.values())}


async def _twin(place: Place, objects: int) -> Sample:
    argv = [
        sys.executable,
        "-m",
        "kopf",
        "run",
        "--standalone",
        "--quiet",
        f"--namespace={NAMESPACE}",
        str(Path(__file__).with_name("kopf_twin.py")),
    ]
    async with place.changes() as changes, running(argv, place.folder / "twin.log") as process:
        await asyncio.sleep(2 * QUIET_S)
        seconds = await _apply_all(place, changes, range(objects))
        await asyncio.sleep(QUIET_S)
        return {"twin_s": seconds, "twin_writes": changes.total / objects - 1, "twin_rss_mb": OperatorRun(process, 0).rss_mb}


async def _apply_all(place: Place, changes: KubeChanges, numbers: Iterable[int]) -> float:
    """Until each of them has its children and a status."""
    manifests = _deployments(numbers)
    wanted = changes.added(DEPLOYMENT) + len(manifests)
    statuses = changes.changed(DEPLOYMENT) + len(manifests)
    begun = time.monotonic()
    await _at_once(lambda manifest: _make(place, [manifest]), manifests)
    await changes.until(
        lambda seen: seen.changed(DEPLOYMENT) >= statuses and all(seen.added(kind) >= wanted for kind in CHILD_KINDS), stalled_s=STALLED_S
    )
    return time.monotonic() - begun


def _deployments(numbers: Iterable[int]) -> list[dict[str, Any]]:
    return [deployment(f"d{number}", NAMESPACE) for number in numbers]


async def _make(place: Place, manifests: Iterable[dict[str, Any]]) -> None:
    for manifest in manifests:
        if not await place.cluster.create(manifest):
            raise RuntimeError(f"{manifest['kind']} {manifest['metadata']['name']} was there before")


def _say(what: str) -> None:
    print(f"P12: {what}", file=sys.stderr, flush=True)


async def _at_once(each: Callable[[dict[str, Any]], Awaitable[None]], items: Iterable[dict[str, Any]]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(item: dict[str, Any]) -> None:
        async with gate:
            await each(item)

    await asyncio.gather(*(one(item) for item in items))


def _kubectl(kubeconfig: Path, *arguments: str) -> None:
    done = subprocess.run(
        [programs.kube() / "kubectl", "--kubeconfig", kubeconfig, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")


def main() -> None:
    """A run of other sizes, whatever the machine does beside it."""
    options = argparse.ArgumentParser(description="P12 with other sizes; `python -m benchmarks P12` is the real one.")
    options.add_argument("--objects", type=int, default=OBJECTS)
    options.add_argument("--many", type=int, default=MANY)
    options.add_argument("--idle-seconds", type=float, default=IDLE_S)
    options.add_argument("--noise", type=float, default=NOISE)
    given = options.parse_args()
    measured = measure(objects=given.objects, many=given.many, idle_s=given.idle_seconds, noise=given.noise)
    print(json.dumps({"results": measured.results, "samples": measured.samples}, indent=1))


if __name__ == "__main__":
    main()
