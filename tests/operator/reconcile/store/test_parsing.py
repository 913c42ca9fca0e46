# SPDX-License-Identifier: Apache-2.0
"""An object that is not of the schema is refused by the field, with what was expected there and what was found."""

from typing import Any

import pytest

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.errors import NotUnderstood
from diffusion_operator.reconcile.store.parsing import deployment_named, parse
from support.operator.rig import adapter, deployment

METADATA = {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}


def stored(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest | {"metadata": manifest["metadata"] | METADATA}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"replicas": "three"}, "spec.replicas: expected int, found str"),
        ({"podDisruptionBudget": "Never"}, "spec.podDisruptionBudget: expected one of Auto, None, found 'Never'"),
        ({"sleep": 3}, "spec.sleep: expected object, found int"),
        ({"model": {}}, "spec.model.source: expected a value, found none"),
        ({"lora": {"secrets": ["a", 7]}}, "spec.lora.secrets[1]: expected str, found int"),
        ({"scheduling": {"nodeSelector": {"disk": 7}}}, "spec.scheduling.nodeSelector[...]: expected str, found int"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_error_names_the_field_and_what_was_expected_and_found(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(NotUnderstood) as raised:
        parse(stored(deployment(**spec)), DiffusionDeployment)
    assert raised.value.why == why
    assert str(raised.value) == f"DiffusionDeployment d is not understood: {why}"


def test_an_object_without_a_spec_is_refused_too() -> None:
    manifest = stored(deployment())
    del manifest["spec"]
    with pytest.raises(NotUnderstood) as raised:
        parse(manifest, DiffusionDeployment)
    assert raised.value.why == "spec: expected a value, found none"


def test_what_was_found_is_cut_and_escaped() -> None:
    with pytest.raises(NotUnderstood) as raised:
        parse(stored(adapter(format="\x1b[2J" + 999 * "x")), LoRAAdapter)
    assert raised.value.why.startswith("spec.format: expected one of ")
    assert len(raised.value.why) <= 400
    assert raised.value.why.isprintable()


@pytest.mark.parametrize("spec", [None, 3, {}, {"deploymentRef": "d"}, {"deploymentRef": {"name": 3}}], ids=repr)
def test_an_adapter_may_name_its_deployment_in_a_way_that_is_not_understood(spec: object) -> None:
    assert deployment_named({"spec": spec}) == ""
