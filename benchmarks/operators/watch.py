# SPDX-License-Identifier: Apache-2.0
"""P17: the operator with 1,000 live workers, on a real API server and etcd. Every worker is a real engine behind its real control port,
over a rank that does nothing. There is no kubelet.

100 deployments are busy: their workers make one image after another. All others fall asleep by their policy first. Then the
operator's processor time is taken over three minutes.

Reaction: packets to and from 300 of the workers are dropped. At the same moment the specs of 300 deployments begin to change, half of them
cut off. Each change is timed from its request to the Service that follows from it, as a watch sees it. Nothing is waited for between the
cut and the changes, so the worst of it is measured: nobody knows yet who is cut off.

A pass over 500 adapters: one deployment has them, all loaded. The pod gets a label of somebody's again and again, which changes nothing
that counts. The operator's own metric says how long the passes took.

Take-over: see `takeover.py`.
"""

import asyncio
import contextlib
import functools
import json
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.operators.children import deployment
from benchmarks.operators.kube_pods import Pods, pods
from benchmarks.operators.kube_session import session_of
from benchmarks.operators.place import NAMESPACE, Place, take
from benchmarks.operators.run import ROOT, OperatorRun, operator
from benchmarks.operators.takeover import take_over
from benchmarks.result import Measured
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, POD, SERVICE

TARGETS = {
    "core_fraction": "<= 0.05",
    "react_p99_s": "<= 1",
    "takeover_s": "<= 20",
    "pass_500_adapters_ms": "<= 5",
    "rss_of_allowed": "<= 1",
}
# The memory that the goal allows: a base, and a part for each deployment.
ALLOWED_MB, ALLOWED_KB_PER_OBJECT = 110, 25
CHANGED = "example.com/changed"
PASS_SUM = re.compile(r'^diffusion_operator_reconcile_seconds_(sum|count)\{kind="DiffusionDeployment",outcome="ok"\} (\S+)$', re.MULTILINE)
LORA = ROOT / "examples" / "digits" / "loras" / "stripes"


class Size(msgspec.Struct, frozen=True):
    """The size of a run: numbers of deployments, of busy, cut-off and changed ones, of adapters and passes, and seconds of each part."""

    deployments: int = 1000
    busy: int = 100
    hosts: int = 4
    cut: int = 300
    changes: int = 300
    changes_s: float = 60.0
    seconds: float = 180.0
    settle_s: float = 420.0
    quiet_s: float = 20.0
    adapters: int = 500
    passes: int = 100


TINY = Size(deployments=3, busy=1, hosts=1, cut=1, changes=2, changes_s=0.2, seconds=0.5, settle_s=60.0, quiet_s=0.2, adapters=2, passes=2)

Sample = dict[str, float]


def measure(*, tiny: bool = False) -> Measured:
    """Measure idle load and reactions, then passes over many adapters, then the take-over, each on an API server of its own."""
    size = TINY if tiny else Size()
    sample, reactions = take(functools.partial(_watched, size=size), quiet_s=min(5.0, size.quiet_s))
    passed = take(functools.partial(_passes, size=size), quiet_s=min(5.0, size.quiet_s))
    taken_over = take_over(tiny=tiny)
    seconds = sorted(one["s"] for one in reactions)
    figures = {
        "core_fraction": sample["cpu_s"] / sample["seconds"],
        "react_p99_s": seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))],
        "react_p50_s": statistics.median(seconds),
        "react_p99_s_of_the_cut_off": max(one["s"] for one in reactions if one["cut"]),
        "pass_500_adapters_ms": passed["pass_ms"],
        "rss_of_allowed": sample["rss_mb"] / (ALLOWED_MB + ALLOWED_KB_PER_OBJECT * size.deployments / 1024),
        "base_rss_mb": sample["rss_mb_0"],
        "rss_kb_per_object": (sample["rss_mb"] - sample["rss_mb_0"]) * 1024 / size.deployments,
        "passes_a_second": sample["passes"] / sample["seconds"],
    }
    rounded = {name: round(value, 3) for name, value in (figures | taken_over).items()}
    return Measured(rounded, TARGETS, [sample, passed, taken_over, *reactions])


