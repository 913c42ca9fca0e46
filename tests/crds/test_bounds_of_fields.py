# SPDX-License-Identifier: Apache-2.0
"""The bounds of fields: a real API server takes the minimum and maximum of every whole number, each value of every enum, nothing else."""

from typing import Any

import pytest

from support.apiserver.kind_api import Api, Document, dd, ends, lora, merged, nested, spec_schema

pytestmark = pytest.mark.apiserver

DOCUMENTS = {"diffusiondeployments": dd(), "loraadapters": lora()}
# Further fields that a value needs, so that only its own bound can refuse it.
COMPANIONS: dict[tuple[str, Any], Document] = {
    ("parallelism.tensor", 16): {"parallelism": {"ranksPerReplica": 16}},
    ("parallelism.sequence", 16): {"parallelism": {"ranksPerReplica": 16}},
    ("parallelism.shard", 16): {"parallelism": {"ranksPerReplica": 16}},
    ("lora.maxCached", 0): {"lora": {"maxLoaded": 0}},
    ("lora.maxPerRequest", 16): {"lora": {"maxLoaded": 16}},
    ("requests.defaults.steps", 10000): {"requests": {"limits": {"maxSteps": 10000}}},
    ("replicaRecovery.backoffSeconds", 3600): {"replicaRecovery": {"backoffMaxSeconds": 3600}},
    ("replicaRecovery.backoffMaxSeconds", 1): {"replicaRecovery": {"backoffSeconds": 1}},
    ("rollout.maxUnavailable", 0): {"rollout": {"maxSurge": 1}},
    ("engine.loadFormat", "CustomPipeline"): {"model": {"pipeline": "a:B"}},
}


def document(plural: str, path: tuple[str, ...], value: Any) -> Document:
    base = DOCUMENTS[plural]
    companion = COMPANIONS.get((".".join(path), value), {})
    return base | {"spec": merged(merged(base["spec"], companion), nested(path, value))}


FIELDS = [(plural, path, schema) for plural in DOCUMENTS for path, schema in ends(spec_schema(plural))]
NUMBERS = [field for field in FIELDS if field[2].get("type") == "integer"]
ENUMS = [field for field in FIELDS if "enum" in field[2]]


def name(field: Any) -> str | None:
    return ".".join(field) if isinstance(field, tuple) else field if isinstance(field, str) else ""


@pytest.mark.parametrize(("plural", "path", "schema"), NUMBERS, ids=name)
def test_a_number_is_within_its_bounds(api: Api, plural: str, path: tuple[str, ...], schema: Document) -> None:
    for number in (schema["minimum"], schema["maximum"]):
        api.create(document(plural, path, number))
    for number in (schema["minimum"] - 1, schema["maximum"] + 1):
        assert f"spec.{'.'.join(path)}: Invalid value" in api.refusal(lambda number=number: api.create(document(plural, path, number)))


@pytest.mark.parametrize(("plural", "path", "schema"), ENUMS, ids=name)
def test_an_enum_has_its_values_and_no_other(api: Api, plural: str, path: tuple[str, ...], schema: Document) -> None:
    for value in schema["enum"]:
        api.create(document(plural, path, value))
    for value in ("Nonsense", schema["enum"][0].lower(), ""):
        assert f"spec.{'.'.join(path)}: Unsupported value" in api.refusal(lambda value=value: api.create(document(plural, path, value)))
