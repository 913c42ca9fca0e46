# SPDX-License-Identifier: Apache-2.0
"""Every rule of a LoRAAdapter by one accepted and one refused document, judged by a real API server."""

from typing import Any

import pytest

from support.apiserver.kind_api import Api, Document, check_creation, check_transition, lora, rules_without_a_row

pytestmark = pytest.mark.apiserver

DIGEST = "sha256:" + "a" * 64
HEX = "a" * 64


def hub(**more: Any) -> Document:
    return {"huggingFace": {"repo": "org/name"} | more}


def s3(uri: str, **more: Any) -> Document:
    return {"s3": {"uri": uri} | more}


def pvc(path: str) -> Document:
    return {"pvc": {"claimName": "c", "path": path}}


def http(url: str, sha256: str = HEX) -> Document:
    return {"http": {"url": url, "sha256": sha256}}


CREATIONS = [
    # subject, accepted, refused, part of the message
    ("A1", lora(), lora(source={}), "exactly one source"),
    ("A7 upper", lora(defaultScale="4.0"), lora(defaultScale="4.001"), "between -4 and 4"),
    ("A7 lower", lora(defaultScale="-4"), lora(defaultScale="-4.5"), "between -4 and 4"),
    ("scale is a decimal", lora(defaultScale="0.125"), lora(defaultScale="1e1"), "defaultScale"),
    ("adapter name", lora(adapterName="a.b_c-d"), lora(adapterName="A"), "adapterName"),
    ("adapter name from metadata", lora("a" * 63), lora("a" * 64), "needs spec.adapterName"),
    ("digest", lora(digest=DIGEST), lora(digest="sha256:1"), "digest"),
    ("adapter path", lora(source={"path": "/x"}), lora(source={"path": "/x/../y"}), "must not contain"),
    ("a deployment is required", lora(), lora(deploymentRef={}), "deploymentRef.name: Required"),
    ("a deployment's name", lora(deploymentRef={"name": "d-1"}), lora(deploymentRef={"name": "a/../b"}), "deploymentRef.name"),
    ("no unknown adapter fields", lora(priority=1), lora(weight=1), "unknown field"),
    ("A1 one source", lora(source=pvc("x")), lora(source=pvc("x") | {"path": "/x"}), "exactly one source"),
    ("repository", lora(source=hub()), lora(source={"huggingFace": {"repo": "https://h/x"}}), "repo"),
    ("repository is required", lora(source=hub()), lora(source={"huggingFace": {}}), "repo: Required"),
    ("revision", lora(source=hub(revision="refs/pr/3")), lora(source=hub(revision="a/../b")), "must not contain '..'"),
    ("A6 file", lora(source=hub(file="a/x.safetensors")), lora(source=hub(file="x.bin")), "pickle formats are refused"),
    ("A6 path", lora(source={"path": "/x.safetensors"}), lora(source={"path": "/x.PT"}), "pickle formats are refused"),
    ("A6 claim", lora(source=pvc("x.safetensors")), lora(source=pvc("x.ckpt")), "pickle formats are refused"),
    ("A6 bucket", lora(source=s3("s3://bkt/x.safetensors")), lora(source=s3("s3://bkt/x.pth")), "must end with '.safetensors'"),
    ("A6 address", lora(source=http("https://h/x?a=b")), lora(source=http("https://h/x.bin?a=b")), "pickle formats are refused"),
    ("file without ..", lora(source=hub(file="a..b.safetensors")), lora(source=hub(file="../x.safetensors")), "must not contain '..'"),
    ("file or folder", lora(source=hub(subfolder="a")), lora(source=hub(subfolder="a", file="x.safetensors")), "exclude each other"),
    ("folder is relative", lora(source=hub(subfolder="a/b")), lora(source=hub(subfolder="/a")), "must be relative"),
    ("token", lora(source=hub(tokenSecretRef={"name": "s"})), lora(source=hub(tokenSecretRef={"name": "s/t"})), "tokenSecretRef"),
    (
        "key of a token",
        lora(source=hub(tokenSecretRef={"name": "s", "key": ".k"})),
        lora(source=hub(tokenSecretRef={"name": "s", "key": "../k"})),
        "tokenSecretRef.key",
    ),
    ("bucket", lora(source=s3("s3://bkt/loras/")), lora(source=s3("https://bkt/loras/")), "uri"),
    ("bucket without ..", lora(source=s3("s3://bkt/a..b/")), lora(source=s3("s3://bkt/../b/")), "must not contain '..'"),
    (
        "endpoint",
        lora(source=s3("s3://bkt/l/", endpoint="https://minio:9000", region="eu-1")),
        lora(source=s3("s3://bkt/l/", endpoint="http://minio:9000")),
        "endpoint",
    ),
    ("A9 claim", lora(source=pvc("a/b")), lora(source=pvc("/a")), "must be relative"),
    ("A9 claim without ..", lora(source=pvc("a..b")), lora(source=pvc("a/..")), "must not contain '..'"),
    ("A9 https", lora(source=http("https://h/x")), lora(source=http("http://h/x")), "url"),
    ("no user in an address", lora(source=http("https://h:8443/x@y")), lora(source=http("https://u@h/x")), "url"),
    ("A9 hash", lora(source=http("https://h/x")), lora(source={"http": {"url": "https://h/x"}}), "sha256: Required"),
    ("hash", lora(source=http("https://h/x")), lora(source=http("https://h/x", "A" * 64)), "sha256"),
    ("digest of http", lora(source=http("https://h/x"), digest=DIGEST), lora(source=http("https://h/x", "b" * 64), digest=DIGEST), "same"),
    ("components", lora(components=["UNet", "TextEncoder3"]), lora(components=["VAE"]), "components"),
    ("components differ", lora(components=["UNet"]), lora(components=["UNet", "UNet"]), "Duplicate"),
]  # fmt: skip


