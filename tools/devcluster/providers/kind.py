# SPDX-License-Identifier: Apache-2.0
"""A kind cluster, on the machine's Docker engine where one answers, and else on our own."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from .. import images, programs
from ..cache import locked
from ..errors import CommandFailed, NotRunning
from ..kind import nodes
from ..kind.engine import Engine, kubeconfig, ready
from ..paths import IMAGES_RUN, cache_dir
from ..progress import run_quiet, say


class KindProvider:
    """A cluster that the tool kind makes on a Docker engine. Both its name and its kubeconfig are apart from the user's."""

    name = "kind"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ready, self._kubeconfig = ready(engine), kubeconfig(engine)

    def check(self) -> None:
        """Raise PrerequisiteMissing if the machine lacks something for the cluster with all our images; change nothing."""
        self.engine.check()

    def prepare(self) -> None:
        """Find, build or download every program; those in the cache cost nothing."""
        self.engine.prepare()
        programs.helm()

    def up(self) -> None:
        """Start the engine and the cluster, or find them running; what a killed run left is put back first."""
        self.check()
        self.prepare()
        with locked("kind", directory=self.engine.locks):
            if self.running():
                say("the kind cluster is running")
                return
            self.engine.end()
            self.engine.up()
            try:
                nodes.create(self.engine)
                self._ready.touch()
            except BaseException:
                self.engine.end()
                raise

    def down(self, *, purge: bool) -> None:
        """End the cluster and restore the machine; with `purge` remove the cache too, with Docker's data."""
        with locked("kind", directory=self.engine.locks):
            self.engine.end()
        with locked("images"):
            images.clear_unfinished()
            shutil.rmtree(IMAGES_RUN, ignore_errors=True)
        for parent in (self.engine.state.parent, IMAGES_RUN.parent):
            with contextlib.suppress(OSError):  # it holds another of our files, or does not exist
                parent.rmdir()
        if purge:
            shutil.rmtree(cache_dir(), ignore_errors=True)

    def running(self) -> bool:
        """Return whether `up` came to its end, the engine lives and the API server says that it is ready."""
        if not self._ready.exists() or not self.engine.alive():
            return False
        asked: list[str | Path] = [self.kubectl(), "--kubeconfig", self._kubeconfig, "--request-timeout=5s", "get", "--raw", "/readyz"]
        try:
            return run_quiet(asked).strip() == "ok"
        except CommandFailed:
            return False

    def kubeconfig(self) -> Path:
        """Return the kubeconfig that kind wrote, whose address answers from this machine; raise NotRunning if there is none."""
        if not self._kubeconfig.exists():
            raise NotRunning("the kind cluster is not running: `python -m tools.devcluster up` starts it")
        return self._kubeconfig

    def kubectl(self) -> Path:
        """Return the path of a kubectl; the first call may have to build or copy it."""
        return self.engine.kubectl()

    def own_nodes(self) -> nodes.Nodes:
        """Return the means to break the nodes and look beneath them; raise NotOfThisMachine where this machine cannot."""
        found = nodes.Nodes(self.engine)
        found.check_reachable()
        return found

    def load_image(self, reference: str) -> str:
        """Bring a local image to each node, and return the same reference; raise NotRunning if there is no cluster."""
        self.kubeconfig()
        self.engine.load(reference, nodes.existing(self.engine))
        return reference
