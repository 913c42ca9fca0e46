# SPDX-License-Identifier: Apache-2.0
"""The workflow's steps, run in their order against a registry of our own, and a chart that needs no value after them.

Real: the operator's container image, helm and the registry. Not real: the worker's container image, whose 5 GB take a minute to push.
Not run: the bills of materials, for which syft would be built first; login and attestations, which only GitHub has.
"""

import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from support.operator.chart_rendering import KUBERNETES, Chart, Document, the_only
from support.release.registry import registry
from support.release.workflow import STEP_S, run_step
from tools.devcluster import programs
from tools.release.version import package_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STEP_S)]

VERSION = package_version("operator")
WORKER = f"registry.example/diffusion-worker@sha256:{'0' * 64}"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class Release:
    """Outcome of the workflow: a registry, and the `name` and `digest` there of the operator's container image and of its chart."""

    registry: str
    operator: dict[str, str]
    chart: dict[str, str]

    @property
    def operator_image(self) -> str:
        return f"{self.operator['name']}@{self.operator['digest']}"

    @property
    def chart_reference(self) -> str:
        return f"oci://{self.chart['name']}@{self.chart['digest']}"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("release")
    with registry(folder) as address:
        variables = {"REGISTRY": f"{address}/Owner", "TAG": f"v{VERSION}"}
        operator = run_step("operator", variables, folder / "operator")
        images = {"OPERATOR": f"{operator['name']}@{operator['digest']}", "WORKER": WORKER}
        yield Release(address, operator, run_step("chart", variables | images, folder / "chart"))


@pytest.fixture(scope="module")
def helm() -> Chart:
    return Chart(programs.helm())


def digest_in_registry(name: str) -> str:
    """Ask the registry for an image or chart at tag VERSION, and return its digest; `name` is `HOST:PORT/REPOSITORY`.

    HTTPError if the registry lacks it.
    """
    address, _, repository = name.partition("/")
    asked = urllib.request.Request(f"http://{address}/v2/{repository}/manifests/{VERSION}", method="HEAD", headers={"Accept": MANIFEST})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return str(answer.headers["Docker-Content-Digest"])


def test_image_and_chart_are_in_the_registry_by_version_and_digest(released: Release) -> None:
    assert released.operator["name"] == f"{released.registry}/owner/diffusion-operator"
    assert released.chart["name"] == f"{released.registry}/owner/charts/diffusion-operator"
    for made in (released.operator, released.chart):
        assert digest_in_registry(made["name"]) == made["digest"]


def test_the_chart_renders_by_its_digest_with_no_value_named(released: Release, helm: Chart) -> None:
    text = helm.run("template", "demo", released.chart_reference, "--plain-http", "--kube-version", KUBERNETES)
    documents: list[Document] = [document for document in yaml.safe_load_all(text) if document]
    deployment = the_only(documents, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == released.operator_image
    assert WORKER in container["args"]
    assert deployment["metadata"]["labels"]["app.kubernetes.io/version"] == VERSION


def test_the_chart_is_pulled_by_its_version_too(released: Release, helm: Chart, tmp_path: Path) -> None:
    pull = ("pull", f"oci://{released.chart['name']}", "--version", VERSION, "--plain-http", "--untar", "--untardir", str(tmp_path))
    helm.run(*pull)
    about = yaml.safe_load((tmp_path / "diffusion-operator" / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (VERSION, VERSION)
    assert len([*(tmp_path / "diffusion-operator" / "files" / "crds").iterdir()]) == 2
