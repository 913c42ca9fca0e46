# SPDX-License-Identifier: Apache-2.0
"""Ways into nodes that run on this machine, so that tests can break them and look beneath them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


class OwnNodes(ABC):
    """The nodes of a provider that has them on this machine, with the means to break them and look beneath them."""

    first: str
    """The first node's name."""
    kubeconfig: Path
    """The administrator's kubeconfig, as the first node sees it."""
    audit_log: Path
    """The API server's log of who asked what; the file before it lies beside it."""
    kubelet: Path
    """The kubelet's folder, as the first node sees it."""
    cdi: Path
    """The folder in which drivers of devices tell the runtime what a container gets, as the first node sees it."""

    @abstractmethod
    def find_program(self, name: str) -> int | None:
        """Find a Kubernetes program by name on the first node, and return its pid in the machine's namespace; None if it does not run."""

    @abstractmethod
    def command(self, program: Path) -> list[str]:
        """Return the words of a command that runs a static program of this machine on the first node.

        When the process of that command ends, so does the program.
        """

    @abstractmethod
    def add_second(self) -> str:
        """Make sure that a second node runs, and return its name once it is Ready."""

    @abstractmethod
    def remove_second(self) -> None:
        """Remove the second node and its pods from the cluster, and end the node; do nothing if there is none."""

    @abstractmethod
    def unplugged(self) -> AbstractContextManager[None]:
        """Cut the second node's network off during the block; it and its pods run on."""

    @contextmanager
    def second_node(self) -> Iterator[str]:
        """Add the second node, yield its name, and remove it at the end of the block, also if it was there before."""
        try:
            yield self.add_second()
        finally:
            self.remove_second()
