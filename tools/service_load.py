# SPDX-License-Identifier: Apache-2.0
"""Requests at a Service from inside the cluster, each at its time, while the memory of the ranks that serve them is looked at.

It runs in the worker's container, which has Python and the token of its control port, and imports none of our code:

    kubectl exec POD -c worker -- python3 -c "$(cat tools/service_load.py)" PLAN

PLAN is JSON: `url` of the Service, `requests` with `at` (seconds) and `body`, and `sampleSeconds`, or null for no samples. It prints
JSON: `began` (seconds since the epoch), `requests` with seconds from each request to its events, and `samples`.
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

Found = dict[str, Any]
CONTROL = "http://127.0.0.1:8001/v1/state"
TOKEN = Path("/etc/diffusion/control/token")
DEADLINE_S = 300.0


def main(plan: Found) -> Found:
    """Send all requests of a plan, each at its time and in its own thread; return their outcomes and the samples of memory.

    It waits for all answers, and then for `afterwardsSeconds`.
    """
    began, ended = time.monotonic(), threading.Event()
    found: Found = {"began": time.time(), "requests": [{} for _ in plan["requests"]], "samples": []}
    clients = [
        threading.Thread(target=_ask, args=(plan["url"], wanted, began, told))
        for wanted, told in zip(plan["requests"], found["requests"], strict=True)
    ]
    looking = threading.Thread(target=_look, args=(plan.get("sampleSeconds"), began, ended, found["samples"]))
    for thread in (looking, *clients):
        thread.start()
    for client in clients:
        client.join()
    # The last sleep is part of the story.
    time.sleep(plan.get("afterwardsSeconds", 0))
    ended.set()
    looking.join()
    return found


def _ask(url: str, wanted: Found, began: float, told: Found) -> None:
    """Wait until a request is due, stream it, and note its outcome in `told`; a refusal or a lost connection raises nothing.

    `status` is that of HTTP, or 0 without an answer, and `code` names an error. `at` counts seconds since `began`. The times of each kind's
    first event and of the end (`seconds`) count from the sending.
    """
    time.sleep(max(0.0, began + wanted["at"] - time.monotonic()))
    body = json.dumps({**wanted["body"], "stream": True, "stream_options": {"include_progress": True}}).encode()
    request = urllib.request.Request(f"{url}/v1/images/generations", data=body, headers={"Content-Type": "application/json"})
    asked = time.monotonic()
    told["at"] = asked - began
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            told["status"] = answer.status
            for line in answer:
                _note(line, time.monotonic() - asked, told)
    except urllib.error.HTTPError as error:
        told |= {"status": error.code, "code": json.loads(error.read()).get("error", {}).get("code")}
    except (OSError, ValueError) as error:
        told |= {"status": 0, "code": repr(error)}
    told["seconds"] = time.monotonic() - asked


def _note(line: bytes, seconds: float, told: Found) -> None:
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[len(b"data: ") :])
    kind = event.get("type", "error").rpartition(".")[2]
    told.setdefault(kind, seconds)
    if "error" in event:
        told["code"] = event["error"].get("code")


def _look(every_s: float | None, began: float, ended: threading.Event, samples: list[Found]) -> None:
    while every_s is not None and not ended.wait(every_s):
        try:
            samples.append({"at": time.monotonic() - began, **_sample()})
        except OSError:
            continue  # a rank that ends between two looks


def _sample() -> Found:
    """Return the engine's state and last operation, the number of held requests, and the ranks' resident bytes.

    These are given in all, and of the weights alone.
    """
    request = urllib.request.Request(CONTROL, headers={"Authorization": f"Bearer {TOKEN.read_text().strip()}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        state = json.load(answer)
    sizes = [_resident(rank) for rank in state["ranks"] if rank["pid"]]
    return {
        "state": state["state"],
        "held": state["held"]["current"],
        "resident": sum(whole for whole, _ in sizes),
        "weights": sum(weights for _, weights in sizes),
        "lastOperation": state["lastOperation"],
    }


def _resident(rank: Found) -> tuple[int, int]:
    ranges = [tuple(int(end, 16) for end in text.split("-")) for text in rank["memory"]["mappings"]]
    whole = weights = 0
    inside = False
    for line in Path(f"/proc/{rank['pid']}/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            low, high = (int(end, 16) for end in head.split("-"))
            inside = any(low < end and start < high for start, end in ranges)
        elif head == "Rss:":
            size = int(rest.split()[0]) * 1024
            whole += size
            weights += size if inside else 0
    return whole, weights


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
