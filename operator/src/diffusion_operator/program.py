# SPDX-License-Identifier: Apache-2.0
"""Entry point of the program, which handles SIGTERM before its slow imports.

In a container the program is the first process, and the kernel drops signals for which that process has no handler. A SIGTERM during
the imports would be lost, and the pod would stay until its grace period ends.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Install a handler for SIGTERM that exits with 143, and run the command line; kopf later replaces the handler by its own."""
    signal.signal(signal.SIGTERM, _end)
    from diffusion_operator.__main__ import main as run

    run()


def _end(number: int, frame: FrameType | None) -> None:
    # Not by an exception: it would be lost where a library that is being imported catches all of them. There is nothing to close yet.
    os._exit(128 + number)
