# SPDX-License-Identifier: Apache-2.0
"""Paths: the repository, the cache (kept, keyed by content) and the state of running programs (gone after `down`)."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# Our engine runs as root, one a machine, so its places are fixed: a later `up` or `down` finds what a killed one left.
KIND_STATE = Path("/var/lib/diffusion-operator/kind")
IMAGES_RUN = Path("/run/diffusion-operator/images")


def cache_dir() -> Path:
    """Return this project's folder in XDG_CACHE_HOME or ~/.cache, which may not exist yet; it holds programs, images, locks and logs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "diffusion-operator"


def image_store() -> Path:
    """Return the folder of buildah's images and layers; buildah mounts the folder upon itself while it builds."""
    return cache_dir() / "storage"


def log_dir() -> Path:
    """Return the cache's folder for logs of commands, such as builds, and make it if it is missing."""
    directory = cache_dir() / "log"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def apiserver_state() -> Path:
    """Return the folder of the API server that `up --only-apiserver` leaves running; it may not exist. Each user has another one."""
    if os.geteuid() == 0:
        return Path("/run/diffusion-operator/apiserver")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/diffusion-operator-{os.geteuid()}") / "diffusion-operator-apiserver"
