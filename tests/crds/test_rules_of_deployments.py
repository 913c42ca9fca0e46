# SPDX-License-Identifier: Apache-2.0
"""Every rule of a DiffusionDeployment by one accepted and one refused document, judged by a real API server."""

from typing import Any

import pytest

from support.apiserver.kind_api import Api, Document, check_creation, check_transition, dd, rules_without_a_row

pytestmark = pytest.mark.apiserver

LONG_NAMES = [f"s{number}" for number in range(17)]


def model(**source: Any) -> Document:
    return dd(model={"source": source})


def component_dtypes(**dtypes: str) -> Document:
    return dd(model={"source": {"path": "/m"}, "componentDtypes": dtypes})


def cached(**cache: Any) -> Document:
    return dd(model={"source": {"path": "/m"}, "cache": cache})


def hub(**more: Any) -> Document:
    return {"huggingFace": {"repo": "org/name"} | more}


def s3(uri: str) -> Document:
    return {"s3": {"uri": uri}}


def pvc(path: str) -> Document:
    return {"pvc": {"claimName": "c", "path": path}}


def http(url: str) -> Document:
    return {"http": {"url": url, "sha256": "a" * 64}}


def mig(suffix: str = "", *, ranks: int) -> Document:
    return dd(resources={"gpuResourceName": f"nvidia.com/mig-1g.5gb{suffix}"}, parallelism={"ranksPerReplica": ranks})


def claims(resources: Document | None = None, **claim: str) -> Document:
    return dd(resources={"claims": [{"name": "gpus", **claim}], **(resources or {})})


def requests(limits: Document | None = None, **defaults: Any) -> Document:
    return dd(requests={"defaults": defaults, "limits": limits or {}})


def warmup(*sizes: str) -> Document:
    return dd(startup={"warmup": {"sizes": list(sizes)}})


def pipeline(name: str, load_format: str = "Default") -> Document:
    return dd(model={"source": {"path": "/m"}, "pipeline": name}, engine={"loadFormat": load_format})


def shard(**engine: str) -> Document:
    return dd(engine=engine, parallelism={"ranksPerReplica": 2, "shard": 2})


def engine(sleep: str = "AlwaysAwake", **fields: Any) -> Document:
    return dd(engine=fields, sleep={"policy": sleep})


def policy(data: str, *, managed: str = "Managed") -> Document:
    return dd(networkPolicy={"data": data}, control={"networkPolicy": managed})


def api_key(**secret: str) -> Document:
    return dd(service={"apiKeySecret": secret})


def pods(**metadata: Document) -> Document:
    return dd(podMetadata=metadata)


def service(annotations: Document) -> Document:
    return dd(service={"annotations": annotations})


def place(**scheduling: Any) -> Document:
    return dd(scheduling=scheduling)


KEY_OF_SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}


def env(name: str = "A", **fields: Any) -> Document:
    return dd(engine={"env": [{"name": name, **fields}]})


def volumes(name: str = "data", **source: Any) -> Document:
    return dd(volumes=[{"name": name, **source}])


def mounts(path: str, name: str = "data") -> Document:
    return dd(volumes=[{"name": "data", "emptyDir": {}}], engine={"volumeMounts": [{"name": name, "mountPath": path}]})


def twice(field: str, item: Document) -> Document:
    return dd(**{field: [item, item]})


def added(capability: str) -> Document:
    return dd(engine={"securityContext": {"capabilities": {"add": [capability]}}})


def resources(**given: tuple[Any, Any]) -> Document:
    both = zip(("requests", "limits"), zip(*given.values(), strict=True), strict=True)
    return dd(resources={part: dict(zip(given, values, strict=True)) for part, values in both})


def tolerates(**toleration: Any) -> Document:
    return place(tolerations=[toleration])


def field(path: str) -> Document:
    return env(valueFrom={"fieldRef": {"fieldPath": path}})


