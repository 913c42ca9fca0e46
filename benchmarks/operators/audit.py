# SPDX-License-Identifier: Apache-2.0
"""The requests to write that an account sent, by the API server's audit log: refusals, dry runs and those that changed nothing included.

Leases are left out, because each process renews its own. So are the API server's own repairs, which another account writes.
"""

import json
import subprocess
from collections import Counter
from pathlib import Path

from diffusion_operator.api.names import LEASE
from tools.devcluster import programs

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


class Account:
    """A new service account with the rights of an administrator, whose requests are counted in the API server's audit log."""

    def __init__(self, kubeconfig: Path, namespace: str, name: str) -> None:
        """Create a service account in the namespace, with the role cluster-admin and a token.

        `kubeconfig` is the administrator's, and lies beside the audit log.
        """
        self._log = kubeconfig.with_name("audit.log")
        self._user = f"system:serviceaccount:{namespace}:{name}"
        kubectl(kubeconfig, "create", "serviceaccount", name, "--namespace", namespace)
        kubectl(kubeconfig, "create", "clusterrolebinding", name, "--clusterrole=cluster-admin", f"--serviceaccount={namespace}:{name}")
        content = json.loads(kubeconfig.read_text())
        content["users"][0]["user"] = {"token": kubectl(kubeconfig, "create", "token", name, "--namespace", namespace).strip()}
        self._kubeconfig = json.dumps(content)

    def write_kubeconfig(self, target: Path) -> None:
        """Write a kubeconfig for a program that is to act as this account."""
        target.write_text(self._kubeconfig)

    def writes(self) -> Counter[str]:
        """Count this account's write requests since its creation, by verb and resource, such as `create pods`. Leases are left out."""
        counted: Counter[str] = Counter()
        for file in sorted(self._log.parent.glob("audit*.log")):
            with file.open() as lines:
                for entry in map(json.loads, lines):
                    about = entry.get("objectRef", {}).get("resource", "")
                    if entry["user"]["username"] == self._user and entry["verb"] in WRITES and about != LEASE.plural:
                        counted[f"{entry['verb']} {about}"] += 1
        return counted


def kubectl(kubeconfig: Path, *arguments: str) -> str:
    """Run kubectl as the kubeconfig says, and return its standard output.

    Raises:
        RuntimeError: it failed; with its error output.
        TimeoutExpired: it did not end within a minute.
    """
    command: list[str | Path] = [programs.kube() / "kubectl", "--kubeconfig", kubeconfig, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")
    return done.stdout
