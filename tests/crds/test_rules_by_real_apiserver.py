# SPDX-License-Identifier: Apache-2.0
"""Every rule of both CRDs by one accepted and one refused document, judged by a real API server."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from real_apiserver import kubectl

pytestmark = pytest.mark.apiserver

Document = dict[str, Any]
GROUP = "diffusion-operator.dev/v1alpha1"


def deployment(name: str = "one", **spec: Any) -> Document:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": GROUP, "kind": "DiffusionDeployment", "metadata": metadata, "spec": {"model": {"source": {"path": "/m"}}} | spec}


def adapter(name: str = "one", **spec: Any) -> Document:
    base = {"deploymentRef": {"name": "d"}, "source": {"path": "/loras/x"}}
    return {"apiVersion": GROUP, "kind": "LoRAAdapter", "metadata": {"name": name, "namespace": "default"}, "spec": base | spec}


def dry_run(kubeconfig: Path, document: Document) -> Document:
    output = kubectl(kubeconfig, "create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", stdin=json.dumps(document))
    return json.loads(output)


def refusal(kubeconfig: Path, document: Document) -> str:
    with pytest.raises(AssertionError) as caught:
        dry_run(kubeconfig, document)
    return str(caught.value)


DIGEST = "sha256:" + "a" * 64

CREATIONS = [
    # what, accepted, refused, part of the message
    ("D1 model source", deployment(), deployment(model={"source": {}}), "exactly one source"),
    ("a model is required", deployment(), {**deployment(), "spec": {}}, "spec.model: Required"),
    ("absolute path", deployment(), deployment(model={"source": {"path": "models"}}), "spec.model.source.path"),
    ("no .. in a path", deployment(model={"source": {"path": "/a..b"}}), deployment(model={"source": {"path": "/a/../b"}}), "must not contain"),
    ("D5", deployment(lora={"maxRank": 16}), deployment(lora={"maxRank": 24}), "maxRank must be one of"),
    ("D16 length", deployment("a" * 40), deployment("a" * 41), "at most 40 characters"),
    ("D16 label", deployment("a-b"), deployment("a.b"), "DNS label"),
    ("D16 first letter", deployment("a3"), deployment("3a"), "begins with a letter"),
    ("D18", deployment(engine={"env": [{"name": "A", "value": "1"}]}), deployment(engine={"env": [{"name": "DIFFUSION_INTERNAL_A"}]}), "reserved"),
    ("env names are a key", deployment(engine={"env": [{"name": "A"}]}), deployment(engine={"env": [{"name": "A"}, {"name": "A"}]}), "Duplicate"),
    ("D20 requests", deployment(resources={"requests": {"cpu": "1"}}), deployment(resources={"requests": {"nvidia.com/gpu": 1}}), "not be requested"),
    ("D20 limits", deployment(resources={"limits": {"memory": "1Gi"}}), deployment(resources={"limits": {"nvidia.com/gpu": "1"}}), "not be limited"),
    (
        "D20 own GPU name",
        deployment(resources={"gpuResourceName": "example.com/gpu", "limits": {"cpu": 2}}),
        deployment(resources={"gpuResourceName": "example.com/gpu", "limits": {"example.com/gpu": 2}}),
        "named by gpuResourceName",
    ),
    ("gpuResourceName", deployment(resources={"gpuResourceName": "none"}), deployment(resources={"gpuResourceName": "gpu"}), "gpuResourceName"),
    ("quantities", deployment(resources={"requests": {"cpu": "1500m"}}), deployment(resources={"requests": {"cpu": "much"}}), "requests"),
    ("sharedMemory", deployment(resources={"sharedMemory": "64Mi"}), deployment(resources={"sharedMemory": "-1Gi"}), "sharedMemory"),
    ("ranks at least 1", deployment(parallelism={"ranksPerReplica": 1}), deployment(parallelism={"ranksPerReplica": 0}), "ranksPerReplica"),
    ("ranks at most 64", deployment(parallelism={"ranksPerReplica": 64}), deployment(parallelism={"ranksPerReplica": 65}), "ranksPerReplica"),
    ("replicas at least 0", deployment(replicas=0), deployment(replicas=-1), "spec.replicas"),
    ("replicas at most 256", deployment(replicas=256), deployment(replicas=257), "spec.replicas"),
    ("dtype", deployment(model={"source": {"path": "/m"}, "dtype": "Float16"}), deployment(model={"source": {"path": "/m"}, "dtype": "fp16"}), "dtype"),
    ("batch", deployment(engine={"maxBatchSize": 64}), deployment(engine={"maxBatchSize": 65}), "maxBatchSize"),
    ("pullPolicy", deployment(engine={"pullPolicy": "Never"}), deployment(engine={"pullPolicy": "Sometimes"}), "pullPolicy"),
    ("image length", deployment(engine={"image": "a" * 512}), deployment(engine={"image": "a" * 513}), "image"),
    ("maxLoaded", deployment(lora={"maxLoaded": 0}), deployment(lora={"maxLoaded": 65}), "maxLoaded"),
    ("loadTimeout", deployment(lora={"loadTimeoutSeconds": 5}), deployment(lora={"loadTimeoutSeconds": 4}), "loadTimeoutSeconds"),
    ("lora drain", deployment(lora={"drainTimeoutSeconds": 0}), deployment(lora={"drainTimeoutSeconds": 7201}), "drainTimeoutSeconds"),
    ("sleep policy", deployment(sleep={"policy": "Asleep"}), deployment(sleep={"policy": "OnIdle"}), "policy"),
    ("sleep drain", deployment(sleep={"drain": "Abort"}), deployment(sleep={"drain": "Never"}), "drain"),
    ("sleep drain time", deployment(sleep={"drainTimeoutSeconds": 7200}), deployment(sleep={"drainTimeoutSeconds": 7201}), "drainTimeoutSeconds"),
    ("wake time", deployment(sleep={"wakeTimeoutSeconds": 5}), deployment(sleep={"wakeTimeoutSeconds": 4}), "wakeTimeoutSeconds"),
    ("startup time", deployment(startup={"timeoutSeconds": 10}), deployment(startup={"timeoutSeconds": 9}), "timeoutSeconds"),
    ("service type", deployment(service={"type": "NodePort"}), deployment(service={"type": "ExternalName"}), "type"),
    ("service port", deployment(service={"port": 65535}), deployment(service={"port": 65536}), "port"),
    ("served name", deployment(servedName="sd-3"), deployment(servedName="SD 3"), "servedName"),
    ("no unknown fields", deployment(), deployment(sleep={"idleSeconds": 5}), "unknown field"),
    ("A1", adapter(), adapter(source={}), "exactly one source"),
    ("A7 upper", adapter(defaultScale="4.0"), adapter(defaultScale="4.001"), "between -4 and 4"),
    ("A7 lower", adapter(defaultScale="-4"), adapter(defaultScale="-4.5"), "between -4 and 4"),
    ("scale is a decimal", adapter(defaultScale="0.125"), adapter(defaultScale="1e1"), "defaultScale"),
    ("adapter name", adapter(adapterName="a.b_c-d"), adapter(adapterName="A"), "adapterName"),
    ("adapter name from metadata", adapter("a" * 63), adapter("a" * 64), "needs spec.adapterName"),
    ("digest", adapter(digest=DIGEST), adapter(digest="sha256:1"), "digest"),
    ("adapter path", adapter(source={"path": "/x"}), adapter(source={"path": "/x/../y"}), "must not contain"),
    ("a deployment is required", adapter(), adapter(deploymentRef={}), "deploymentRef.name: Required"),
    ("no unknown adapter fields", adapter(), adapter(priority=1), "unknown field"),
]  # fmt: skip


@pytest.mark.parametrize(("accepted", "refused", "message"), [row[1:] for row in CREATIONS], ids=[row[0] for row in CREATIONS])
def test_a_rule_accepts_one_document_and_refuses_another(
    kubeconfig_of_apiserver: Path, accepted: Document, refused: Document, message: str
) -> None:
    dry_run(kubeconfig_of_apiserver, accepted)
    assert message in refusal(kubeconfig_of_apiserver, refused)


UPDATES = [
    # what, before, accepted change of the spec, refused change of the spec, part of the message
    ("D17 change", deployment(servedName="a"), {"replicas": 2}, {"servedName": "b"}, "servedName is immutable"),
    ("D17 add", deployment(), {"replicas": 2}, {"servedName": "b"}, "cannot be added or removed"),
    ("D17 remove", deployment(servedName="a"), {"replicas": 2}, {"servedName": None}, "cannot be added or removed"),
    ("A4 add once", adapter(), {"digest": DIGEST}, {"digest": "md5:1"}, "digest"),
    ("A4 change", adapter(digest=DIGEST), {"suspend": True}, {"digest": "sha256:" + "b" * 64}, "digest can be set once"),
    ("A4 remove", adapter(digest=DIGEST), {"source": {"path": "/y"}}, {"digest": None}, "digest can be set once"),
    ("A8 deployment", adapter(), {"suspend": True}, {"deploymentRef": {"name": "e"}}, "deploymentRef is immutable"),
    ("A8 name change", adapter(adapterName="a"), {"defaultScale": "2"}, {"adapterName": "b"}, "adapterName is immutable"),
    ("A8 name add", adapter(), {"defaultScale": "2"}, {"adapterName": "b"}, "cannot be added or removed"),
    ("A8 name remove", adapter(adapterName="a"), {"defaultScale": "2"}, {"adapterName": None}, "cannot be added or removed"),
]


@pytest.mark.parametrize(("before", "accepted", "refused", "message"), [row[1:] for row in UPDATES], ids=[row[0] for row in UPDATES])
def test_a_transition_rule_accepts_one_change_and_refuses_another(
    kubeconfig_of_apiserver: Path, before: Document, accepted: Document, refused: Document, message: str
) -> None:
    document = copy.deepcopy(before)
    document["metadata"]["name"] = "transition"
    kind = document["kind"].lower()
    kubectl(kubeconfig_of_apiserver, "create", "-f", "-", stdin=json.dumps(document))
    try:
        patch = ["patch", kind, "transition", "--type=merge", "--dry-run=server", "-p"]
        kubectl(kubeconfig_of_apiserver, *patch, json.dumps({"spec": accepted}))
        with pytest.raises(AssertionError) as caught:
            kubectl(kubeconfig_of_apiserver, *patch, json.dumps({"spec": refused}))
        assert message in str(caught.value)
    finally:
        kubectl(kubeconfig_of_apiserver, "delete", kind, "transition", "--wait=false")


def test_the_schema_fills_in_every_default_so_that_yaml_shows_what_will_happen(kubeconfig_of_apiserver: Path) -> None:
    spec = dry_run(kubeconfig_of_apiserver, deployment())["spec"]
    assert spec == {
        "model": {"source": {"path": "/m"}, "dtype": "Auto"},
        "engine": {"pullPolicy": "IfNotPresent", "maxBatchSize": 8},
        "replicas": 1,
        "parallelism": {"ranksPerReplica": 1},
        "resources": {"sharedMemory": "8Gi"},
        "lora": {"maxLoaded": 4, "maxRank": 64, "drainTimeoutSeconds": 120, "loadTimeoutSeconds": 120},
        "sleep": {"policy": "AlwaysAwake", "drain": "Wait", "drainTimeoutSeconds": 300, "wakeTimeoutSeconds": 120},
        "startup": {"timeoutSeconds": 1800},
        "service": {"type": "ClusterIP", "port": 80},
    }
    assert dry_run(kubeconfig_of_apiserver, adapter())["spec"] == {
        "deploymentRef": {"name": "d"},
        "source": {"path": "/loras/x"},
        "defaultScale": "1.0",
        "suspend": False,
    }


def test_the_scale_subresource_reads_and_writes_replicas(kubeconfig_of_apiserver: Path) -> None:
    kubectl(kubeconfig_of_apiserver, "create", "-f", "-", stdin=json.dumps(deployment("scaled")))
    try:
        status = {"status": {"replicas": 2, "selector": "a=b"}}
        kubectl(kubeconfig_of_apiserver, "patch", "dd", "scaled", "--subresource=status", "--type=merge", "-p", json.dumps(status))
        kubectl(kubeconfig_of_apiserver, "scale", "dd", "scaled", "--replicas=3")
        scale = json.loads(kubectl(kubeconfig_of_apiserver, "get", "dd", "scaled", "--subresource=scale", "-o", "json"))
        assert scale["spec"]["replicas"] == 3
        assert scale["status"] == {"replicas": 2, "selector": "a=b"}
    finally:
        kubectl(kubeconfig_of_apiserver, "delete", "dd", "scaled", "--wait=false")


def test_the_columns_and_short_names_work(kubeconfig_of_apiserver: Path) -> None:
    kubectl(kubeconfig_of_apiserver, "create", "-f", "-", stdin=json.dumps(deployment("shown")))
    try:
        header, row = kubectl(kubeconfig_of_apiserver, "get", "diffdep", "shown", "-o", "wide").splitlines()
        assert header.split() == ["NAME", "READY", "DESIRED", "AWAKE", "UP-TO-DATE", "REASON", "MODEL", "ADAPTERS", "AGE"]
        assert row.split()[:2] == ["shown", "1"]
        assert "shown" in kubectl(kubeconfig_of_apiserver, "get", "diffusion", "-o", "name")
    finally:
        kubectl(kubeconfig_of_apiserver, "delete", "dd", "shown", "--wait=false")


def test_an_explanation_exists_for_the_fields(kubeconfig_of_apiserver: Path) -> None:
    assert "gives the memory back" in kubectl(kubeconfig_of_apiserver, "explain", "dd.spec.sleep.policy")