DIGEST = "sha256:" + "0a" * 32
IMAGES = [
    ("worker", "Worker"),
    ("worker:1.0", "worker:"),
    (f"registry.example:5000/a/b_c/w-x:1.0@{DIGEST}", "registry.example:port/w"),
    ("localhost/w", "w /x"),
    (f"w@{DIGEST}", "w@sha256:0a"),
    ("[::1]:5000/w", "https://registry.example/w"),
]
CREATIONS = [
    # subject, accepted, refused, part of the message
    ("D1 model source", dd(), dd(model={"source": {}}), "exactly one source"),
    ("a model is required", dd(), {**dd(), "spec": {}}, "spec.model: Required"),
    ("absolute path", dd(), dd(model={"source": {"path": "models"}}), "spec.model.source.path"),
    ("no .. in a path", dd(model={"source": {"path": "/a..b"}}), dd(model={"source": {"path": "/a/../b"}}), "must not contain"),
    ("D5", dd(lora={"maxRank": 16}), dd(lora={"maxRank": 24}), "maxRank must be one of"),
    ("D16 length", dd("a" * 40), dd("a" * 41), "at most 40 characters"),
    ("D16 label", dd("a-b"), dd("a.b"), "DNS label"),
    ("D16 first letter", dd("a3"), dd("3a"), "begins with a letter"),
    ("D18", dd(engine={"env": [{"name": "A", "value": "1"}]}), dd(engine={"env": [{"name": "DIFFUSION_INTERNAL_A"}]}), "reserved"),
    (
        "the device follows from the resources",
        dd(engine={"env": [{"name": "DIFFUSION_WORKER_START_METHOD", "value": "spawn"}]}),
        dd(engine={"env": [{"name": "DIFFUSION_WORKER_DEVICE", "value": "cpu"}]}),
        "DIFFUSION_WORKER_DEVICE is reserved",
    ),
    ("env names are a key", dd(engine={"env": [{"name": "A"}]}), dd(engine={"env": [{"name": "A"}, {"name": "A"}]}), "Duplicate"),
    ("D20 requests", dd(resources={"requests": {"cpu": "1"}}), dd(resources={"requests": {"nvidia.com/gpu": 1}}), "not be requested"),
    ("D20 limits", dd(resources={"limits": {"memory": "1Gi"}}), dd(resources={"limits": {"nvidia.com/gpu": "1"}}), "not be limited"),
    (
        "D20 own GPU name",
        dd(resources={"gpuResourceName": "example.com/gpu", "limits": {"cpu": 2}}),
        dd(resources={"gpuResourceName": "example.com/gpu", "limits": {"example.com/gpu": 2}}),
        "named by gpuResourceName",
    ),
    ("one MIG device", mig(ranks=1), mig(ranks=2), "ranksPerReplica must be 1 with a MIG resource"),
    ("one shared MIG device", mig(".shared", ranks=1), mig(".shared", ranks=2), "ranksPerReplica must be 1 with a MIG resource"),
    ("gpuResourceName", dd(resources={"gpuResourceName": "none"}), dd(resources={"gpuResourceName": "gpu"}), "gpuResourceName"),
    ("quantities", dd(resources={"requests": {"cpu": "1500m"}}), dd(resources={"requests": {"cpu": "much"}}), "requests"),
    ("sharedMemory", dd(resources={"sharedMemory": "64Mi"}), dd(resources={"sharedMemory": "-1Gi"}), "sharedMemory"),
    ("requests and limits", resources(cpu=("1500m", 2)), resources(cpu=("2.5", 2)), "each of requests must be at most the limit"),
    ("requests and limits of memory", resources(memory=("1Gi", "1073741824")), resources(memory=("2Gi", "2G")), "at most the limit"),
    ("a disk of its own", resources(**{"e.com/a": (1, 1)}), resources(**{"e.com/a": (1, 2)}), "needs an equal limit"),
    ("huge pages", resources(**{"hugepages-2Mi": ("4Mi", "4Mi")}), dd(resources={"requests": {"hugepages-2Mi": "4Mi"}}), "equal limit"),
    ("the name of a request", resources(cpu=(1, 1)), dd(resources={"requests": {"CPU": 1}}), "has a domain as in example.com/disk"),
    ("the name of a limit", dd(resources={"limits": {"e.com/a": 1}}), dd(resources={"limits": {"gpu": 1}}), "has a domain as in"),
    *(("an image", dd(engine={"image": right}), dd(engine={"image": wrong}), "image must be a reference") for right, wrong in IMAGES),
    ("a key of a toleration", tolerates(operator="Exists"), tolerates(effect="NoSchedule"), "the operator must be Exists"),
    ("a value of a toleration", tolerates(key="a", value="b"), tolerates(key="a", value="b", operator="Exists"), "the operator Equal"),
    (
        "seconds of a toleration",
        tolerates(key="a", value="b", effect="NoExecute", tolerationSeconds=1),
        tolerates(key="a", value="b", effect="NoSchedule", tolerationSeconds=1),
        "needs the effect NoExecute",
    ),
    ("a field of the pod", field("metadata.labels['team']"), field("metadata.label"), "fieldPath"),
    ("another field of the pod", field("status.hostIP"), field("spec.containers"), "fieldPath"),
    ("image length", dd(engine={"image": "a" * 512}), dd(engine={"image": "a" * 513}), "image"),
    ("no rule couples minAwake with replicas", dd(sleep={"minAwake": 256}, replicas=1), dd(sleep={"minAwake": 257}), "minAwake"),
    ("served name", dd(servedName="sd-3"), dd(servedName="SD 3"), "servedName"),
    ("further names", dd(servedNames=["openai/GPT-image_1.5"]), dd(servedNames=["/x"]), "servedNames"),
    ("eight further names", dd(servedNames=[f"n{n}" for n in range(8)]), dd(servedNames=[f"n{n}" for n in range(9)]), "at most 8"),
    ("a dtype of a component", component_dtypes(vae="Float32"), component_dtypes(vae="Auto"), "componentDtypes"),
    ("the name of a component", component_dtypes(t5_2="Float32"), component_dtypes(**{"my-vae": "Float32"}), "name of a component"),
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
    ("target modules", dd(lora={"targetModules": ["to_q", "ff.net.2"]}), dd(lora={"targetModules": [".*"]}), "targetModules"),
    ("target modules differ", dd(lora={"targetModules": ["to_q"]}), dd(lora={"targetModules": ["to_q"] * 2}), "Duplicate"),
    ("secrets", dd(lora={"secrets": ["a.b"]}), dd(lora={"secrets": ["../etc"]}), "secrets"),
    ("at most 16 secrets", dd(lora={"secrets": LONG_NAMES[:16]}), dd(lora={"secrets": LONG_NAMES}), "secrets"),
    ("claims", dd(lora={"claims": ["a.b"]}), dd(lora={"claims": ["A"]}), "claims"),
    ("at most 16 claims", dd(lora={"claims": LONG_NAMES[:16]}), dd(lora={"claims": LONG_NAMES}), "claims"),
    (
        "D4",
        dd(parallelism={"ranksPerReplica": 8, "tensor": 4}),
        dd(parallelism={"ranksPerReplica": 8, "tensor": 3}),
        "tensor x sequence x shard must divide ranksPerReplica",
    ),
    ("D7", dd(rollout={"type": "Recreate"}), dd(rollout={"type": "Recreate", "maxSurge": 1}), "not be set with type"),
    ("D7 unavailable", dd(rollout={"maxUnavailable": 2}), dd(rollout={"type": "Recreate", "maxUnavailable": 2}), "not be set with type"),
    ("D8", dd(rollout={"maxSurge": 1, "maxUnavailable": 0}), dd(rollout={"maxUnavailable": 0}), "must not both be 0"),
    ("D8 no surge", dd(rollout={"maxSurge": 0}), dd(rollout={"maxSurge": 0, "maxUnavailable": 0}), "must not both be 0"),
    ("D8 in percent", dd(rollout={"maxSurge": "25%", "maxUnavailable": "0%"}), dd(rollout={"maxUnavailable": "0%"}), "must not both be 0"),
    ("a percentage", dd(rollout={"maxUnavailable": "100%"}), dd(rollout={"maxUnavailable": "101%"}), "maxUnavailable"),
    ("a percentage that is none", dd(rollout={"maxSurge": "5%"}), dd(rollout={"maxSurge": "a few"}), "maxSurge"),
    ("a value and its source", env(value="v"), env(value="v", valueFrom=KEY_OF_SECRET), "value and valueFrom exclude each other"),
    ("one source of a value", env(valueFrom=KEY_OF_SECRET), env(valueFrom={}), "exactly one of configMapKeyRef"),
    ("our variables", env("HOME2", value="v"), env("HOME", value="v"), "HOME and XDG_CACHE_HOME are set by the operator"),
    ("env from", dd(engine={"envFrom": [{"secretRef": {"name": "s"}}]}), dd(engine={"envFrom": [{}]}), "exactly one of configMapRef"),
    ("one volume source", volumes(emptyDir={}), volumes(emptyDir={}, csi={"driver": "d"}), "exactly one of configMap, secret"),
    ("our volumes", volumes("data", emptyDir={}), volumes("tmp", emptyDir={}), "are names of the operator's volumes"),
    ("our numbered volumes", volumes("secret-a", emptyDir={}), volumes("secret-0", emptyDir={}), "are names of the operator's volumes"),
    ("our mounts", mounts("/data"), mounts("/var/run/diffusion-operator/secrets"), "are used by the operator"),
    ("a path that only looks like ours", mounts("/tmpfiles"), mounts("/tmp"), "are used by the operator"),
    ("a path without ..", mounts("/a.b/.c"), mounts("/data/../tmp"), "mountPath"),
    ("a mount of a volume", mounts("/data"), mounts("/data", name="another"), "must be one of spec.volumes"),
    ("volumes by name", volumes("a", emptyDir={}), twice("volumes", {"name": "a", "emptyDir": {}}), "Duplicate"),
    ("a service account", dd(serviceAccountName="team"), dd(serviceAccountName="Team"), "serviceAccountName"),
    ("a capability", added("IPC_LOCK"), added("ipc_lock"), "capabilities"),
    ("backoff", dd(replicaRecovery={"backoffSeconds": 300}), dd(replicaRecovery={"backoffSeconds": 301}), "at most backoffMaxSeconds"),
    ("D21", claims(resourceClaimName="c"), claims({"gpuResourceName": "none"}, resourceClaimName="c"), "exclude each other"),
    ("a claim", claims(resourceClaimTemplateName="t"), claims(resourceClaimName="c", resourceClaimTemplateName="t"), "exactly one of"),
    ("some claim", claims(resourceClaimName="c", request="gpu"), claims(), "exactly one of"),
    ("pull secrets", dd(engine={"pullSecrets": [{"name": "a"}]}), dd(engine={"pullSecrets": [{"name": "a"}] * 2}), "Duplicate"),
    ("api key", api_key(name="s"), api_key(name="s", key="../k"), "apiKeySecret.key"),
    ("an api key has a Secret", api_key(name="s", key="k"), api_key(key="k"), "name: Required"),
    ("guidance", requests(guidanceScale="3.5"), requests(guidanceScale="-1"), "guidanceScale"),
    ("guidance is no float", requests(guidanceScale="0"), requests(guidanceScale=3.5), "guidanceScale"),
    ("size", requests(size="1024x768"), requests(size="1024"), "size"),
    ("default steps", requests(steps=200), requests(steps=201), "at most limits.maxSteps"),
    ("default size", requests(size="2048x2048"), requests(size="2049x2048"), "defaults.size must be at most"),
    ("largest size", requests({"maxPixels": 1 << 30}, size="32768x32768"), requests(size="99999x99999"), "defaults.size must be"),
    ("sizes to warm up", warmup("64x64", "2048x2048"), warmup("64x64", "4096x2048"), "each of startup.warmup.sizes must be"),
    ("a size to warm up", warmup("64x64"), warmup("64*64"), "sizes"),
    ("sizes to warm up differ", warmup("64x64", "64x32"), warmup("64x64", "64x64"), "Duplicate"),
    ("a class", pipeline("FluxPipeline"), pipeline("diffusers.FluxPipeline"), "model.pipeline"),
    ("an import path", pipeline("a.b:C", "CustomPipeline"), pipeline("a.b:C"), "must be an import path"),
    ("an import path is needed", pipeline("a:C", "CustomPipeline"), pipeline("Auto", "CustomPipeline"), "must be an import path"),
    ("data port", policy("SameNamespace"), policy("SameNamespace", managed="None"), "because without it there is no policy"),
    ("identity", dd(securityContext={"runAsUser": 7}), dd(securityContext={"identity": "Platform", "fsGroup": 7}), "Platform excludes"),
    ("offload and sleep", engine(offload="Model"), engine("OnIdle", offload="Model"), "with engine.offload"),
    ("shard and sleep", shard(), dd(**shard()["spec"], sleep={"policy": "Asleep"}), "with parallelism.shard"),
    ("compile", engine(compile="Default"), engine(compile="Default", exact=True), "engine.compile excludes engine.exact"),
    ("compile on ranks", shard(), shard(compile="Default"), "engine.compile excludes parallelism.tensor"),
    ("offload on ranks", engine(offload="Group"), shard(offload="Group"), "engine.offload excludes parallelism.tensor"),
    ("quantization", engine(quantization="NF4"), shard(quantization="NF4"), "engine.quantization excludes"),
    ("step cache", engine(stepCache="MagCache"), shard(stepCache="MagCache"), "engine.stepCache excludes"),
    (
        "tensor",
        dd(parallelism={"ranksPerReplica": 4, "sequence": 2, "shard": 2}),
        dd(parallelism={"ranksPerReplica": 4, "tensor": 2, "shard": 2}),
        "parallelism.tensor excludes",
    ),
    ("labels of pods", pods(labels={"team.example.com/a": "b"}), pods(labels={"diffusion-operator.dev/x": "y"}), "are set by the operator"),
    ("who manages a pod", pods(labels={"app": "b"}), pods(labels={"app.kubernetes.io/managed-by": "me"}), "are set by the operator"),
    ("a label's value", pods(labels={"a": ""}), pods(labels={"a": "b c"}), "labels.a"),
    ("a label's name", pods(labels={"a_b.c": "d"}), pods(labels={"a b": "d"}), "a name must have at most 63 letters"),
    ("annotations of pods", pods(annotations={"a": "b"}), pods(annotations={"x.diffusion-operator.dev/a": "b"}), "are set by the operator"),
    ("an annotation's name", pods(annotations={"a.b/c": "d"}), pods(annotations={"a/b/c": "d"}), "a name must have at most 63 letters"),
    ("service annotations", service({"a.b/c": "d"}), service({"-a": "d"}), "a name must have at most 63 letters"),
    ("node selector", place(nodeSelector={"a.b/c": "d"}), place(nodeSelector={"A/b": "d"}), "a name must have at most 63 letters"),
    ("a toleration's key", place(tolerations=[{"key": "a/b", "operator": "Exists"}]), place(tolerations=[{"key": "a b"}]), "key"),
    ("a toleration's effect", tolerates(key="a", effect="NoExecute"), tolerates(key="a", effect="Never"), "effect"),
    ("a priority class", place(priorityClassName="high"), place(priorityClassName="High"), "priorityClassName"),
    ("a runtime class", place(runtimeClassName="nvidia"), place(runtimeClassName=""), "runtimeClassName"),
]  # fmt: skip


