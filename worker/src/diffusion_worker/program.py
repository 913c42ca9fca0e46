# SPDX-License-Identifier: Apache-2.0
"""Start of the program: able to end before it is able to do anything else.

In a container it is the first process, and the kernel drops a signal that the first process has no handler for. A SIGTERM that came
while it still imported would be lost, and its pod would stay until the kubelet's patience ends.
"""

import signal
import sys
from types import FrameType


def main() -> None:
    """Entry point; `cli.main` after a handler for SIGTERM, which the server replaces by its own."""
    signal.signal(signal.SIGTERM, _end)
    from diffusion_worker.cli import main as run

    run()


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
