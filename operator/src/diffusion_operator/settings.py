# SPDX-License-Identifier: Apache-2.0
"""Settings of the operator's process: one frozen struct, read once in __main__."""

from pathlib import Path

import msgspec

from diffusion_operator.errors import SettingsError

KEY_MINIMUM_BYTES = 16  # HMAC-SHA256 wants a key of its own strength or near it; less is a mistake in the chart


class Settings(msgspec.Struct, frozen=True):
    engine_image: str
    """The worker's image where a spec names none."""
    operator_key: bytes
    """Control tokens are derived from it, so that no Secret need ever be read."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty means all of them."""
    metrics_port: int | None = None
    """None: no metrics server."""
    liveness_port: int = 8080
    poll_timeout_s: float = 2.0
    """For GET /v1/state: a worker answers it without a lock, so 2 s is long."""
    call_timeout_s: float = 10.0
    """No action holds a reconcile longer; what takes longer is started, then observed."""
    steady_poll_s: float = 10.0
    """Between looks at a deployment in which nothing moves; its pods' events wake it earlier."""
    resync_s: float = 600.0
    """Everything is looked at and blindly re-applied about this often, for drift that has no watch."""
    parallel_reconciles: int = 16
    """Bounds the load on the API server after a restart with many objects."""


def read_operator_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"the operator key cannot be read from {path}: {error.strerror}") from error
    if len(key) < KEY_MINIMUM_BYTES:
        raise SettingsError(f"the operator key in {path} has {len(key)} bytes, expected at least {KEY_MINIMUM_BYTES}")
    return key