@pytest.mark.parametrize(("accepted", "refused", "message"), [row[1:] for row in CREATIONS], ids=[row[0] for row in CREATIONS])
def test_a_rule_accepts_one_document_and_refuses_another(api: Api, accepted: Document, refused: Document, message: str) -> None:
    check_creation(api, accepted, refused, message)


UPDATES = [
    # subject, before, accepted change of the spec, refused change of the spec, part of the message
    ("D17 change", dd(servedName="a"), {"replicas": 2}, {"servedName": "b"}, "servedName is immutable"),
    ("D17 add", dd(), {"replicas": 2}, {"servedName": "b"}, "cannot be added or removed"),
    ("D17 remove", dd(servedName="a"), {"replicas": 2}, {"servedName": None}, "cannot be added or removed"),
]


@pytest.mark.parametrize(("before", "accepted", "refused", "message"), [row[1:] for row in UPDATES], ids=[row[0] for row in UPDATES])
def test_a_transition_rule_accepts_one_change_and_refuses_another(
    api: Api, before: Document, accepted: Document, refused: Document, message: str
) -> None:
    check_transition(api, before, accepted, refused, message)


def test_every_rule_has_a_row() -> None:
    assert rules_without_a_row("diffusiondeployments", (*CREATIONS, *UPDATES)) == []
