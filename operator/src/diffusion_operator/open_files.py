# SPDX-License-Identifier: Apache-2.0
"""The limit of open files: each worker's watch is a connection, and so is each call beside it."""

import logging
import resource

from diffusion_operator.errors import SettingsError

OWN_FILES = 128
"""Those of the process itself: the API server's watches and writes, logs, probes, metrics."""
FILES_A_WORKER = 2
LEAST_WORKERS = 64
FEW_WORKERS = 2000

log = logging.getLogger(__name__)


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return how many workers it is enough for.

    Raises SettingsError if they are fewer than 64; below 2000 it logs a warning.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return check(hard)


def check(limit: int) -> int:
    """Return how many workers a limit of open files is enough for.

    Raises SettingsError if they are fewer than 64; below 2000 it logs a warning.
    """
    if limit == resource.RLIM_INFINITY:
        return FEW_WORKERS * 1000
    workers = (limit - OWN_FILES) // FILES_A_WORKER
    if workers < LEAST_WORKERS:
        expected = OWN_FILES + FILES_A_WORKER * LEAST_WORKERS
        raise SettingsError(
            f"the hard limit of open files (RLIMIT_NOFILE) is {limit}, expected at least {expected}; raise it for the container"
        )
    if workers < FEW_WORKERS:
        log.warning(
            "limit of open files limit=%d: it is enough for %d workers; raise RLIMIT_NOFILE of the container for more", limit, workers
        )
    return workers
