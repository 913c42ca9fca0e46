# SPDX-License-Identifier: Apache-2.0
"""Memory of the machine, within the limit of this container's cgroup. It is read without torch, so that the server can ask too."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
# Limits of memory cgroups, version 2 then 1. No limit is a word in version 2 and a huge number in version 1.
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
# Files with a cgroup's usage, and with its share of file pages, which the system drops when it needs room.
USES = (("memory.current", "memory.stat", ""), ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_"))
FILE_PAGES = ("active_file", "inactive_file")


def available_host_bytes(cgroup: Path | None = None) -> int:
    """Return the bytes of host memory that could be taken now, within the cgroup's limit.

    Cached pages of files do not count as used, because the system drops them when it needs room.
    """
    lines = MEMINFO.read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_left_in(cgroup or CGROUP)])


def machine_bytes(cgroup: Path | None = None) -> int:
    """Return the bytes that this process and its siblings may use together: the machine's memory, or a cgroup's lower limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(cgroup or CGROUP, name) for name in LIMITS]
    return min([physical, *(limit for limit in limits if limit)])


def _left_in(cgroup: Path) -> list[int]:
    """Return the bytes left below the cgroup's limit, in a list of one; an empty list where there is no limit."""
    for limit_name, (use_name, stat_name, prefix) in zip(LIMITS, USES, strict=True):
        limit, used = _number(cgroup, limit_name), _number(cgroup, use_name)
        if limit and used is not None:
            return [max(0, limit - max(0, used - _file_pages(cgroup / stat_name, prefix)))]
    return []


def _file_pages(stat: Path, prefix: str) -> int:
    try:
        counts = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(counts.get(prefix + name, 0)) for name in FILE_PAGES)


def _number(cgroup: Path, name: str) -> int | None:
    try:
        return int((cgroup / name).read_text())
    except (OSError, ValueError):
        return None
