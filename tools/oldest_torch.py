# SPDX-License-Identifier: Apache-2.0
"""The oldest torch that the worker allows, in a folder of the cache. Put before the environment's own in PYTHONPATH, it shares the rest."""

import os
import re
import shutil
import sys
from pathlib import Path

from tools.devcluster.cache import cached, content_hash
from tools.devcluster.paths import log_dir
from tools.devcluster.progress import run_logged
from tools.requirements import CONSTRAINTS, dependencies, versions

# torchvision's compiled part is for a single minor release of torch.
PACKAGES = ("torch", "torchvision")
# Libraries of CUDA that torch needs no more since 2.15, so that the environment lacks them.
LIBRARIES = ("nvidia-curand",)
INSTALL_TIMEOUT_S = 900
# A program that imports torch reads none of these, 200 MB.
UNUSED = ("torch/include", "torch/test", "torch/share/cmake")


def requirements() -> list[str]:
    """Return the lower bounds of `worker/pyproject.toml` as requirements, such as `torch==2.11.*`."""
    found = (re.match(rf"({'|'.join(PACKAGES)})>=([\d.]+)", bound) for bound in dependencies("worker"))
    return [f"{match[1]}=={match[2]}.*" for match in found if match]


def folder() -> Path:
    """Return the folder with the oldest torch and torchvision; unless cached, about 1 GB is downloaded, in a minute.

    Raises:
        CommandFailed: pip cannot install them.
    """
    index = os.environ.get("TORCH_INDEX", "")
    pins = versions(CONSTRAINTS.read_text())
    # Another index has builds that need none of them, or other ones.
    wanted = requirements() + ([] if index else [f"{name}=={pins[name]}" for name in LIBRARIES])
    return cached("oldest-torch", content_hash([*wanted, index, sys.version], relative_to=Path()), lambda new: _install(new, wanted, index))


def _install(new: Path, wanted: list[str], index: str) -> None:
    """Install the oldest torch into a folder without its dependencies, and remove parts that importing it does not need.

    CUDA's other libraries are those of the environment, which are of the same major release.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    command += [f"--target={new}", *([f"--index-url={index}"] if index else []), *wanted]
    run_logged(command, what="the oldest torch (about a minute, once)", log=log_dir() / "oldest-torch.log", deadline_s=INSTALL_TIMEOUT_S)
    for path in UNUSED:
        shutil.rmtree(new / path, ignore_errors=True)
