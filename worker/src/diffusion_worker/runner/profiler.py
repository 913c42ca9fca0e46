# SPDX-License-Identifier: Apache-2.0
"""A trace of one rank's work between a start and a stop, written by torch's profiler for the usual viewers."""

import logging
import re
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)


class RankProfiler:
    """The profiler of one rank; without a folder it does nothing."""

    def __init__(self, folder: str | None, *, rank: int) -> None:
        self._folder = Path(folder) if folder else None
        self._rank = rank
        self._running: profile | None = None
        self._prefix = ""

    def start(self, prefix: str) -> bool:
        """Start to trace this rank's CPU, and GPU if there is one; return False without a folder, or while another trace runs.

        `prefix` begins the file's name; characters unfit for one become underscores.
        """
        if self._folder is None or self._running is not None:
            return False
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._prefix = re.sub(r"[^A-Za-z0-9._-]", "_", prefix)
        self._running = profile(activities=activities)
        self._running.start()
        return True

    def stop(self) -> str | None:
        """End the running trace, write it to `<prefix>-rank<rank>-<time>.json` in the folder, and return its path.

        The folder is made if missing. If no trace was running, the result is None, and nothing is written.
        """
        running, self._running = self._running, None
        if running is None or self._folder is None:
            return None
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._prefix}-rank{self._rank}-{time.time_ns()}.json"
        running.export_chrome_trace(str(path))
        log.info("trace written path=%s", path)
        return str(path)
