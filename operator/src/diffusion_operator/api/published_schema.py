# SPDX-License-Identifier: Apache-2.0
"""The kinds as the API server has them, compared with those of this operator.

The API server refuses a status with a field that a kind lacks. So an operator that is newer than the kinds could say nothing, and would
remember no failure of a replica.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from diffusion_operator.api.adapter import AdapterStatus
from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, Kind

STATUSES: dict[Kind, type[msgspec.Struct]] = {DEPLOYMENT: DeploymentStatus, ADAPTER: AdapterStatus}


def missing_fields(document: Mapping[str, Any]) -> list[str]:
    """Return the path of each status field of this operator that a published kind lacks, as `PLURAL: status.FIELD`.

    `document` is the OpenAPI document of the kinds' group and version. A kind that it does not have adds none.
    """
    found: list[str] = []
    for kind, struct in STATUSES.items():
        schema = _schema_of(document, kind)
        if schema is not None:
            found += _missing(inspect.type_info(struct), schema["properties"].get("status", {}), f"{kind.plural}: status")
    return found


def _schema_of(document: Mapping[str, Any], kind: Kind) -> Mapping[str, Any] | None:
    """Find the schema of a kind in the document; None if the kind is not published there."""
    group, version = kind.group_and_version
    this = {"group": group, "version": version, "kind": kind.kind}
    schemas = document.get("components", {}).get("schemas", {}).values()
    return next((one for one in schemas if one.get("x-kubernetes-group-version-kind") == [this]), None)


def _missing(type_: inspect.Type, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if isinstance(type_, inspect.UnionType):
        for one in type_.types:
            yield from _missing(one, schema, path)
    elif isinstance(type_, inspect.VarTupleType):
        yield from _missing(type_.item_type, schema.get("items", {}), path)
    elif isinstance(type_, inspect.StructType):
        for field in type_.fields:
            inner = schema.get("properties", {}).get(field.encode_name)
            if inner is None:
                yield f"{path}.{field.encode_name}"
            else:
                yield from _missing(field.type, inner, f"{path}.{field.encode_name}")
