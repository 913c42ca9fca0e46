# SPDX-License-Identifier: Apache-2.0
"""The image of docs/sleep.md: 200 requests in bursts at a deployment that sleeps after ten idle seconds, on the development cluster.

python -m tools.sleep_timeline docs/images/sleep-timeline.png bench-output/sleep-timeline.json

The JSON has every request and every look at the ranks' memory; the last line printed is what the image says, in numbers.
"""

import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from tools.demo.installation import ROOT
from tools.demo.kubectl import Kubectl, Wanted, wait_for
from tools.demo.stage import stage
from tools.demo.weights_memory import CONTAINER

Found = dict[str, Any]
NAMESPACE, NAME = "diffusion-timeline", "digits"
MANIFEST = ROOT / "examples" / "sleep" / "on-idle.yaml"
LOAD = ROOT / "tools" / "service_load.py"
SEED, REQUESTS = 7, 200
SAMPLE_S, AFTERWARDS_S, START_S = 0.5, 16.0, 300.0
PROMPTS = ("a red digit seven", "a blue digit three", "a green digit eight")
BODY = {"size": "64x64", "num_inference_steps": 4}

WIDTH, LEFT, RIGHT, TOP, PANEL, GAP = 1180, 76, 16, 44, 150, 34
AWAKE, ASLEEP, MOVING = (46, 125, 50), (144, 164, 174), (239, 108, 0)
COLOURS = {"ready": AWAKE, "asleep": ASLEEP}


def bursts(seed: int, count: int) -> Iterator[float]:
    """Yield the seconds at which `count` requests come, ascending and the same for the same `seed`.

    A burst has 4 to 24 of them within two seconds, the last one only those that remain. Pauses of 2 to 30 s let the model sleep.
    """
    chance, at, left = random.Random(seed), 3.0, count
    while left:
        size = min(left, chance.randint(4, 24))
        yield from sorted(at + chance.uniform(0, 2) for _ in range(size))
        left -= size
        at += 2 + chance.uniform(2, 30)


def plan(seed: int = SEED, count: int = REQUESTS) -> Found:
    """Return a plan for tools/service_load.py: requests in bursts with random prompts, the same for the same seed."""
    chance = random.Random(seed)
    requests = [
        {"at": at, "body": {**BODY, "prompt": chance.choice(PROMPTS), "seed": number}} for number, at in enumerate(bursts(seed, count))
    ]
    return {"url": f"http://{NAME}", "requests": requests, "sampleSeconds": SAMPLE_S, "afterwardsSeconds": AFTERWARDS_S}


def summary(found: Found, events: Sequence[str]) -> Found:
    """Return the figures of a run: counts of requests, sleeps and wakes, seconds of requests, and the weights' memory.

    `events` has the reason of each of the deployment's Events, repeated for each one.
    """
    requests, samples = found["requests"], found["samples"]
    served = [one for one in requests if "completed" in one]
    held = [one["seconds"] for one in served if "held" in one]
    warm = [one["seconds"] for one in served if "held" not in one]
    awake = [one["weights"] for one in samples if one["state"] == "ready"]
    asleep = [one["weights"] for one in samples if one["state"] == "asleep"]
    return {
        "requests": len(requests),
        "served": len(served),
        "refused": len(requests) - len(served),
        "sleeps": operations(samples, "sleep"),
        "wakes": operations(samples, "wake"),
        "events": {reason: events.count(reason) for reason in ("Slept", "Woke")},
        "held": len(held),
        "seconds": {"warm": spread(warm), "held": spread(held)},
        "weights_awake_mib": round(statistics.median(awake) / 2**20, 1) if awake else None,
        "weights_asleep_mib": round(statistics.median(asleep) / 2**20, 1) if asleep else None,
        "asleep_fraction": round(len(asleep) / len(samples), 2),
    }


def operations(samples: Sequence[Found], kind: str) -> int:
    """Return how many operations of this kind, `sleep` or `wake`, succeeded after the first sample, as far as samples saw them."""
    ended = [one["lastOperation"] for one in samples[1:] if one["lastOperation"] != samples[0]["lastOperation"]]
    return len({one["operationId"] for one in ended if one["kind"] == kind and not one["error"]})


