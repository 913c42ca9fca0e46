# SPDX-License-Identifier: Apache-2.0
"""Puts the operator into the cluster with its chart, as a platform engineer would."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import DemoFailed

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "diffusion-operator"
RELEASE = "diffusion-operator"


@dataclass(frozen=True)
class Images:
    """Container images of the operator and the worker, by the references that pods in the demo's cluster use."""

    operator: str
    worker: str


def run_helm(helm: Path, kubeconfig: Path, *words: str, deadline_s: int) -> str:
    """Run helm against the cluster of `kubeconfig`, and return its standard output.

    Raises:
        DemoFailed: helm failed; the message has its error output.
        subprocess.TimeoutExpired: helm still ran 30 s after `deadline_s`.
    """
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    done = subprocess.run([helm, *words], capture_output=True, text=True, timeout=deadline_s + 30, env=environment, check=False)
    if done.returncode != 0:
        raise DemoFailed(f"helm {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def helm_install(
    helm: Path, kubeconfig: Path, *, namespace: str, images: Images, deadline_s: int, settings: Mapping[str, str] = {}, chart: Path = CHART
) -> str:
    """Install or upgrade the operator's release by `helm upgrade --install`, wait for its pod, and return what helm printed.

    CRDs are taken over from any other release that had them: on a development cluster the newest tree is right.
    """
    repository, _, tag = images.operator.rpartition(":")
    chosen = {"image.repository": repository, "image.tag": tag, "engine.image": images.worker, **settings}
    words = [
        *("upgrade", "--install", RELEASE, str(chart), "--namespace", namespace, "--create-namespace"),
        *("--take-ownership", "--wait", "--timeout", f"{deadline_s}s"),
        *(part for key, value in chosen.items() for part in ("--set", f"{key}={value}")),
    ]
    return run_helm(helm, kubeconfig, *words, deadline_s=deadline_s)
