# SPDX-License-Identifier: Apache-2.0
"""The operator's words about sources and adapters, read by the worker's own structs: every field, and no other."""

import gzip
import json
from typing import Any

import msgspec
import pytest

from diffusion_operator.api import source as operator_source
from diffusion_operator.api import worker_state
from diffusion_operator.api.adapter import AdapterFormat, AdapterSpec, Component
from diffusion_operator.api.adapter_load import AdapterLoad, adapter_load, format_of
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import OnMissing
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.plan.adapters.error_codes import DEPLOYMENT_REASONS, FINAL, RELOAD_LOOP, SOURCE_REASONS
from diffusion_operator.plan.adapters.load_attempts import RACES
from diffusion_operator.plan.adapters.shards import packed
from diffusion_operator.plan.observed.observed import AttemptKey
from diffusion_operator.plan.results.actions import PutAdapter, WorkerAddress
from diffusion_operator.render.worker_arguments import worker_arguments
from diffusion_operator.worker_client import adapter_body
from diffusion_worker import config
from diffusion_worker.engine.adapters.desired_files import ShardFile
from diffusion_worker.engine.state import state_document as documents
from diffusion_worker.errors import RETRYABLE, ErrorCode
from diffusion_worker.server.schemas.control import AdapterBody
from diffusion_worker.sources import source as worker_source
from diffusion_worker.sources.parsing import parse_source

SHA256 = "a" * 64
SOURCES: dict[str, dict[str, Any]] = {
    "path": {"path": "/loras/x"},
    "file of a hub": {
        "huggingFace": {
            "repo": "org/name", "revision": "v1", "file": "a/x.safetensors", "tokenSecretRef": {"name": "hub", "key": "other"},
        }
    },
    "folder of a hub": {"huggingFace": {"repo": "org/name", "subfolder": "a", "tokenSecretRef": {"name": "hub"}}},
    "s3": {
        "s3": {"uri": "s3://bucket/x/", "endpoint": "https://h:9000", "region": "eu-1", "credentialsSecretRef": {"name": "keys"}}
    },
    "pvc": {"pvc": {"claimName": "c", "path": "a/x.safetensors"}},
    "http": {"http": {"url": "https://h/x?signature=1", "sha256": SHA256}},
}  # fmt: skip
PAIRS = [
    (operator_source.AdapterSource, worker_source.Source),
    (operator_source.S3Source, worker_source.S3Source),
    (operator_source.PvcSource, worker_source.PvcSource),
    (operator_source.HttpSource, worker_source.HttpSource),
    (operator_source.SecretKeyRef, worker_source.SecretKey),
    (operator_source.SecretRef, worker_source.SecretName),
]


# Errors of the load, not of the source: the adapter becomes Failed, and the load is retried.
LOAD_CODES = {"CapacityExceeded", "InsufficientMemory", "RankFailed", "Timeout", "CacheFull", "EngineFailed"}
# Codes of calls that the operator never makes, of requests, and of sleeps and wakes.
OTHER_CODES = {
    "InvalidRequest", "Unauthorized", "Forbidden", "Managed", "AdapterNotLoaded", "AdapterRemoved", "Cancelled",
    "Overloaded", "VerificationFailed", "MemoryNotReleased", "RequestFailed", "model_not_found",
}  # fmt: skip


def names(struct: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(struct)}


def spec(source: dict[str, Any]) -> AdapterSpec:
    """Return the spec of an adapter with this source and all fields, except those that the worker decides."""
    document = {
        "deploymentRef": {"name": "d"}, "source": source, "defaultScale": "-0.5", "format": "Kohya", "expectedRank": 8,
        "components": [one.value for one in Component], "residency": "OnDemand", "priority": -3, "loadTimeoutSeconds": 77,
    }  # fmt: skip
    return msgspec.convert(document, AdapterSpec)


def load(source: dict[str, Any]) -> AdapterLoad:
    return adapter_load(spec(source), digest=f"sha256:{SHA256}", identity="v1:" + SHA256)


def deployment(**model_source: Any) -> DiffusionDeployment:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return msgspec.convert({"metadata": metadata, "spec": {"model": {"source": model_source}}}, DiffusionDeployment)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=[ours.__name__ for ours, _ in PAIRS])
def test_a_source_has_the_same_fields_on_both_sides(ours: type[msgspec.Struct], theirs: type[msgspec.Struct]) -> None:
    assert names(ours) == names(theirs)


def test_the_fields_of_a_hubs_repository_are_those_of_an_adapter_and_of_a_model_together() -> None:
    ours = names(operator_source.AdapterRepository) | names(operator_source.ModelRepository)
    assert ours == names(worker_source.HuggingFaceSource)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_the_worker_reads_a_source_as_the_spec_has_it(source: dict[str, Any]) -> None:
    text = msgspec.json.encode(spec(source).source)
    read = msgspec.json.decode(text, type=worker_source.Source)
    assert msgspec.to_builtins(read) == source
    assert operator_source.identity(msgspec.convert(msgspec.to_builtins(read), operator_source.AdapterSource))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_the_mounted_file_tells_the_worker_everything_it_takes_of_an_adapter(source: dict[str, Any]) -> None:
    desired = DesiredAdapter(uid="u", generation=1, name="style", load=load(source), load_timeout_s=77)
    text = gzip.decompress(packed([desired]))
    assert set(json.loads(text)["adapters"][0]) == names(documents.DesiredAdapter)
    [read] = msgspec.json.decode(text, type=ShardFile).adapters
    assert (read.name, read.digest, read.scale, read.format, read.expected_rank) == ("style", f"sha256:{SHA256}", -0.5, "kohya", 8)
    assert (read.residency, read.priority, read.load_timeout_seconds) == (documents.Residency.ON_DEMAND, -3, 77)
    assert read.components == ["transformer", "transformer_2", "unet", "text_encoder", "text_encoder_2", "text_encoder_3"]
    assert msgspec.to_builtins(read.source) == source


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_a_put_tells_the_worker_the_same_as_the_mounted_file(source: dict[str, Any]) -> None:
    key = AttemptKey(adapter_uid="u", generation=1, boot_id="b")
    address = WorkerAddress(pod_uid="p", ip="::1", boot_id="b")
    put = PutAdapter(worker=address, key=key, operation_id="o", name="style", load=load(source), deadline_s=77)
    body = {"operationId": "o", "bootId": "b", **adapter_body(put)}
    # The worker sets the last ones itself: from the call's token, and for `load_inplace`.
    assert set(body) | {"publicOnly", "readAgain"} == names(documents.AdapterCall)
    call = AdapterBody.model_validate_json(json.dumps(body)).call()
    told = json.loads(msgspec.json.encode(put.load))
    assert {name: value for name, value in msgspec.to_builtins(call).items() if name in told} == told
    assert call.deadline_seconds == 77


@pytest.mark.parametrize(
    "source",
    [
        {"path": "/models/x"},
        {"huggingFace": {"repo": "org/name", "revision": "v1", "allowPatterns": ["vae/*"], "tokenSecretRef": {"name": "hub"}}},
        {"s3": {"uri": "s3://bucket/model/", "credentialsSecretRef": {"name": "keys"}}},
        {"pvc": {"claimName": "c", "path": "sd3"}},
    ],
    ids=["path", "hub", "s3", "pvc"],
)
def test_the_worker_reads_the_model_as_the_spec_has_it(source: dict[str, Any]) -> None:
    (argument,) = [one for one in worker_arguments(deployment(**source)) if one.startswith("--model=")]
    assert msgspec.to_builtins(parse_source(argument.removeprefix("--model="))) == source


def test_words_of_adapters_are_the_same_on_both_sides() -> None:
    assert {one.value for one in worker_state.Residency} == {one.value for one in documents.Residency}
    assert {one.value.lower() for one in OnMissing} == {one.value for one in config.OnMissing}
    formats = {"peft", "diffusers", "kohya"}
    assert {format_of(one) for one in formats} == {one.value for one in AdapterFormat} - {"Auto"}


def test_every_field_that_the_operator_reads_of_an_adapter_is_one_that_the_worker_writes() -> None:
    assert names(worker_state.AdapterRecord) <= names(documents.AdapterDocument)


def test_every_code_of_the_worker_is_of_a_source_of_the_deployments_bounds_of_a_load_or_a_race() -> None:
    codes = {code.value for code in ErrorCode}
    known = set(SOURCE_REASONS) | DEPLOYMENT_REASONS | RACES
    assert known <= codes
    assert not known & (LOAD_CODES | OTHER_CODES)
    assert codes == known | LOAD_CODES | OTHER_CODES


def test_what_the_worker_may_do_later_is_never_final() -> None:
    assert FINAL - {RELOAD_LOOP} <= {code.value for code in ErrorCode} - {code.value for code in RETRYABLE}


def test_the_operator_knows_every_error_code_of_the_worker() -> None:
    assert {code.value for code in ErrorCode} == worker_state.CODES