async def _watched(place: Place, *, size: Size) -> tuple[Sample, list[Sample]]:
    names = [f"d{number}" for number in range(size.deployments)]
    busy = set(names[: size.busy])
    async with (
        operator(place.folder, NAMESPACE) as ours,
        pods(place.kubeconfig, NAMESPACE, hosts=size.hosts, busy=busy.__contains__) as ran,
    ):
        await ours.passes(0)
        await asyncio.sleep(size.quiet_s)
        sample: Sample = {"rss_mb_0": ours.rss_mb}
        begun = time.monotonic()
        await _make(place, names)
        await ran.run(len(names), within_s=size.settle_s)
        await _fall_asleep(place, size)
        _say(f"{size.deployments} workers, {size.busy} of them busy, after {time.monotonic() - begun:.0f} s; {size.seconds:g} s now")
        await asyncio.sleep(size.quiet_s)
        sample |= await _idle(ours, size.seconds)
        _say(json.dumps(sample))
        reactions = await _reactions(place, ran, names, size)
    return sample, reactions


async def _make(place: Place, names: list[str]) -> None:
    """Create deployments that fall asleep when idle, eight at a time."""
    gate = asyncio.Semaphore(8)

    async def one(name: str) -> None:
        async with gate:
            manifest = deployment(name, NAMESPACE)
            manifest["spec"]["sleep"] = {"policy": "OnIdle", "idleSeconds": 10, "minAwakeSeconds": 0}
            await place.make([manifest])

    await asyncio.gather(*(one(name) for name in names))


async def _fall_asleep(place: Place, size: Size) -> None:
    """Wait until the statuses count every deployment as asleep that is not busy, and all others as awake.

    Raises:
        RuntimeError: it is not so within `size.settle_s`.
    """
    wanted = {"asleep": size.deployments - size.busy, "awake": size.busy}
    ends, found = time.monotonic() + size.settle_s, dict.fromkeys(wanted, 0)
    while found != wanted:
        if time.monotonic() > ends:
            raise RuntimeError(f"expected {wanted}, found {found} after {size.settle_s:g} s")
        await asyncio.sleep(1)
        statuses = [one.get("status", {}) for one in await place.cluster.list(DEPLOYMENT, NAMESPACE)]
        found = {word: sum(status.get(f"{word}Replicas", 0) for status in statuses) for word in wanted}


async def _idle(ours: OperatorRun, seconds: float) -> Sample:
    cpu_s, before, begun = ours.cpu_s, _passed(ours), time.monotonic()
    await asyncio.sleep(seconds)
    measured = {"seconds": time.monotonic() - begun, "cpu_s": ours.cpu_s - cpu_s, "rss_mb": ours.rss_mb}
    return measured | {"passes": _passed(ours)["count"] - before["count"], "pass_s": _passed(ours)["sum"] - before["sum"]}


def _passed(ours: OperatorRun) -> dict[str, float]:
    with urllib.request.urlopen(ours.metrics_url, timeout=10) as answer:
        return {"sum": 0.0, "count": 0.0} | {name: float(value) for name, value in PASS_SUM.findall(answer.read().decode())}


# reactions


