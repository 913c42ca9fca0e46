# SPDX-License-Identifier: Apache-2.0
"""Memory at its real size for a real worker: a model of over a gigabyte, and a cgroup with a limit like a container's.

Real: the pipeline of the digits, the kernel's limit and its files. Not real: the weights of the transformer, which are random, and the
container. The cgroup needs root, a writable hierarchy of version 1 and `unshare`; `why_not` names what is missing.
"""

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
from pathlib import Path

from support.worker.process import DIGITS_MODEL

# 44 heads of 32: a width of 1,408, where four joint blocks have about 285 million parameters, 1.1 GB in float32. Half the heads have a
# quarter of that.
HEADS = 44
MEMORY = Path("/sys/fs/cgroup/memory")
# Seconds that the kernel has to let go of the processes of a cgroup.
LEFT_S = 10.0


def make_big_model(folder: Path, heads: int = HEADS) -> Path:
    """Copy the digits model to `folder`, with a wider transformer of random float16 weights, and return `folder`.

    It takes 0.6 GB on disk.
    """
    # Imported late: a test session that makes no big model need not import torch.
    import torch
    from diffusers import SD3Transformer2DModel

    shutil.copytree(DIGITS_MODEL, folder, ignore=lambda path, names: [name for name in names if Path(path).name == "transformer"])
    config = json.loads((DIGITS_MODEL / "transformer" / "config.json").read_text())
    config |= {"num_attention_heads": heads, "caption_projection_dim": heads * config["attention_head_dim"]}
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel.from_config(config).to(torch.float16)
    transformer.save_pretrained(folder / "transformer")
    return folder


def why_not() -> str | None:
    """Return the reason why no cgroup can be made here; None where one can."""
    if os.geteuid() != 0:
        return "not root"
    if not os.access(MEMORY / "cgroup.procs", os.W_OK):
        return f"no writable memory cgroups of version 1 at {MEMORY}"
    return None if shutil.which("unshare") else "no unshare"


class MemoryCgroup:
    """A memory cgroup, used as a context manager; leaving it deletes the cgroup and moves remaining processes to its parent."""

    def __init__(self) -> None:
        self._folder = MEMORY / f"worker-test-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> "MemoryCgroup":
        self._folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self._folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (MEMORY / "cgroup.procs").write_text(pid)
        ends = time.monotonic() + LEFT_S
        while not self._removed(may_be_busy=time.monotonic() < ends):
            time.sleep(0.1)

    def _removed(self, *, may_be_busy: bool) -> bool:
        """Delete the cgroup's folder and return True; False where it is busy and may be."""
        try:
            self._folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or not may_be_busy:
                raise
            return False
        return True

    @property
    def wrapper(self) -> list[str]:
        """The words to put before a command's. They enter the cgroup, mount the folder of it over the hierarchy's root in a private
        namespace, and exec the command."""
        script = f'echo $$ > {self._folder}/cgroup.procs && mount --bind {self._folder} {MEMORY} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "in-cgroup"]

    @property
    def anonymous_bytes(self) -> int:
        """Return the used memory without pages of files."""
        return int(dict(map(str.split, (self._folder / "memory.stat").open()))["total_rss"])

    def limit(self, bytes_: int | None) -> None:
        """Limit the memory to so many bytes; None: no limit."""
        (self._folder / "memory.limit_in_bytes").write_text(str(-1 if bytes_ is None else bytes_))
