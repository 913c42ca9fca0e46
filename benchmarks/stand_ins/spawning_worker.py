# SPDX-License-Identifier: Apache-2.0
"""The real worker with the digits model, a spawned rank and as many standbys as the argument says: `python -m …spawning_worker 1`."""

import logging
import sys

from benchmarks.stand_ins.image_server import DIGITS
from diffusion_worker.config import Device, StartMethod, WorkerConfig
from diffusion_worker.ranks.executor import RankExecutor
from diffusion_worker.server.serve import LOOPBACK, Listen, run


def main(standbys: int) -> int:
    """Serve images on ports that the system chooses until SIGTERM, through any number of lost ranks; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    config = WorkerConfig(
        model=str(DIGITS),
        served_name="digits",
        device=Device.CPU,
        start_method=StartMethod.SPAWN,
        standby_ranks=standbys,
        max_restarts=1_000,
        # Without adapters there is no fork server for their loads.
        max_loras=0,
    )
    return run(config, Listen(host=LOOPBACK, port=0, control_port=0), lambda: RankExecutor(config))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
