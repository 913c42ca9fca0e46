# SPDX-License-Identifier: Apache-2.0
"""containerd's leftovers of nodes that are gone."""

from __future__ import annotations

import time
from pathlib import Path

from ..errors import CommandFailed
from . import daemons, namespace
from .config import Node

ANSWER_S = 30.0


def forget_containers(node: Node, pid: int, runtime: Path) -> bool:
    """Delete the containers of an earlier node from containerd's records, and return whether there were any.

    If so, containerd has to be started again: until then it takes them for its own. It waits up to 30 s for containerd.
    """
    ctr = daemons.ctr(node, runtime)
    ends = time.monotonic() + ANSWER_S
    while True:
        try:
            left = namespace.run_inside(pid, [*ctr, "containers", "list", "--quiet"]).split()
            break
        except CommandFailed:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)
    if left:
        namespace.run_inside(pid, [*ctr, "containers", "delete", *left])
    return bool(left)
