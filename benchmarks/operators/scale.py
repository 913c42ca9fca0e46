# SPDX-License-Identifier: Apache-2.0
"""P12: the operator at 1,000 and 10,000 DiffusionDeployments, on a real API server and etcd without a kubelet.

Time: from the first of 200 objects being applied until each has its six children and a status, five times and more. It is compared with
the least that any operator writes. For that a bare client of the same library applies the objects, makes the children and writes the
statuses. The client has as many requests at once. It makes 100 right before and 100 right after, in another namespace, while the
operator's process is stopped.

Writes: requests by the API server's audit log, see `audit.py`. Idle: two minutes with these objects, in which each is looked at twelve
times. The operator's work of every ten minutes is also done at its start, whose writes are counted. Restart: from the start of the
process until it has looked at each object. Memory: resident, with no object, with these, and with as many of 10,000 as there is time for.
Each object owns six others. Beside it a plain kopf operator makes the same children.

`python -m benchmarks.operators.scale --per-pair 40 --many 400 --idle-seconds 30` for a first look.
"""

import argparse
import asyncio
import functools
import json
import sys
import time

import msgspec

from benchmarks.operators.children import CHILD_KINDS
from benchmarks.operators.kube_changes import KubeChanges
from benchmarks.operators.place import BARE, NAMESPACE, Place, take
from benchmarks.operators.run import ROOT, OperatorRun, operator, running
from benchmarks.pairs import TINY_PLAN, Pairs, Plan, Taking, Times
from benchmarks.result import Measured
from diffusion_operator.api.names import DEPLOYMENT

TARGETS = {
    "time_vs_least": "<= 1.25",
    "extra_writes_per_object": "<= 0",
    "idle_writes": "<= 0",
    "idle_core_fraction": "<= 0.05",
    "base_rss_mb": "<= 110",
    "rss_kb_per_owned_object": "<= 6",
}


class Size(msgspec.Struct, frozen=True):
    """The size of a run: objects of a pair, the plan for the pairs, objects in the end, and seconds of each wait.

    `twin` is the number of objects that the kopf operator serves.
    """

    per_pair: int = 200
    plan: Plan = Plan(wanted=5, at_most=10, noise=0.20, within_s=100)
    many: int = 10_000
    many_within_s: float = 420.0
    idle_s: float = 120.0
    quiet_s: float = 5.0
    twin: int = 500


TINY = Size(per_pair=4, plan=TINY_PLAN, many=8, idle_s=1.0, quiet_s=0.2, twin=2)
# Objects made in one go on the way to many.
STEP = 250

Sample = dict[str, float]


def measure(*, tiny: bool = False) -> Measured:
    """Measure time, writes, restart and memory of the operator, and then the kopf operator on another API server."""
    return _measured(TINY if tiny else Size())


def _measured(size: Size) -> Measured:
    pairs, sample = take(functools.partial(_ours, size=size), quiet_s=size.quiet_s)
    _say(json.dumps(sample))
    sample |= take(functools.partial(_twin, size=size), quiet_s=size.quiet_s)
    return Measured(_figures(pairs, sample), TARGETS, [sample, *pairs.samples()], [pairs])


def _figures(pairs: Pairs, sample: Sample) -> Sample:
    growth_kb = (sample["rss_mb_many"] - sample["rss_mb_0"]) * 1024
    figures = {
        "time_vs_least": pairs.ratio(),
        "extra_writes_per_object": sample["ours_writes"] / sample["objects"] - len(CHILD_KINDS) - 1,
        "idle_core_fraction": sample["idle_cpu_s"] / sample["idle_s"],
        "base_rss_mb": sample["rss_mb_0"],
        "rss_kb_per_object": growth_kb / sample["many"],
        "rss_kb_per_owned_object": growth_kb / (sample["many"] * len(CHILD_KINDS)),
        "restart_after_list_s": sample["restart_s"] - sample["list_s"],
        "ours_per_1000_s": pairs.ours("s") * 1000,
        "least_per_1000_s": pairs.baseline("s") * 1000,
        "twin_vs_ours": sample["twin_s"] / pairs.ours("s"),
    }
    names = ("objects", "many", "idle_writes", "twin_writes", "restart_s", "restart_writes", "list_s", "rss_mb_objects", "rss_mb_many")
    return {name: round(value, 3) for name, value in (figures | {name: sample[name] for name in names}).items()}


async def _ours(place: Place, *, size: Size) -> tuple[Pairs, Sample]:
    async with place.changes() as changes:
        async with operator(place.folder, NAMESPACE) as ours:
            await ours.passes(0)
            await asyncio.sleep(size.quiet_s)
            sample: Sample = {"rss_mb_0": ours.rss_mb}
            pairs = await _pairs(place, changes, ours, size)
            objects = changes.added(DEPLOYMENT)
            await asyncio.sleep(size.quiet_s)
            sample |= {"objects": objects, "ours_writes": place.account.writes().total(), "ours_cpu_s": ours.cpu_s}
            _say(f"{pairs.ratio():.3f} times the least at {objects} objects; idle now for {size.idle_s:g} s")
            sample |= await _idle(place, ours, size.idle_s)
            sample["rss_mb_objects"] = ours.rss_mb
        return pairs, sample | await _restarted(place, changes, objects=objects, size=size)


