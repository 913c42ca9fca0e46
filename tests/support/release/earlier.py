# SPDX-License-Identifier: Apache-2.0
"""A version before this one, from the repository's history: its operator, its worker, its kinds and its chart.

Real: the sources of that commit. They run in this environment, with the libraries of today.
"""

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

from tools.release.upgrades import UPGRADES_FROM

ROOT = Path(__file__).resolve().parents[3]


class EarlierVersion:
    """The files of an earlier version in a folder."""

    def __init__(self, folder: Path, version: str, *, clone: Path = ROOT) -> None:
        """Write the files of a version in `UPGRADES_FROM`. Fail where the clone lacks its commit: a test of upgrades is never skipped."""
        commit = UPGRADES_FROM[version]
        made = subprocess.run(["git", "archive", commit], cwd=clone, capture_output=True)
        if made.returncode != 0:
            raise AssertionError(
                f"expected commit {commit[:7]}, a version to upgrade from, in this clone; found {made.stderr.decode().strip()!r}. "
                "In a shallow clone run `git fetch --unshallow`"
            )
        with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
            archive.extractall(folder, filter="data")
        self.root = folder

    @property
    def crds(self) -> list[Path]:
        return sorted((self.root / "crds").glob("*.yaml"))

    @property
    def operator_sources(self) -> Path:
        return self.root / "operator" / "src"

    @property
    def worker_sources(self) -> Path:
        return self.root / "worker" / "src"

    @property
    def chart(self) -> Path:
        return self.root / "charts" / "diffusion-operator"

    @property
    def support(self) -> Path:
        """Return the folder of that version's rigs and fakes, which match its modules."""
        return self.root / "tests" / "support"

    operator_program = "operator_process"
    """The counterpart of `support.operator.process`."""
    worker_program = "fake_worker"
    """The counterpart of `support.worker.fake_worker`."""
