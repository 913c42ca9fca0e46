# SPDX-License-Identifier: Apache-2.0
"""Comparison of the kinds in a cluster with those of the operator."""

from typing import Any

import pytest
import yaml

from diffusion_operator.api.names import GROUP, VERSION
from diffusion_operator.api.published_schema import missing_fields
from support.apiserver.real_apiserver import CRDS


def published() -> dict[str, Any]:
    """Return the kinds of this version as an API server publishes them."""
    crds = [yaml.safe_load(path.read_text())["spec"] for path in CRDS]
    schemas = {
        crd["names"]["kind"]: crd["versions"][0]["schema"]["openAPIV3Schema"]
        | {"x-kubernetes-group-version-kind": [{"group": GROUP, "version": VERSION, "kind": crd["names"]["kind"]}]}
        for crd in crds
    }
    return {"components": {"schemas": schemas | {"Other": {"type": "object"}}}}


def test_the_kinds_of_this_version_lack_nothing() -> None:
    assert missing_fields(published()) == []


@pytest.mark.parametrize(
    ("kind", "where", "field", "said"),
    [
        ("DiffusionDeployment", (), "replicaStates", "diffusiondeployments: status.replicaStates"),
        ("DiffusionDeployment", ("replicaStates", "items"), "state", "diffusiondeployments: status.replicaStates.state"),
        ("LoRAAdapter", (), "desiredReplicas", "loraadapters: status.desiredReplicas"),
    ],
)
def test_a_field_that_a_kind_lacks_is_named(kind: str, where: tuple[str, ...], field: str, said: str) -> None:
    document = published()
    schema = document["components"]["schemas"][kind]["properties"]["status"]
    for name in where:
        schema = schema["items"] if name == "items" else schema["properties"][name]
    del schema["properties"][field]
    assert missing_fields(document) == [said]


@pytest.mark.parametrize("document", [{}, {"components": {"schemas": {}}}])
def test_kinds_that_are_not_published_prove_nothing(document: dict[str, Any]) -> None:
    assert missing_fields(document) == []