async def _reactions(place: Place, ran: Pods, names: list[str], size: Size) -> list[Sample]:
    chance = random.Random(17)
    cut = set(chance.sample(names, size.cut))
    # Half of the changes are of deployments that are cut off.
    changed = [*chance.sample(sorted(cut), size.changes // 2), *chance.sample(sorted(set(names) - cut), size.changes - size.changes // 2)]
    chance.shuffle(changed)
    async with _seen_changes(place.kubeconfig) as seen:
        with _cut_off([ran.addresses[name] for name in cut]):
            asked: dict[str, float] = {}
            for name in changed:
                asked[name] = time.monotonic()
                annotations = {"spec": {"service": {"annotations": {CHANGED: name}}}}
                await ran.patch(DEPLOYMENT.plural, name, annotations)
                await asyncio.sleep(size.changes_s / len(changed))
            ends = time.monotonic() + 60
            while asked.keys() - seen.keys() and time.monotonic() < ends:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    return [
        {"s": seen.get(name, ends) - when, "cut": float(name in cut), "at_s": when - min(asked.values())} for name, when in asked.items()
    ]


@contextlib.asynccontextmanager
async def _seen_changes(kubeconfig: Path) -> AsyncIterator[dict[str, float]]:
    """Watch the Services during the block. Yields a mapping that fills meanwhile: from a deployment's name to a monotonic time.

    It is the time at which its Service was first seen with the annotation CHANGED.
    """
    seen: dict[str, float] = {}
    async with await session_of(kubeconfig) as session:
        path = f"/api/v1/namespaces/{NAMESPACE}/{SERVICE.plural}"
        async with session.get(f"{path}?limit=1") as answer:
            since = (await answer.json())["metadata"]["resourceVersion"]

        async def watch() -> None:
            async with session.get(f"{path}?watch=1&resourceVersion={since}", read_bufsize=2**22) as events:
                async for line in events.content:
                    metadata = msgspec.json.decode(line)["object"]["metadata"]
                    if CHANGED in metadata.get("annotations", {}):
                        seen.setdefault(metadata["name"], time.monotonic())

        watching = asyncio.create_task(watch())
        try:
            yield seen
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@contextlib.contextmanager
def _cut_off(addresses: list[str]) -> Iterator[None]:
    """Drop packets from and to these addresses during the block, by a rule of nftables; raise RuntimeError without the right to do so."""
    table, addressed = "p17", ", ".join(addresses)
    rules = f"""
        table inet {table} {{
            set lost {{ type ipv4_addr; elements = {{ {addressed} }}; }}
            chain leaving {{ type filter hook output priority 0; ip daddr @lost drop; ip saddr @lost drop; }}
        }}
    """
    _nft("-f", "-", stdin=rules)
    try:
        yield
    finally:
        _nft("delete", "table", "inet", table)


def _nft(*arguments: str, stdin: str | None = None) -> None:
    done = subprocess.run(["nft", *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"nft {' '.join(arguments)}: {done.stderr.strip()}; this benchmark drops packets, which takes NET_ADMIN")


# many adapters


async def _passes(place: Place, *, size: Size) -> Sample:
    """Return the mean milliseconds of a pass over a deployment with many loaded adapters, and the number of passes.

    Each pass follows from a label of the pod that changes nothing for the operator.

    Raises:
        RuntimeError: there were fewer passes than half the touches, or the adapters do not load.
    """
    for number in range(size.adapters):
        folder = place.folder / "loras" / f"a{number}"
        folder.mkdir(parents=True)
        for file in LORA.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    async with operator(place.folder, NAMESPACE) as ours, pods(place.kubeconfig, NAMESPACE, hosts=1, busy=lambda _: False) as ran:
        await ours.passes(0)
        manifest = deployment("d0", NAMESPACE)
        manifest["spec"]["lora"] = {"enabled": True, "maxCached": size.adapters + 12}
        await place.make([manifest])
        await ran.run(1, within_s=60)
        await place.make(_adapter(place.folder, number) for number in range(size.adapters))
        await _all_loaded(place, size)
        await asyncio.sleep(size.quiet_s)
        (pod,) = await place.cluster.list(POD, NAMESPACE)
        before = _passed(ours)
        for number in range(size.passes):
            await ran.label(pod["metadata"]["name"], str(number))
            await asyncio.sleep(0.15)
        await asyncio.sleep(1)
        after = _passed(ours)
    count = after["count"] - before["count"]
    if count < size.passes / 2:
        raise RuntimeError(f"expected a pass for each of {size.passes} touches, found {count:g}")
    return {"pass_ms": (after["sum"] - before["sum"]) / count * 1000, "passes": count}


def _adapter(folder: Path, number: int) -> dict[str, Any]:
    metadata = {"name": f"a{number}", "namespace": NAMESPACE}
    spec = {"deploymentRef": {"name": "d0"}, "source": {"path": str(folder / "loras" / f"a{number}")}}
    return {"apiVersion": ADAPTER.api_version, "kind": ADAPTER.kind, "metadata": metadata, "spec": spec}


async def _all_loaded(place: Place, size: Size) -> None:
    ends, ready = time.monotonic() + size.settle_s, 0
    while ready < size.adapters:
        if time.monotonic() > ends:
            raise RuntimeError(f"expected {size.adapters} adapters to be ready, found {ready}")
        await asyncio.sleep(1)
        conditions = [one.get("status", {}).get("conditions", ()) for one in await place.cluster.list(ADAPTER, NAMESPACE)]
        ready = sum(any((one["type"], one["status"]) == ("Ready", "True") for one in found) for found in conditions)


def _say(what: str) -> None:
    print(f"P17: {what}", file=sys.stderr, flush=True)
