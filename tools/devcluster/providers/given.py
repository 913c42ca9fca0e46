# SPDX-License-Identifier: Apache-2.0
"""A cluster of the user's own, by KUBECONFIG or by CLUSTER (a context's name): used as it is, never started or ended by us."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from .. import checks, images, programs
from ..errors import CommandFailed, NotOfThisMachine, NotRunning, PrerequisiteMissing
from ..kind.nodes import Nodes
from ..paths import cache_dir
from ..progress import run_quiet, say


class GivenProvider:
    """The provider of a cluster that the user names by KUBECONFIG or CLUSTER; it never starts or ends it."""

    name = "given"

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment

    def check(self) -> None:
        """Raise PrerequisiteMissing if no kubeconfig or no REGISTRY is given, or Go is needed to build kubectl or Helm and is missing."""
        named = self._environment.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        if not any(Path(file).is_file() for file in named.split(os.pathsep)):
            raise PrerequisiteMissing(f"KUBECONFIG or CLUSTER asks for a cluster of your own, and there is no file {named}")
        registry_reference(self._environment.get("REGISTRY"), "localhost/any")
        if shutil.which("helm") is None or shutil.which("kubectl") is None:
            checks.go()

    def prepare(self) -> None:
        """Find or build helm; the cluster exists, and `kubectl` builds a missing kubectl only when it is asked for."""
        programs.helm()

    def up(self) -> None:
        """Start nothing: check the machine, prepare the programs, and raise NotRunning if the cluster does not answer."""
        self.check()
        self.prepare()
        if not self.running():
            raise NotRunning(f"the cluster of {self.kubeconfig()} does not answer")
        say(f"the cluster is {self.kubeconfig()}, as given")

    def down(self, *, purge: bool) -> None:
        """Leave the cluster alone; with `purge` remove our cache."""
        say("the cluster was given, so it stays as it is")
        if purge:
            shutil.rmtree(cache_dir(), ignore_errors=True)

    def running(self) -> bool:
        """Return whether its API server answers that it is ready; false also if it cannot be reached."""
        ready = [str(self.kubectl()), "--kubeconfig", str(self.kubeconfig()), "--request-timeout=20s", "get", "--raw", "/readyz"]
        try:
            return run_quiet(ready).strip() == "ok"
        except CommandFailed:
            return False

    def kubeconfig(self) -> Path:
        """Return the given file; with CLUSTER or several files, write and return one with that context alone."""
        files = self._environment.get("KUBECONFIG", "") or str(Path.home() / ".kube" / "config")
        context = self._environment.get("CLUSTER")
        if context is None and os.pathsep not in files:
            return Path(files)
        flat = [str(self.kubectl()), "config", "view", "--minify", "--flatten", "--raw", *([f"--context={context}"] if context else [])]
        text = run_quiet(flat, env={**os.environ, "KUBECONFIG": files})
        target = cache_dir() / "given.kubeconfig"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(mode=0o600)
        target.write_text(text)
        return target

    def kubectl(self) -> Path:
        """Return kubectl from PATH; without it, build all of Kubernetes, once, and return kubectl from there."""
        found = shutil.which("kubectl")
        return Path(found) if found else programs.kube() / "kubectl"

    def own_nodes(self) -> Nodes:
        """Raise NotOfThisMachine: nothing here can reach beneath these nodes."""
        raise NotOfThisMachine("this needs nodes on this machine: leave out the cluster that was given")

    def load_image(self, reference: str) -> str:
        """Push a local image to the registry in the variable REGISTRY, and return its reference there, which the cluster can pull.

        Raises:
            PrerequisiteMissing: REGISTRY is not set.
        """
        target = registry_reference(self._environment.get("REGISTRY"), reference)
        images.publish(reference, target)
        return target


def registry_reference(registry: str | None, reference: str) -> str:
    """Return the name of a local image in `registry`, which may include a folder: `localhost/` at its beginning is replaced by it.

    Raises:
        PrerequisiteMissing: no registry is set.
    """
    if not registry:
        raise PrerequisiteMissing(
            "A cluster of your own cannot take images from this machine. Set REGISTRY to a registry, with a folder, to which you may push "
            "and from which the cluster pulls, for example REGISTRY=registry.example.com/me"
        )
    return f"{registry.rstrip('/')}/{reference.removeprefix('localhost/')}"