def spread(seconds: Sequence[float]) -> Found | None:
    """Summarise times by median (`p50`), 95th percentile (`p95`) and maximum (`max`), to two decimals; None if there are no times."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 2),
        "max": round(ordered[-1], 2),
    }


def draw(found: Found, told: Found) -> Image.Image:
    """Draw three panels over one time: the ranks' weights in memory, the ranks' memory as a whole, and the seconds of each request."""
    samples, requests = found["samples"], found["requests"]
    end = max(one["at"] for one in samples)
    image = Image.new("RGB", (WIDTH, TOP + 3 * (PANEL + GAP)), "white")
    panels = Panels(image, end)
    panels.title(
        f"{told['requests']} requests, {told['refused']} refused, {told['sleeps']} sleeps, {told['wakes']} wakes; "
        f"10 s idle time; asleep {told['asleep_fraction']:.0%} of the time"
    )
    panels.states(samples)
    panels.line(0, "resident memory of the ranks' weights (MiB, as the kernel counts)", _mebibytes(samples, "weights"))
    panels.line(1, "resident memory of the rank processes as a whole (MiB)", _mebibytes(samples, "resident"), from_zero=False)
    panels.dots(2, "seconds from a request to its image; orange: held", [(one["at"], one["seconds"], "held" in one) for one in requests])
    return image


def _mebibytes(samples: Sequence[Found], what: str) -> list[tuple[float, float]]:
    return [(one["at"], one[what] / 2**20) for one in samples]


class Panels:
    """Three panels of an image, one below the other, and the methods that draw in them; times are seconds since the start."""

    def __init__(self, image: Image.Image, end: float) -> None:
        self._pen = ImageDraw.Draw(image)
        self._font = ImageFont.load_default(size=13)
        self._end = end

    def title(self, text: str) -> None:
        self._pen.text((LEFT, 12), text, fill="black", font=ImageFont.load_default(size=16))

    def states(self, samples: Sequence[Found]) -> None:
        """Colour the time between samples by the engine's state, under the first panel: ready green, asleep grey, all others orange."""
        bottom = TOP + PANEL
        for one, after in itertools.pairwise(samples):
            box = (self._x(one["at"]), bottom + 3, self._x(after["at"]), bottom + 9)
            self._pen.rectangle(box, fill=COLOURS.get(one["state"], MOVING))

    def line(self, panel: int, label: str, values: Sequence[tuple[float, float]], *, from_zero: bool = True) -> None:
        largest, smallest = max(value for _, value in values), min(value for _, value in values)
        scale = self._axis(panel, label, 0.0 if from_zero else smallest, largest)
        steps: list[tuple[float, float]] = []
        for at, value in values:
            # An observation holds until the next look.
            steps += [(self._x(at), steps[-1][1])] if steps else []
            steps.append((self._x(at), scale(value)))
        self._pen.line(steps, fill=(21, 101, 192), width=2)

    def dots(self, panel: int, label: str, values: Sequence[tuple[float, float, bool]]) -> None:
        scale = self._axis(panel, label, 0.0, max(value for _, value, _ in values))
        for at, value, held in values:
            x, y = self._x(at), scale(value)
            self._pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=MOVING if held else AWAKE)

    def _axis(self, panel: int, label: str, low: float, high: float) -> Callable[[float], float]:
        """Draw the frame of a panel with its label and scale; return the function from a value to its vertical position in the image."""
        bottom, left, right = TOP + PANEL + panel * (PANEL + GAP), LEFT, WIDTH - RIGHT
        self._pen.line([(left, bottom - PANEL + 20), (left, bottom), (right, bottom)], fill="gray")
        self._pen.text((left + 6, bottom - PANEL), label, fill="black", font=self._font)
        for at in range(0, int(self._end) + 1, 30):
            self._pen.line([(self._x(at), bottom), (self._x(at), bottom + 3)], fill="gray")
            self._pen.text((self._x(at) - 10, bottom + 10), f"{at} s", fill="dimgray", font=self._font)

        def y(value: float) -> float:
            return bottom - (PANEL - 34) * (value - low) / max(high - low, 1e-9)

        for value in (low, (low + high) / 2, high):
            self._pen.text((left - 52, y(value) - 8), f"{value:6.1f}", fill="dimgray", font=self._font)
        return y

    def _x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(at, self._end) / self._end


def run(kubectl: Kubectl) -> tuple[Found, list[str]]:
    """Deploy MANIFEST, wait until it serves, and run the planned load inside its pod.

    Return the load's JSON, and the reasons of all Events about the deployment.
    """
    kubectl.apply(MANIFEST)
    wait_for(kubectl, f"dd/{NAME}", Wanted("Ready", "True", ["Serving"]), deadline_s=START_S)
    (pod,) = kubectl.get("pods", "--selector", f"diffusion-operator.dev/deployment={NAME}")["items"]
    wanted = plan()
    length_s = wanted["requests"][-1]["at"] + AFTERWARDS_S
    script = ("python3", "-c", LOAD.read_text(), json.dumps(wanted))
    words = ("exec", pod["metadata"]["name"], "--container", CONTAINER, "--", *script)
    found: Found = json.loads(kubectl.text(*words, deadline_s=length_s + 300))
    events = kubectl.get("events.events.k8s.io", "--field-selector", f"regarding.name={NAME}")["items"]
    return found, [str(one["reason"]) for one in events]


def main(image: str, raw: str) -> None:
    """Run the load on the development cluster, write the image and the raw JSON, and print the summary."""
    with stage(NAMESPACE) as set_up:
        found, events = run(set_up.kubectl)
    told = summary(found, events)
    Path(raw).parent.mkdir(parents=True, exist_ok=True)
    Path(raw).write_text(json.dumps({"summary": told, **found}, indent=1))
    draw(found, told).quantize(colors=64).save(image, optimize=True)
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
