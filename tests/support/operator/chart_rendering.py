# SPDX-License-Identifier: Apache-2.0
"""Rendering of charts/diffusion-operator with the helm that tools/devcluster provides; documents are plain dicts.

Real: helm and the chart. Not real: there is no cluster that takes the documents.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "diffusion-operator"
NAMESPACE = "release-namespace"
# A helm that was built by `go install` assumes Kubernetes 1.20.
KUBERNETES = "1.36.0"
# libyaml if installed, since the documents with the CRDs are long.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
VALUE_SETS = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))


class RenderError(Exception):
    """A refusal by helm, with helm's message."""


class Chart:
    """The chart under one helm binary. `text` and `documents` are each one `helm template`, without a cluster.

    RenderError if helm fails.
    """

    def __init__(self, helm: Path) -> None:
        self._helm = helm

    def run(self, *arguments: str) -> str:
        done = subprocess.run([str(self._helm), *arguments], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise RenderError(done.stderr)
        return done.stdout

    def text(
        self,
        values: str = "default-values.yaml",
        *,
        overrides: Mapping[str, object] | None = None,
        chart: Path = CHART,
        kubernetes: str = KUBERNETES,
    ) -> str:
        """Render a value set of ci/, with single keys overridden, e.g. {"crds.keep": False}."""
        sets = [part for key, value in (overrides or {}).items() for part in ("--set-json", f"{key}={json.dumps(value)}")]
        arguments = ["--namespace", NAMESPACE, "--kube-version", kubernetes, "--values", str(CHART / "ci" / values), *sets]
        return self.run("template", "demo", str(chart), *arguments)

    def documents(self, values: str = "default-values.yaml", *, overrides: Mapping[str, object] | None = None) -> list[Document]:
        return [document for document in yaml.load_all(self.text(values, overrides=overrides), Loader=LOADER) if document]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def the_only(documents: list[Document], kind: str) -> Document:
    found = of_kind(documents, kind)
    assert len(found) == 1, f"expected one {kind}, found {[document['metadata']['name'] for document in found]}"
    return found[0]


def role_of_objects(documents: list[Document]) -> Document:
    """Return the Role for the watched objects, as opposed to the Role for Leases."""
    (found,) = (one for one in of_kind(documents, "Role") if not one["metadata"]["name"].endswith("leases"))
    return found


def pod_specs(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Yield the name of each Pod and Deployment among the documents, with the pod spec in it; other kinds are skipped."""
    for document in documents:
        if document["kind"] == "Pod":
            yield document["metadata"]["name"], document["spec"]
        elif document["kind"] == "Deployment":
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def leaves(value: object, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the leaves of a values file; an empty map or a list is a leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix
