# SPDX-License-Identifier: Apache-2.0
"""Sources as the operator compares them, and an adapter's spec in the words of a worker."""

from typing import Any

import msgspec

from diffusion_operator.api.adapter import AdapterFormat, AdapterSpec, Component, DeploymentRef, Residency
from diffusion_operator.api.adapter_load import AdapterLoad, adapter_load, components_of, format_of
from diffusion_operator.api.source import (
    AdapterRepository,
    AdapterSource,
    HttpSource,
    ModelRepository,
    ModelSource,
    PvcSource,
    S3Source,
    SecretKeyRef,
    SecretRef,
    claim_of,
    identity,
    secret_of,
)

PATH = AdapterSource(path="/x")


def spec(**more: Any) -> AdapterSpec:
    return AdapterSpec(deployment_ref=DeploymentRef(name="d"), source=PATH, **more)


def test_sources_have_the_same_identity_where_they_are_the_same_content() -> None:
    def http(url: str, sha256: str = "a" * 64) -> str:
        return identity(AdapterSource(http=HttpSource(url=url, sha256=sha256)))

    def s3(**more: Any) -> str:
        return identity(AdapterSource(s3=S3Source(uri="s3://b/x.safetensors", **more)))

    assert http("https://h/x?signature=1") == http("https://h/x?signature=2") == "https://h/x#sha256:" + "a" * 64
    assert http("https://user:word@h/x#part") == http("https://h/x")
    assert http("https://[/x") == "https://[/x#sha256:" + "a" * 64, "an address that is none stops nobody else's adapters"
    assert http("https://h/x") != http("https://h/y") != http("https://h/y", "b" * 64)
    assert s3() == s3(credentials_secret_ref=SecretRef(name="keys")) != s3(endpoint="https://minio:9000")
    assert identity(AdapterSource(pvc=PvcSource(claim_name="c", path="x"))) == "pvc://c/x"
    hub = AdapterRepository(repo="o/r", revision="v1", token_secret_ref=SecretKeyRef(name="hub"))
    assert identity(AdapterSource(hugging_face=hub)) == "hf://o/r@v1"
    assert identity(AdapterSource(hugging_face=msgspec.structs.replace(hub, file="a/x.safetensors"))) == "hf://o/r@v1/a/x.safetensors"
    assert identity(ModelSource(hugging_face=ModelRepository(repo="o/r", allow_patterns=("*.json",)))) == "hf://o/r@main/*.json"
    assert identity(AdapterSource(path="/loras/x")) == "/loras/x"


def test_the_secret_and_the_claim_of_a_source_are_found_whatever_its_kind() -> None:
    hub = AdapterSource(hugging_face=AdapterRepository(repo="o/r", token_secret_ref=SecretKeyRef(name="hub")))
    s3 = ModelSource(s3=S3Source(uri="s3://b/m/", credentials_secret_ref=SecretRef(name="keys")))
    pvc = AdapterSource(pvc=PvcSource(claim_name="c", path="x"))
    assert [secret_of(one) for one in (hub, s3, pvc, PATH)] == ["hub", "keys", None, None]
    assert [claim_of(one) for one in (hub, s3, pvc, PATH)] == [None, None, "c", None]


def test_an_adapter_that_says_nothing_more_leaves_everything_open() -> None:
    assert adapter_load(spec(), digest=None) == AdapterLoad(source=PATH)


def test_what_an_adapter_says_is_put_into_the_workers_words() -> None:
    said = spec(
        default_scale="-0.5",
        components=(Component.TRANSFORMER, Component.TEXT_ENCODER_2),
        format=AdapterFormat.KOHYA,
        expected_rank=8,
        residency=Residency.ON_DEMAND,
        priority=-3,
    )
    assert adapter_load(said, digest="sha256:1") == AdapterLoad(
        source=PATH,
        digest="sha256:1",
        scale=-0.5,
        components=("transformer", "transformer_2", "text_encoder_2"),
        format="kohya",
        expected_rank=8,
        residency=Residency.ON_DEMAND,
        priority=-3,
    )


def test_every_component_has_words_of_the_worker_that_lead_back_to_it() -> None:
    for component in Component:
        assert components_of(adapter_load(spec(components=(component,)), digest=None).components) == (component.value,)
    assert components_of(["transformer_2", "transformer", "prior"]) == ("Transformer", "prior")


def test_formats_lead_back_to_the_words_of_the_api() -> None:
    assert [format_of(name) for name in ("peft", "diffusers", "kohya", "new", None)] == ["PEFT", "Diffusers", "Kohya", "new", None]
