# SPDX-License-Identifier: Apache-2.0
"""Memory of a replica's weights, by the worker's report and by the kernel's (`/proc/PID/smaps`).

Both are read by `kubectl exec` in the worker's container, so it is the same on every cluster and needs no rights on the node.
The worker only says which address ranges are weights; what of them is in memory is the kernel's to say.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import DemoFailed
from .kubectl import Kubectl

CONTAINER = "worker"
READ_STATE = """\
import urllib.request
token = open("/etc/diffusion/control/token").read().strip()
request = urllib.request.Request("http://127.0.0.1:8001/v1/state", headers={"Authorization": "Bearer " + token})
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""

# The share of the weights' mapping that may stay in memory during sleep.
MAY_STAY = 0.02

AddressRange = tuple[int, int]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank: `weights` in all, `resident` as the kernel counts them in memory, `reported` as the worker counts these."""

    rank: int
    pid: int
    weights: int
    resident: int
    reported: int


def read_state(kubectl: Kubectl, pod: str) -> dict[str, Any]:
    """Return the worker's state document, read from its control port by a Python program in the pod, where the token's file is mounted."""
    state: dict[str, Any] = json.loads(kubectl.text("exec", pod, "--container", CONTAINER, "--", "python3", "-c", READ_STATE))
    return state


def read_weights_memory(kubectl: Kubectl, pod: str) -> list[RankMemory]:
    return [_rank_memory(kubectl, pod, rank) for rank in read_state(kubectl, pod)["ranks"]]


def _rank_memory(kubectl: Kubectl, pod: str, rank: dict[str, Any]) -> RankMemory:
    memory = rank["memory"]
    ranges = [parse_range(text) for text in memory["mappings"]]
    if not ranges:
        raise DemoFailed(f"rank {rank['rank']} of pod {pod} names no mapping that holds its weights")
    smaps = kubectl.text("exec", pod, "--container", CONTAINER, "--", "cat", f"/proc/{rank['pid']}/smaps")
    return RankMemory(
        rank=rank["rank"],
        pid=rank["pid"],
        weights=memory["weightsBytes"],
        resident=resident_bytes(smaps, ranges),
        reported=memory["weightsResidentBytes"],
    )


def parse_range(text: str) -> AddressRange:
    """Return the two addresses of a range that the kernel writes in hexadecimal, such as `7f00-7f80`."""
    low, high = text.split("-")
    return int(low, 16), int(high, 16)


def resident_bytes(smaps: str, ranges: Sequence[AddressRange]) -> int:
    """Return the resident bytes of all mappings in the text of smaps that overlap one of the ranges.

    A mapping counts as a whole, also with a neighbour that the kernel joined to it.
    """
    total, inside = 0, False
    for line in smaps.splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            low, high = parse_range(head)
            inside = any(low < end and start < high for start, end in ranges)
        elif inside and head == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


def total_resident(ranks: Sequence[RankMemory]) -> int:
    return sum(rank.resident for rank in ranks)


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def check_given_back(before: Sequence[RankMemory], after: Sequence[RankMemory]) -> str:
    """Return the figures of a sleep in words, from each rank's memory before it and during it.

    Raises:
        DemoFailed: more than 2 % stayed, the weights were not in memory before, or the worker's figure is not the kernel's.
    """
    awake, asleep = total_resident(before), total_resident(after)
    if awake < sum(rank.weights for rank in before):
        raise DemoFailed(f"while awake the weights' mapping has {awake} bytes in memory, less than the weights have")
    if asleep > awake * MAY_STAY:
        raise DemoFailed(f"while asleep {asleep} of {awake} bytes of the weights' mapping stay in memory, expected at most {MAY_STAY:.0%}")
    for rank in after:
        if rank.resident != rank.reported:
            raise DemoFailed(f"rank {rank.rank} reports {rank.reported} bytes of weights in memory, the kernel says {rank.resident}")
    return f"weights in memory: {megabytes(awake)} before, {megabytes(asleep)} asleep ({1 - asleep / awake:.1%} less)"
