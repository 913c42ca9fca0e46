# SPDX-License-Identifier: Apache-2.0
"""Helm as a platform engineer runs it, on the operator's release in a rig's namespace, and a chart that is older than ours.

Real: helm, the chart and the cluster. Not real: the older version, which is this one with two changes.
"""

import shutil
from pathlib import Path
from typing import Any

import yaml

from tools.demo.installation import CHART, RELEASE, Images, helm_install, run_helm
from tools.devcluster import cluster, programs

DEADLINE_S = 120
OLDER = "0.0.9"
# A description that the older chart's CRD has, so that one sees which of the two is in the cluster.
OLDER_WORDS = "How many replicas it had in version 0.0.9."


class HelmRig:
    """The release in one namespace."""

    def __init__(self, namespace: str, images: Images) -> None:
        self.namespace = namespace
        self.images = images
        self.helm, self.kubeconfig = programs.helm(), cluster.provider().kubeconfig()

    def __call__(self, *words: str) -> str:
        return run_helm(self.helm, self.kubeconfig, *words, "--namespace", self.namespace, deadline_s=DEADLINE_S)

    def upgrade(self, chart: Path = CHART, **settings: str) -> str:
        """`helm upgrade --install`, with the operator's pod ready at its end; `engine_image` is the value `engine.image`."""
        own = {name.replace("_", "."): value for name, value in settings.items()}
        return helm_install(
            self.helm, self.kubeconfig, namespace=self.namespace, images=self.images, deadline_s=DEADLINE_S, settings=own, chart=chart
        )

    def uninstall(self) -> None:
        self("uninstall", RELEASE, "--wait", "--timeout", f"{DEADLINE_S}s")


def older_chart(folder: Path) -> Path:
    """Ours as an older version of it could have been: without a field of the spec, and with another description in its CRD."""
    chart = folder / "older"
    shutil.copytree(CHART, chart)  # symbolic links become files
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": OLDER, "appVersion": OLDER}))
    file = chart / "files" / "crds" / "diffusiondeployments.yaml"
    crd = yaml.safe_load(file.read_text())
    spec = spec_schema(crd)
    spec["replicas"]["description"] = OLDER_WORDS
    del spec["podDisruptionBudget"]
    file.write_text(yaml.safe_dump(crd))
    return chart


def spec_schema(crd: dict[str, Any]) -> dict[str, Any]:
    """The properties of the spec."""
    properties: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return properties
