# SPDX-License-Identifier: Apache-2.0
"""Every rule of both CRDs by one accepted and one refused document, judged by a real API server."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from diffusion_operator.api.source import AdapterSource
from real_apiserver import kubectl

pytestmark = pytest.mark.apiserver

Document = dict[str, Any]
GROUP = "diffusion-operator.dev/v1alpha1"


def dd(name: str = "one", **spec: Any) -> Document:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": GROUP, "kind": "DiffusionDeployment", "metadata": metadata, "spec": {"model": {"source": {"path": "/m"}}} | spec}


def lora(name: str = "one", **spec: Any) -> Document:
    base = {"deploymentRef": {"name": "d"}, "source": {"path": "/loras/x"}}
    return {"apiVersion": GROUP, "kind": "LoRAAdapter", "metadata": {"name": name, "namespace": "default"}, "spec": base | spec}


class Api:
    """Both kinds in one namespace; by the library, because a kubectl for each document takes a quarter of a second."""

    def __init__(self, kubeconfig: Path) -> None:
        self._client = config.new_client_from_config(config_file=str(kubeconfig))
        self._objects = client.CustomObjectsApi(self._client)

    def close(self) -> None:
        self._client.close()

    def create(self, document: Document, *, dry_run: bool = True) -> Document:
        options = {"dry_run": "All"} if dry_run else {}
        return self._objects.create_namespaced_custom_object(*_where(document), body=document, field_validation="Strict", **options)

    def patch(self, document: Document, spec: Document) -> Document:
        return self._objects.patch_namespaced_custom_object(*_where(document), _name(document), body={"spec": spec}, dry_run="All")

    def delete(self, document: Document) -> None:
        self._objects.delete_namespaced_custom_object(*_where(document), _name(document))

    def refusal(self, act: Callable[[], object]) -> str:
        with pytest.raises(ApiException) as caught:
            act()
        assert caught.value.status in (400, 422)
        return str(json.loads(caught.value.body)["message"])


def _where(document: Document) -> tuple[str, str, str, str]:
    group, version = document["apiVersion"].split("/")
    return group, version, document["metadata"]["namespace"], document["kind"].lower() + "s"


def _name(document: Document) -> str:
    return str(document["metadata"]["name"])


@pytest.fixture(scope="module")
def api(kubeconfig_of_apiserver: Path) -> Iterator[Api]:
    made = Api(kubeconfig_of_apiserver)
    yield made
    made.close()


DIGEST = "sha256:" + "a" * 64
HEX = "a" * 64
LONG_NAMES = [f"s{number}" for number in range(17)]


def model(**source: Any) -> Document:
    return dd(model={"source": source})


def cached(**cache: Any) -> Document:
    return dd(model={"source": {"path": "/m"}, "cache": cache})


def hub(**more: Any) -> Document:
    return {"huggingFace": {"repo": "org/name"} | more}


def s3(uri: str, **more: Any) -> Document:
    return {"s3": {"uri": uri} | more}


def pvc(path: str) -> Document:
    return {"pvc": {"claimName": "c", "path": path}}


def http(url: str, sha256: str = HEX) -> Document:
    return {"http": {"url": url, "sha256": sha256}}


CREATIONS = [
    # what, accepted, refused, part of the message
    ("D1 model source", dd(), dd(model={"source": {}}), "exactly one source"),
    ("a model is required", dd(), {**dd(), "spec": {}}, "spec.model: Required"),
    ("absolute path", dd(), dd(model={"source": {"path": "models"}}), "spec.model.source.path"),
    ("no .. in a path", dd(model={"source": {"path": "/a..b"}}), dd(model={"source": {"path": "/a/../b"}}), "must not contain"),
    ("D5", dd(lora={"maxRank": 16}), dd(lora={"maxRank": 24}), "maxRank must be one of"),
    ("D16 length", dd("a" * 40), dd("a" * 41), "at most 40 characters"),
    ("D16 label", dd("a-b"), dd("a.b"), "DNS label"),
    ("D16 first letter", dd("a3"), dd("3a"), "begins with a letter"),
    ("D18", dd(engine={"env": [{"name": "A", "value": "1"}]}), dd(engine={"env": [{"name": "DIFFUSION_INTERNAL_A"}]}), "reserved"),
    ("env names are a key", dd(engine={"env": [{"name": "A"}]}), dd(engine={"env": [{"name": "A"}, {"name": "A"}]}), "Duplicate"),
    ("D20 requests", dd(resources={"requests": {"cpu": "1"}}), dd(resources={"requests": {"nvidia.com/gpu": 1}}), "not be requested"),
    ("D20 limits", dd(resources={"limits": {"memory": "1Gi"}}), dd(resources={"limits": {"nvidia.com/gpu": "1"}}), "not be limited"),
    (
        "D20 own GPU name",
        dd(resources={"gpuResourceName": "example.com/gpu", "limits": {"cpu": 2}}),
        dd(resources={"gpuResourceName": "example.com/gpu", "limits": {"example.com/gpu": 2}}),
        "named by gpuResourceName",
    ),
    ("gpuResourceName", dd(resources={"gpuResourceName": "none"}), dd(resources={"gpuResourceName": "gpu"}), "gpuResourceName"),
    ("quantities", dd(resources={"requests": {"cpu": "1500m"}}), dd(resources={"requests": {"cpu": "much"}}), "requests"),
    ("sharedMemory", dd(resources={"sharedMemory": "64Mi"}), dd(resources={"sharedMemory": "-1Gi"}), "sharedMemory"),
    ("ranks at least 1", dd(parallelism={"ranksPerReplica": 1}), dd(parallelism={"ranksPerReplica": 0}), "ranksPerReplica"),
    ("ranks at most 64", dd(parallelism={"ranksPerReplica": 64}), dd(parallelism={"ranksPerReplica": 65}), "ranksPerReplica"),
    ("replicas at least 0", dd(replicas=0), dd(replicas=-1), "spec.replicas"),
    ("replicas at most 256", dd(replicas=256), dd(replicas=257), "spec.replicas"),
    ("dtype", dd(model={"source": {"path": "/m"}, "dtype": "Float16"}), dd(model={"source": {"path": "/m"}, "dtype": "fp16"}), "dtype"),
    ("batch", dd(engine={"maxBatchSize": 64}), dd(engine={"maxBatchSize": 65}), "maxBatchSize"),
    ("pullPolicy", dd(engine={"pullPolicy": "Never"}), dd(engine={"pullPolicy": "Sometimes"}), "pullPolicy"),
    ("image length", dd(engine={"image": "a" * 512}), dd(engine={"image": "a" * 513}), "image"),
    ("maxLoaded", dd(lora={"maxLoaded": 0}), dd(lora={"maxLoaded": 65}), "maxLoaded"),
    ("loadTimeout", dd(lora={"loadTimeoutSeconds": 5}), dd(lora={"loadTimeoutSeconds": 4}), "loadTimeoutSeconds"),
    ("lora drain", dd(lora={"drainTimeoutSeconds": 0}), dd(lora={"drainTimeoutSeconds": 7201}), "drainTimeoutSeconds"),
    ("sleep policy", dd(sleep={"policy": "OnIdle"}), dd(sleep={"policy": "OnDemand"}), "policy"),
    ("sleep level", dd(sleep={"level": "Discard"}), dd(sleep={"level": "2"}), "level"),
    ("idle at least 10", dd(sleep={"idleSeconds": 10}), dd(sleep={"idleSeconds": 9}), "idleSeconds"),
    ("idle at most a day", dd(sleep={"idleSeconds": 86400}), dd(sleep={"idleSeconds": 86401}), "idleSeconds"),
    ("no rule couples minAwake with replicas", dd(sleep={"minAwake": 256}, replicas=1), dd(sleep={"minAwake": 257}), "minAwake"),
    ("minAwake at least 0", dd(sleep={"minAwake": 0}), dd(sleep={"minAwake": -1}), "minAwake"),
    ("awake at least 0 s", dd(sleep={"minAwakeSeconds": 0}), dd(sleep={"minAwakeSeconds": -1}), "minAwakeSeconds"),
    ("awake at most a day", dd(sleep={"minAwakeSeconds": 86400}), dd(sleep={"minAwakeSeconds": 86401}), "minAwakeSeconds"),
    ("cold requests", dd(coldRequests={"mode": "Reject"}), dd(coldRequests={"mode": "Drop"}), "mode"),
    ("held at least 0", dd(coldRequests={"maxHeld": 0}), dd(coldRequests={"maxHeld": -1}), "maxHeld"),
    ("held at most 10000", dd(coldRequests={"maxHeld": 10_000}), dd(coldRequests={"maxHeld": 10_001}), "maxHeld"),
    ("held 1 s", dd(coldRequests={"holdTimeoutSeconds": 1}), dd(coldRequests={"holdTimeoutSeconds": 0}), "holdTimeoutSeconds"),
    ("held 1 h", dd(coldRequests={"holdTimeoutSeconds": 3600}), dd(coldRequests={"holdTimeoutSeconds": 3601}), "holdTimeoutSeconds"),
    ("sleep drain", dd(sleep={"drain": "Abort"}), dd(sleep={"drain": "Never"}), "drain"),
    ("sleep drain time", dd(sleep={"drainTimeoutSeconds": 7200}), dd(sleep={"drainTimeoutSeconds": 7201}), "drainTimeoutSeconds"),
    ("wake at most 1 h", dd(sleep={"wakeTimeoutSeconds": 3600}), dd(sleep={"wakeTimeoutSeconds": 3601}), "wakeTimeoutSeconds"),
    ("wake time", dd(sleep={"wakeTimeoutSeconds": 5}), dd(sleep={"wakeTimeoutSeconds": 4}), "wakeTimeoutSeconds"),
    ("startup time", dd(startup={"timeoutSeconds": 10}), dd(startup={"timeoutSeconds": 9}), "timeoutSeconds"),
    ("service type", dd(service={"type": "NodePort"}), dd(service={"type": "ExternalName"}), "type"),
    ("service port", dd(service={"port": 65535}), dd(service={"port": 65536}), "port"),
    ("served name", dd(servedName="sd-3"), dd(servedName="SD 3"), "servedName"),
    ("no unknown fields", dd(), dd(sleep={"idleMinutes": 5}), "unknown field"),
    ("D1 one model source", model(**hub()), model(path="/m", **hub()), "exactly one source"),
    ("a model from http", model(**s3("s3://bkt/m/")), model(**http("https://h/m.safetensors")), "unknown field"),
    ("a model in a bucket is a folder", model(**s3("s3://bkt/m/")), model(**s3("s3://bkt/m.safetensors")), "a model is a folder"),
    ("model patterns", model(**hub(allowPatterns=["vae/*"])), model(**hub(allowPatterns=["a"] * 2)), "Duplicate"),
    ("model claim", model(**pvc("sd3")), model(**pvc("/sd3")), "must be relative"),
    ("model claim without ..", model(**pvc("a..b")), model(**pvc("a/../../b")), "must not contain '..'"),
    ("one cache", cached(claim={"claimName": "c"}), cached(claim={"claimName": "c"}, emptyDir={}), "exactly one cache"),
    ("some cache", cached(emptyDir={"sizeLimit": "5Gi"}), cached(), "exactly one cache"),
    ("cache size", cached(emptyDir={"sizeLimit": 5}), cached(emptyDir={"sizeLimit": "much"}), "sizeLimit"),
    ("D6", dd(lora={"maxLoaded": 20, "maxCached": 20}), dd(lora={"maxLoaded": 20, "maxCached": 19}), "at least maxLoaded"),
    ("D10", dd(lora={"maxLoaded": 8, "maxPerRequest": 8}), dd(lora={"maxPerRequest": 5}), "at most maxLoaded"),
    ("limits that nobody gave", dd(lora={"maxLoaded": 64}), dd(lora={"maxLoaded": 1, "maxPerRequest": 2}), "at most maxLoaded"),
    ("maxCached", dd(lora={"maxCached": 1024}), dd(lora={"maxCached": 1025}), "maxCached"),
    ("onMissing", dd(lora={"onMissing": "Load"}), dd(lora={"onMissing": "Base"}), "onMissing"),
    ("target modules", dd(lora={"targetModules": ["to_q", "ff.net.2"]}), dd(lora={"targetModules": [".*"]}), "targetModules"),
    ("target modules differ", dd(lora={"targetModules": ["to_q"]}), dd(lora={"targetModules": ["to_q"] * 2}), "Duplicate"),
    ("secrets", dd(lora={"secrets": ["a.b"]}), dd(lora={"secrets": ["../etc"]}), "secrets"),
    ("at most 16 secrets", dd(lora={"secrets": LONG_NAMES[:16]}), dd(lora={"secrets": LONG_NAMES}), "secrets"),
    ("claims", dd(lora={"claims": ["a.b"]}), dd(lora={"claims": ["A"]}), "claims"),
    ("at most 16 claims", dd(lora={"claims": LONG_NAMES[:16]}), dd(lora={"claims": LONG_NAMES}), "claims"),
    ("A1", lora(), lora(source={}), "exactly one source"),
    ("A7 upper", lora(defaultScale="4.0"), lora(defaultScale="4.001"), "between -4 and 4"),
    ("A7 lower", lora(defaultScale="-4"), lora(defaultScale="-4.5"), "between -4 and 4"),
    ("scale is a decimal", lora(defaultScale="0.125"), lora(defaultScale="1e1"), "defaultScale"),
    ("adapter name", lora(adapterName="a.b_c-d"), lora(adapterName="A"), "adapterName"),
    ("adapter name from metadata", lora("a" * 63), lora("a" * 64), "needs spec.adapterName"),
    ("digest", lora(digest=DIGEST), lora(digest="sha256:1"), "digest"),
    ("adapter path", lora(source={"path": "/x"}), lora(source={"path": "/x/../y"}), "must not contain"),
    ("a deployment is required", lora(), lora(deploymentRef={}), "deploymentRef.name: Required"),
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
    ("format", lora(format="PEFT"), lora(format="peft"), "format"),
    ("expected rank", lora(expectedRank=256), lora(expectedRank=0), "expectedRank"),
    ("residency", lora(residency="OnDemand"), lora(residency="Pinned"), "residency"),
    ("priority", lora(priority=-5), lora(priority=10_000_000), "priority"),
    ("adapter load time", lora(loadTimeoutSeconds=5), lora(loadTimeoutSeconds=4), "loadTimeoutSeconds"),
]  # fmt: skip


@pytest.mark.parametrize(("accepted", "refused", "message"), [row[1:] for row in CREATIONS], ids=[row[0] for row in CREATIONS])
def test_a_rule_accepts_one_document_and_refuses_another(api: Api, accepted: Document, refused: Document, message: str) -> None:
    api.create(accepted)
    assert message in api.refusal(lambda: api.create(refused))


UPDATES = [
    # what, before, accepted change of the spec, refused change of the spec, part of the message
    ("D17 change", dd(servedName="a"), {"replicas": 2}, {"servedName": "b"}, "servedName is immutable"),
    ("D17 add", dd(), {"replicas": 2}, {"servedName": "b"}, "cannot be added or removed"),
    ("D17 remove", dd(servedName="a"), {"replicas": 2}, {"servedName": None}, "cannot be added or removed"),
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
    document = copy.deepcopy(before)
    document["metadata"]["name"] = "transition"
    api.create(document, dry_run=False)
    try:
        api.patch(document, accepted)
        assert message in api.refusal(lambda: api.patch(document, refused))
    finally:
        api.delete(document)


def test_the_schema_fills_in_every_default_so_that_yaml_shows_what_will_happen(api: Api) -> None:
    spec = api.create(dd())["spec"]
    assert spec == {
        "model": {"source": {"path": "/m"}, "dtype": "Auto", "cache": {"emptyDir": {}}},
        "engine": {"pullPolicy": "IfNotPresent", "maxBatchSize": 8},
        "replicas": 1,
        "parallelism": {"ranksPerReplica": 1},
        "resources": {"sharedMemory": "8Gi"},
        "lora": {
            "enabled": True, "maxLoaded": 4, "maxRank": 64, "onMissing": "Reject", "drainTimeoutSeconds": 120, "loadTimeoutSeconds": 120,
        },
        "sleep": {
            "policy": "AlwaysAwake", "level": "HostMemory", "idleSeconds": 300, "minAwake": 0, "minAwakeSeconds": 60, "drain": "Wait",
            "drainTimeoutSeconds": 300, "wakeTimeoutSeconds": 120,
        },
        "coldRequests": {"mode": "Hold", "maxHeld": 64, "holdTimeoutSeconds": 300},
        "startup": {"timeoutSeconds": 1800},
        "service": {"type": "ClusterIP", "port": 80},
    }  # fmt: skip
    assert api.create(lora())["spec"] == {
        "deploymentRef": {"name": "d"},
        "source": {"path": "/loras/x"},
        "defaultScale": "1.0",
        "format": "Auto",
        "residency": "Cached",
        "priority": 0,
        "loadTimeoutSeconds": 300,
        "suspend": False,
    }
    found = api.create(lora(source=hub(tokenSecretRef={"name": "s"})))["spec"]["source"]
    assert found == {"huggingFace": {"repo": "org/name", "revision": "main", "tokenSecretRef": {"name": "s", "key": "token"}}}


EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*/*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_example_is_accepted(api: Api, file: Path) -> None:
    for document in yaml.safe_load_all(file.read_text()):
        document["metadata"]["namespace"] = "default"
        assert api.create(document)["metadata"]["name"] == document["metadata"]["name"]


def test_there_is_an_example_of_every_kind_of_source() -> None:
    specs = [yaml.safe_load(file.read_text())["spec"] for file in EXAMPLES if file.parent.name == "adapters"]
    kinds = {kind for spec in specs if "deploymentRef" in spec for kind in spec["source"]}
    assert kinds == {field.encode_name for field in msgspec.structs.fields(AdapterSource)}


def test_the_scale_subresource_reads_and_writes_replicas(kubeconfig_of_apiserver: Path) -> None:
    kubectl(kubeconfig_of_apiserver, "create", "-f", "-", stdin=json.dumps(dd("scaled")))
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
    kubectl(kubeconfig_of_apiserver, "create", "-f", "-", stdin=json.dumps(dd("shown")))
    try:
        header, row = kubectl(kubeconfig_of_apiserver, "get", "diffdep", "shown", "-o", "wide").splitlines()
        assert header.split() == ["NAME", "READY", "DESIRED", "AWAKE", "UP-TO-DATE", "REASON", "MODEL", "ADAPTERS", "AGE"]
        assert row.split()[:2] == ["shown", "1"]
        assert "shown" in kubectl(kubeconfig_of_apiserver, "get", "diffusion", "-o", "name")
    finally:
        kubectl(kubeconfig_of_apiserver, "delete", "dd", "shown", "--wait=false")


def test_an_explanation_exists_for_the_fields(kubeconfig_of_apiserver: Path) -> None:
    assert "gives the memory back" in kubectl(kubeconfig_of_apiserver, "explain", "dd.spec.sleep.policy")