async def _pairs(place: Place, changes: KubeChanges, ours: OperatorRun, size: Size) -> Pairs:
    """Take pairs in seconds an object: the operator between two halves of a bare client, which runs while the operator is suspended."""
    taking = Taking("the bare client", plan=size.plan)
    half = size.per_pair // 2
    async with place.changes(BARE) as bare:

        async def least() -> Times:
            numbers = range(bare.added(DEPLOYMENT), bare.added(DEPLOYMENT) + half)
            with ours.stopped():
                return {"s": await place.least(bare, numbers) / half}

        while taking.wants_more:
            before = await least()
            await asyncio.sleep(size.quiet_s / 2)  # the work that was due while it was stopped
            first = changes.added(DEPLOYMENT)
            seconds = await place.apply_all(changes, range(first, first + size.per_pair))
            taking.add(before, {"s": seconds / size.per_pair}, await least())
    return taking.done()


async def _idle(place: Place, ours: OperatorRun, idle_s: float) -> Sample:
    before, cpu_s = place.account.writes(), ours.cpu_s
    await asyncio.sleep(idle_s)
    idle_cpu_s, wrote = ours.cpu_s - cpu_s, place.account.writes() - before
    counted: Sample = {f"idle {request}": number for request, number in wrote.items()}
    return counted | {"idle_writes": wrote.total(), "idle_s": idle_s, "idle_cpu_s": idle_cpu_s}


async def _restarted(place: Place, changes: KubeChanges, *, objects: int, size: Size) -> Sample:
    """Time a new operator process until it has looked at all objects, and count its writes; then measure its memory with more objects."""
    sample: Sample = {}
    begun = time.monotonic()
    for kind in (DEPLOYMENT, *CHILD_KINDS):
        await place.cluster.list(kind, NAMESPACE)
    sample["list_s"] = time.monotonic() - begun
    before, begun = place.account.writes(), time.monotonic()
    async with operator(place.folder, NAMESPACE) as ours:
        await ours.passes(objects)
        sample["restart_s"], sample["restart_cpu_s"] = time.monotonic() - begun, ours.cpu_s
        await asyncio.sleep(size.quiet_s)
        sample["restart_writes"] = (place.account.writes() - before).total()
        _say(f"restart {sample['restart_s']:.1f} s, {sample['restart_writes']:.0f} writes; {size.many} objects now")
        sample["many_s"] = await _make_many(place, changes, size)
        await asyncio.sleep(size.quiet_s)
        sample |= {"rss_mb_many": ours.rss_mb, "many": changes.added(DEPLOYMENT)}
    return sample


async def _make_many(place: Place, changes: KubeChanges, size: Size) -> float:
    """Create deployments until there are `size.many`, or until the time for it is over; return the seconds.

    Too few are no error: memory is counted per object that there is.
    """
    begun = time.monotonic()
    while (there := changes.added(DEPLOYMENT)) < size.many and time.monotonic() - begun < size.many_within_s:
        await place.apply_all(changes, range(there, min(there + STEP, size.many)))
    return time.monotonic() - begun


async def _twin(place: Place, *, size: Size) -> Sample:
    """Run the kopf operator, and return its seconds and writes per object, and its resident memory in MB."""
    twin = str(ROOT / "benchmarks" / "stand_ins" / "kopf_twin.py")
    argv = [sys.executable, "-m", "kopf", "run", "--standalone", "--quiet", f"--namespace={NAMESPACE}", twin]
    async with place.changes() as changes, running(argv, place.folder / "twin.log") as process:
        await asyncio.sleep(2 * size.quiet_s)
        seconds = await place.apply_all(changes, range(size.twin))
        await asyncio.sleep(size.quiet_s)
        rss_mb = OperatorRun(process, 0).rss_mb
        return {"twin_s": seconds / size.twin, "twin_writes": place.account.writes().total() / size.twin, "twin_rss_mb": rss_mb}


def _say(what: str) -> None:
    print(f"P12: {what}", file=sys.stderr, flush=True)


def main() -> None:
    """Run P12 with the sizes of the command line, and print figures and samples as JSON."""
    options = argparse.ArgumentParser(description="P12 with other sizes; `python -m benchmarks P12` is the real one.")
    options.add_argument("--per-pair", type=int, default=Size().per_pair)
    options.add_argument("--many", type=int, default=Size().many)
    options.add_argument("--idle-seconds", type=float, default=Size().idle_s)
    given = options.parse_args()
    size = msgspec.structs.replace(Size(), per_pair=given.per_pair, many=given.many, idle_s=given.idle_seconds, twin=given.per_pair)
    measured = _measured(size)
    print(json.dumps({"figures": measured.figures, "rounds": measured.rounds, "samples": measured.samples}, indent=1))


if __name__ == "__main__":
    main()
