# SPDX-License-Identifier: Apache-2.0
"""Documents of both kinds, their schemas, and a real API server that validates documents.

Real: the API server and our CRDs. The client is Python's, because a kubectl for each takes a quarter of a second.
"""

import copy
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, KINDS, Kind
from support.apiserver.real_apiserver import ROOT

Document = dict[str, Any]


def dd(name: str = "one", **spec: Any) -> Document:
    return _document(DEPLOYMENT, name, {"model": {"source": {"path": "/m"}}} | spec)


def lora(name: str = "one", **spec: Any) -> Document:
    return _document(ADAPTER, name, {"deploymentRef": {"name": "d"}, "source": {"path": "/loras/x"}} | spec)


def _document(kind: Kind, name: str, spec: Document) -> Document:
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, "namespace": "default"}, "spec": spec}


class Api:
    """A client of custom objects. `create` is a dry run by default, `patch` is always one, and `delete` never."""

    def __init__(self, connection: client.ApiClient) -> None:
        self._objects = client.CustomObjectsApi(connection)

    def create(self, document: Document, *, dry_run: bool = True) -> Document:
        options = {"dry_run": "All"} if dry_run else {}
        return self._objects.create_namespaced_custom_object(*_where(document), body=document, field_validation="Strict", **options)

    def patch(self, document: Document, spec: Document) -> Document:
        return self._objects.patch_namespaced_custom_object(*_named(document), body={"spec": spec}, dry_run="All")

    def delete(self, document: Document) -> None:
        self._objects.delete_namespaced_custom_object(*_named(document))

    def refusal(self, act: Callable[[], object]) -> str:
        with pytest.raises(ApiException) as caught:
            act()
        assert caught.value.status in (400, 422)
        return str(json.loads(caught.value.body)["message"])


def check_creation(api: Api, accepted: Document, refused: Document, message: str) -> None:
    """Check by dry runs that the server accepts one document, and refuses another with an error that contains `message`."""
    api.create(accepted)
    assert message in api.refusal(lambda: api.create(refused))


def check_transition(api: Api, before: Document, accepted: Document, refused: Document, message: str) -> None:
    """Create the document `before` as `transition`, try two changes of its spec by dry runs, and delete it.

    The server must accept `accepted`, and refuse `refused` with an error that contains `message`.
    """
    document = copy.deepcopy(before)
    document["metadata"]["name"] = "transition"
    api.create(document, dry_run=False)
    try:
        api.patch(document, accepted)
        assert message in api.refusal(lambda: api.patch(document, refused))
    finally:
        api.delete(document)


def rules_without_a_row(plural: str, rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """List the messages of a kind's validation rules that no row covers. A row covers each message that contains the row's last item."""
    parts = [row[-1] for row in rows]
    return [message for message in rule_messages(plural) if not any(part in message for part in parts)]


def _where(document: Document) -> tuple[str, str, str, str]:
    group, version = document["apiVersion"].split("/")
    return group, version, document["metadata"]["namespace"], KINDS[document["kind"]].plural


def _named(document: Document) -> tuple[str, ...]:
    return *_where(document), document["metadata"]["name"]


def spec_schema(plural: str) -> Document:
    """Return the schema of a kind's spec from `crds/`."""
    return object_schema(plural)["properties"]["spec"]


def rule_messages(plural: str) -> set[str]:
    """Return the messages of all validation rules of a kind."""
    return {rule["message"] for schema in schemas(object_schema(plural)) for rule in schema.get("x-kubernetes-validations", ())}


def ends(schema: Document, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Document]]:
    """Yield the fields of a schema that have no fields below them, each with its path; items of lists are left out."""
    for name, inner in schema.get("properties", {}).items():
        yield from ends(inner, (*path, name))
    if "properties" not in schema:
        yield path, schema


def nested(path: tuple[str, ...], value: Any) -> Document:
    """Return a document with a value at a path."""
    for name in reversed(path):
        value = {name: value}
    return value


def merged(one: Document, other: Document) -> Document:
    """Return two documents merged. Two objects of one name are merged in turn; otherwise the value of `other` wins."""
    both = one.keys() & other.keys()
    deeper = {name: merged(one[name], other[name]) for name in both if isinstance(one[name], dict) and isinstance(other[name], dict)}
    return one | other | deeper


@functools.cache
def object_schema(plural: str) -> Document:
    """Return the schema of a kind. It is cached, so it must not be changed."""
    (version,) = yaml.safe_load((ROOT / "crds" / f"{plural}.yaml").read_text())["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def schemas(schema: Document) -> Iterator[Document]:
    """Yield a schema and all schemas inside it."""
    yield schema
    for inner in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from schemas(inner)