@pytest.mark.parametrize(("accepted", "refused", "message"), [row[1:] for row in CREATIONS], ids=[row[0] for row in CREATIONS])
def test_a_rule_accepts_one_document_and_refuses_another(api: Api, accepted: Document, refused: Document, message: str) -> None:
    check_creation(api, accepted, refused, message)


UPDATES = [
    # subject, before, accepted change of the spec, refused change of the spec, part of the message
    ("A4 add once", lora(), {"digest": DIGEST}, {"digest": "md5:1"}, "digest"),
    ("A4 change", lora(digest=DIGEST), {"suspend": True}, {"digest": "sha256:" + "b" * 64}, "digest can be set once"),
    ("A4 remove", lora(digest=DIGEST), {"source": {"path": "/y"}}, {"digest": None}, "digest can be set once"),
    ("A8 deployment", lora(), {"suspend": True}, {"deploymentRef": {"name": "e"}}, "deploymentRef is immutable"),
    ("A8 name change", lora(adapterName="a"), {"defaultScale": "2"}, {"adapterName": "b"}, "adapterName is immutable"),
    ("A8 name add", lora(), {"defaultScale": "2"}, {"adapterName": "b"}, "cannot be added or removed"),
    ("A8 name remove", lora(adapterName="a"), {"defaultScale": "2"}, {"adapterName": None}, "cannot be added or removed"),
]


@pytest.mark.parametrize(("before", "accepted", "refused", "message"), [row[1:] for row in UPDATES], ids=[row[0] for row in UPDATES])
def test_a_transition_rule_accepts_one_change_and_refuses_another(
    api: Api, before: Document, accepted: Document, refused: Document, message: str
) -> None:
    check_transition(api, before, accepted, refused, message)


def test_every_rule_has_a_row() -> None:
    assert rules_without_a_row("loraadapters", (*CREATIONS, *UPDATES)) == []
