# SPDX-License-Identifier: Apache-2.0
"""A memory cgroup of a test's own, whose limit a real worker runs under and sees as a container sees its own.

Real: the kernel's limit and its files. Not real: the container. It needs root, a writable hierarchy of version 1 and `unshare`;
where one of them is missing `why_not` says which.
"""

import contextlib
import os
import shutil
import uuid
from pathlib import Path

MEMORY = Path("/sys/fs/cgroup/memory")


def why_not() -> str | None:
    """Why there can be none here; None where there can."""
    if os.geteuid() != 0:
        return "not root"
    if not os.access(MEMORY / "cgroup.procs", os.W_OK):
        return f"no writable memory cgroups of version 1 at {MEMORY}"
    return None if shutil.which("unshare") else "no unshare"


class MemoryCgroup:
    """Make it as a context manager; leaving it takes it away, and leaves what still ends in it to its parent."""

    def __init__(self) -> None:
        self._folder = MEMORY / f"worker-test-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> "MemoryCgroup":
        self._folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self._folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (MEMORY / "cgroup.procs").write_text(pid)
        self._folder.rmdir()

    @property
    def wrapper(self) -> list[str]:
        """Put before a command: it then runs in the cgroup, and finds its limit where a container's is."""
        script = f'echo $$ > {self._folder}/cgroup.procs && mount --bind {self._folder} {MEMORY} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "in-cgroup"]

    @property
    def anonymous_bytes(self) -> int:
        """What is used but for pages of files."""
        lines = (self._folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("total_rss "))

    def limit(self, bytes_: int | None) -> None:
        """Allow so much from now on; None: any."""
        (self._folder / "memory.limit_in_bytes").write_text(str(-1 if bytes_ is None else bytes_))
