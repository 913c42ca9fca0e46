# SPDX-License-Identifier: Apache-2.0
"""Rendered objects are strictly valid Kubernetes, and match the spec."""

import gzip
import json
from typing import Any

import kubernetes_validate
import msgspec
import pytest

from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import DEPLOYMENT
from diffusion_operator.api.source import AdapterSource, S3Source, SecretRef
from diffusion_operator.plan.adapters.acceptance import DesiredAdapter
from diffusion_operator.plan.adapters.shards import packed
from diffusion_operator.plan.replicas.revision import template_of
from diffusion_operator.plan.results.events import EventType, PlannedEvent
from diffusion_operator.render.check_pod import check_pod
from diffusion_operator.render.control_secret import control_secret, control_token
from diffusion_operator.render.desired_config import desired_config
from diffusion_operator.render.disruption_budget import disruption_budget
from diffusion_operator.render.event import event
from diffusion_operator.render.network_policy import network_policy
from diffusion_operator.render.pod import MESH_ANNOTATIONS, pod
from diffusion_operator.render.service import service
from support.operator.fake_cluster import EPOCH
from support.operator.rig import OPERATOR_PODS

KEY = b"k" * 32
LOAD = AdapterLoad(source=AdapterSource(path="/l"), scale=0.5)


def wanted(name: str, load: AdapterLoad = LOAD) -> DesiredAdapter:
    return DesiredAdapter(uid=name, generation=1, name=name, load=load, load_timeout_s=9)


def made(**spec: Any) -> DiffusionDeployment:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return msgspec.convert({"metadata": metadata, "spec": {"model": {"source": {"path": "/m"}}} | spec}, DiffusionDeployment)


def rendered_pod(**spec: Any) -> dict[str, Any]:
    deployment = made(**spec)
    return pod(deployment, template_of(deployment, default_image="worker:1"), index=2, incarnation=3)


def rendered_check(**spec: Any) -> dict[str, Any]:
    deployment = made(**spec)
    return check_pod(deployment, template_of(deployment, default_image="worker:1"), nodes=("node",))


def worker(**spec: Any) -> dict[str, Any]:
    container: dict[str, Any] = rendered_pod(**spec)["spec"]["containers"][0]
    return container


PLACED = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["80"]}]}]
            },
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "preference": {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}}
            ],
        },
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "podAffinityTerm": {"topologyKey": "zone", "namespaces": ["n"], "labelSelector": {"matchLabels": {"a": "b"}}},
                }
            ]
        },
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "host", "labelSelector": {"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}}
            ]
        },
    },
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "batch",
}

RICH = {
    "engine": {"image": "i", "env": [{"name": "A", "value": "b"}], "pullSecrets": [{"name": "registry"}]},
    "parallelism": {"ranksPerReplica": 2},
    "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}, "sharedMemory": "64Mi"},
    "service": {
        "type": "NodePort", "port": 8080, "annotations": {"example.com/class": "internal"}, "apiKeySecret": {"name": "hub.token"},
    },
    "model": {"source": {"pvc": {"claimName": "models", "path": "sd3"}}, "cache": {"claim": {"claimName": "models"}}},
    "lora": {"secrets": ["hub.token", "models"], "claims": ["hub.token", "models"]},
    "podMetadata": {"labels": {"team": "images"}, "annotations": {"example.com/scrape": "yes"}},
    "scheduling": PLACED | {"topologySpread": [{"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]},
}  # fmt: skip
CLAIMED = {"resources": {"claims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu", "request": "big"}]}}


@pytest.mark.parametrize(
    "spec", [{}, RICH, {"resources": {"gpuResourceName": "none"}}, CLAIMED], ids=["minimal", "rich", "cpu", "device claim"]
)
def test_every_child_is_valid_strictly(spec: dict[str, Any]) -> None:
    deployment = made(**spec)
    planned = PlannedEvent(type=EventType.NORMAL, reason="Slept", message="m", key="k")
    children = [
        rendered_pod(**spec),
        rendered_check(**spec),
        service(deployment),
        desired_config(deployment),
        control_secret(deployment, key=KEY),
        network_policy(deployment, OPERATOR_PODS),
        disruption_budget(deployment),
        event(planned, kind=DEPLOYMENT, about=deployment.metadata, now=EPOCH),
    ]
    for child in children:
        kubernetes_validate.validate(child, kubernetes_validate.latest_version(), strict=True)


def test_every_child_is_owned_and_labelled() -> None:
    deployment = made()
    children = (rendered_pod(), service(deployment), desired_config(deployment), control_secret(deployment, key=KEY))
    for child in (*children, network_policy(deployment, OPERATOR_PODS), disruption_budget(deployment)):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("u", True, True)
        assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "diffusion-operator"
        assert child["metadata"]["labels"]["diffusion-operator.dev/deployment"] == "d"


def test_the_pods_name_and_labels_carry_index_incarnation_and_revision() -> None:
    metadata = rendered_pod()["metadata"]
    assert metadata["name"] == "d-2-3"
    assert metadata["labels"]["diffusion-operator.dev/replica-index"] == "2"
    assert metadata["labels"]["diffusion-operator.dev/incarnation"] == "3"
    assert metadata["labels"]["diffusion-operator.dev/revision"] == template_of(made(), default_image="worker:1").revision
    assert "diffusion-operator.dev/routable" not in metadata["labels"]


def test_the_pod_meets_the_restricted_profile() -> None:
    spec = rendered_pod()["spec"]
    context, container = spec["securityContext"], spec["containers"][0]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == 65532
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Always"


def test_a_check_pod_has_no_device_no_mount_and_no_privilege_and_goes_where_the_replica_would() -> None:
    spread = [{"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    scheduling = {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "t"}], "topologySpread": spread, "priorityClassName": "high"}
    made = rendered_check(
        scheduling=scheduling,
        engine={"env": [{"name": "A", "value": "1"}], "securityContext": {"privileged": True}, "pullSecrets": [{"name": "pull"}]},
        resources={"limits": {"memory": "64Gi"}},
        podMetadata={"labels": {"team": "x"}},
        hostNetwork=True,
    )
    spec, (container,) = made["spec"], made["spec"]["containers"]
    assert container["args"][:2] == ["serve", "--check"]
    assert container["args"][2:] == worker(engine={})["args"][1:]
    assert container["resources"]["requests"] == {"cpu": "10m", "memory": "64Mi"}
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert {"name": "A", "value": "1"} in container["env"]
    assert [volume["name"] for volume in spec["volumes"]] == ["tmp"]
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"], spec["imagePullSecrets"]) == ("Never", 1800, [{"name": "pull"}])
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"a": "b"}, "high")
    assert spec["tolerations"] == [{"key": "t"}, {"key": "nvidia.com/gpu", "operator": "Exists"}]
    [preferred] = spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchFields"][0]["values"] == ["node"]
    assert not {"hostNetwork", "topologySpreadConstraints", "resourceClaims"} & spec.keys()
    assert made["metadata"]["labels"]["team"] == "x"
    assert not {"diffusion-operator.dev/replica-index", "diffusion-operator.dev/routable"} & made["metadata"]["labels"].keys()


def test_the_worker_is_started_as_the_spec_says() -> None:
    arguments = worker(
        servedName="sd",
        model={"source": {"path": "/models/x"}, "dtype": "BFloat16"},
        engine={"maxBatchSize": 3},
        parallelism={"ranksPerReplica": 2},
        lora={"maxLoaded": 5, "maxRank": 32, "targetModules": ["to_q", "to_k"], "onMissing": "Load", "loadTimeoutSeconds": 7},
        startup={"timeoutSeconds": 60},
    )["args"]
    assert arguments == [
        "serve", "--model=/models/x", "--served-name=sd", "--dtype=bfloat16", "--ranks=2", "--host=0.0.0.0", "--port=8000",
        "--control-port=8001", "--control-token-file=/etc/diffusion/control/token", "--desired=/etc/diffusion/desired/desired.json",
        "--max-batch-size=3", "--max-loras=5", "--max-cached-loras=16", "--max-lora-rank=32", "--max-loras-per-request=4",
        "--lora-target-module=to_q", "--lora-target-module=to_k", "--lora-on-missing=load", "--lora-load-timeout-seconds=7",
        "--cache-dir=/var/cache/diffusion-operator",
        "--secrets-dir=/var/run/diffusion-operator/secrets", "--claims-dir=/var/run/diffusion-operator/claims",
        "--state-dir=/tmp/diffusion-worker",
        "--startup-timeout-seconds=60", "--drain-timeout-seconds=300",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "slots", "cached", "per_request"),
    [
        ({}, 4, 16, 4),
        ({"maxLoaded": 2}, 2, 16, 2),
        ({"maxLoaded": 40}, 40, 40, 4),
        ({"maxLoaded": 8, "maxCached": 9, "maxPerRequest": 8}, 8, 9, 8),
        ({"maxLoaded": 8, "maxPerRequest": 8, "enabled": False}, 0, 16, 1),
    ],
    ids=["defaults", "few", "many", "all said", "switched off"],
)
def test_limits_of_adapters_that_nobody_gave_follow_those_that_are_given(
    lora: dict[str, Any], slots: int, cached: int, per_request: int
) -> None:
    limits = {f"--max-loras={slots}", f"--max-cached-loras={cached}", f"--max-loras-per-request={per_request}"}
    assert limits <= set(worker(lora=lora)["args"])


def test_a_model_from_elsewhere_is_given_as_its_source_that_the_kubelet_leaves_as_it_is() -> None:
    source = {"huggingFace": {"repo": "org/sd3", "revision": "v1", "allowPatterns": ["$(HOME)/*"], "tokenSecretRef": {"name": "hub"}}}
    (argument,) = [one for one in worker(model={"source": source})["args"] if one.startswith("--model=")]
    given = json.loads(argument.removeprefix("--model=").replace("$$(", "$("))
    assert given == source
    assert "$$(HOME)" in argument


def mounts(**spec: Any) -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the mounts by path, and whether each is read-only."""
    found = rendered_pod(**spec)["spec"]
    volumes = {one["name"]: {key: value for key, value in one.items() if key != "name"} for one in found["volumes"]}
    assert len(volumes) == len(found["volumes"])
    return {one["mountPath"]: (volumes[one["name"]], one.get("readOnly", False)) for one in found["containers"][0]["volumeMounts"]}


def test_the_secrets_that_sources_may_use_are_mounted_read_only_and_need_not_be_there() -> None:
    source = {"s3": {"uri": "s3://b/m/", "credentialsSecretRef": {"name": "model.keys"}}}
    found = mounts(lora={"secrets": ["b", "a"]}, model={"source": source})
    folder = "/var/run/diffusion-operator/secrets"
    for name in ("a", "b", "model.keys"):
        assert found[f"{folder}/{name}"] == ({"secret": {"secretName": name, "optional": True, "defaultMode": 0o440}}, True)
    assert sum(path.startswith(folder) for path in found) == 3


def test_the_claims_that_sources_may_lie_on_are_mounted_read_only() -> None:
    found = mounts(lora={"claims": ["styles"]}, model={"source": {"pvc": {"claimName": "models", "path": "sd3"}}})
    for name in ("styles", "models"):
        assert found[f"/var/run/diffusion-operator/claims/{name}"] == (
            {"persistentVolumeClaim": {"claimName": name, "readOnly": True}},
            True,
        )


def test_what_the_operator_is_told_of_secrets_is_their_names() -> None:
    """Check that a user's Secret reaches the pod by its name alone. No child repeats its content, and no role lets the operator read it."""
    source = AdapterSource(s3=S3Source(uri="s3://b/x.safetensors", credentials_secret_ref=SecretRef(name="keys")))
    content = gzip.decompress(packed([wanted("x", AdapterLoad(source=source))]))
    assert json.loads(content)["adapters"][0]["source"] == {"s3": {"uri": "s3://b/x.safetensors", "credentialsSecretRef": {"name": "keys"}}}


def test_a_deployment_without_adapters_mounts_nothing_for_them() -> None:
    found = mounts(lora={"enabled": False, "secrets": ["a"], "claims": ["b"]})
    assert not [path for path in found if path.startswith("/var/run/")]


def test_the_volumes_of_a_secret_and_of_a_claim_with_one_name_do_not_meet() -> None:
    found = mounts(**RICH)
    assert found["/var/run/diffusion-operator/secrets/hub.token"][0]["secret"]["secretName"] == "hub.token"
    assert found["/var/run/diffusion-operator/claims/hub.token"][0]["persistentVolumeClaim"]["claimName"] == "hub.token"


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        (None, {"emptyDir": {}}),
        ({"emptyDir": {"sizeLimit": "5Gi"}}, {"emptyDir": {"sizeLimit": "5Gi"}}),
        ({"claim": {"claimName": "cache"}}, {"persistentVolumeClaim": {"claimName": "cache"}}),
    ],
    ids=["by default", "with a limit", "on a claim"],
)
def test_the_cache_is_a_volume_that_the_worker_may_write_to(cache: dict[str, Any] | None, volume: dict[str, Any]) -> None:
    model = {"source": {"path": "/m"}} | ({"cache": cache} if cache else {})
    assert mounts(model=model)["/var/cache/diffusion-operator"] == (volume, False)


@pytest.mark.parametrize(("size", "limit"), [("10Gi", 9 * 1024**3), ("1.5M", 1_350_000), (1000, 900), ("1", 1), ("2000m", 1)])
def test_the_worker_keeps_less_than_the_size_at_which_its_pod_would_be_evicted(size: int | str, limit: int) -> None:
    model = {"source": {"path": "/m"}, "cache": {"emptyDir": {"sizeLimit": size}}}
    assert f"--cache-size-bytes={limit}" in worker(model=model)["args"]
    assert not [one for one in worker()["args"] if one.startswith("--cache-size")]


def test_the_number_of_gpus_is_the_number_of_ranks() -> None:
    assert worker(parallelism={"ranksPerReplica": 2})["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    own = worker(resources={"gpuResourceName": "example.com/gpu", "limits": {"memory": 5}})["resources"]
    assert own == {"requests": {"example.com/gpu": "1"}, "limits": {"memory": "5", "example.com/gpu": "1"}}
    assert worker(resources={"gpuResourceName": "none"})["resources"] == {}


@pytest.mark.parametrize(
    ("resources", "device"),
    [
        ({}, "cuda"),
        ({"gpuResourceName": "amd.com/gpu"}, "cuda"),
        ({"gpuResourceName": "nvidia.com/mig-1g.5gb"}, "cuda"),
        ({"gpuResourceName": "nvidia.com/gpu.shared"}, "cuda"),
        ({"claims": [{"name": "gpu", "resourceClaimName": "one-gpu"}]}, "cuda"),
        ({"gpuResourceName": "none"}, None),
    ],
    ids=lambda value: str(value),
)
def test_a_worker_in_a_pod_with_a_gpu_may_not_serve_on_the_cpu(resources: dict[str, Any], device: str | None) -> None:
    mine = [{"name": "A", "value": "b"}, {"name": "DIFFUSION_WORKER_DEVICE", "value": "cpu"}]
    env = worker(resources=resources, engine={"env": mine})["env"]
    assert [one["value"] for one in env if one["name"] == "DIFFUSION_WORKER_DEVICE"] == ([device] if device else [])
    assert {"name": "A", "value": "b"} in env
    # An older container image may be pinned, and it ends at an option that it does not know.
    assert not [one for one in worker(resources=resources)["args"] if one.startswith("--device")]


def test_devices_by_claim_take_the_place_of_a_number_of_gpus() -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu", "request": "big"}, {"name": "nic", "resourceClaimName": "shared"}]
    spec = rendered_pod(resources={"claims": claims, "limits": {"memory": "1Gi"}})["spec"]
    assert spec["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": "one-gpu"},
        {"name": "nic", "resourceClaimName": "shared"},
    ]
    resources = spec["containers"][0]["resources"]
    assert resources == {"limits": {"memory": "1Gi"}, "claims": [{"name": "gpu", "request": "big"}, {"name": "nic"}]}
    assert "resourceClaims" not in rendered_pod()["spec"]


def test_the_pod_is_placed_as_the_spec_says_in_the_words_of_kubernetes() -> None:
    spec = rendered_pod(scheduling=PLACED)["spec"]
    assert {name: spec[name] for name in PLACED} == PLACED
    assert not rendered_pod()["spec"].keys() & {*PLACED, "topologySpreadConstraints"}


@pytest.mark.parametrize("asked", [{}, PLACED])
def test_a_pod_prefers_nodes_without_faults_to_others_beside_what_the_spec_prefers(asked: dict[str, Any]) -> None:
    deployment = made(scheduling=asked)
    template = template_of(deployment, default_image="worker:1")
    affinity = pod(deployment, template, index=2, incarnation=3, avoided_nodes=("a", "b"))["spec"]["affinity"]
    nodes = affinity["nodeAffinity"]
    wanted = asked.get("affinity", {}).get("nodeAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", [])
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("a", "b")]
    elsewhere = {"weight": 100, "preference": {"matchFields": fields}}
    assert nodes.pop("preferredDuringSchedulingIgnoredDuringExecution") == [*wanted, elsewhere]
    assert "requiredDuringSchedulingIgnoredDuringExecution" in nodes or not asked


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}),
        ({"runAsUser": 7, "supplementalGroups": [8]}, {"runAsUser": 7, "runAsGroup": 65532, "fsGroup": 65532, "supplementalGroups": [8]}),
        ({"identity": "Platform"}, {}),
    ],
)
def test_the_pods_user_is_that_of_the_spec_of_our_images_or_of_the_platform(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    fixed = {"runAsNonRoot": True, "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}}
    assert rendered_pod(securityContext=asked)["spec"]["securityContext"] == fixed | expected


def test_a_spread_is_over_the_pods_of_one_revision_of_the_deployment() -> None:
    spread = [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2}]
    (constraint,) = rendered_pod(scheduling={"topologySpread": spread})["spec"]["topologySpreadConstraints"]
    selector, keys = constraint.pop("labelSelector")["matchLabels"], constraint.pop("matchLabelKeys")
    assert constraint == spread[0]
    assert keys == ["diffusion-operator.dev/revision"]
    assert set(keys) <= rendered_pod()["metadata"]["labels"].keys()
    assert selector.items() <= rendered_pod()["metadata"]["labels"].items()


def test_labels_of_the_spec_never_make_a_pod_look_like_what_it_is_not() -> None:
    """Check that a spec cannot set the operator's labels. A routable pod gets the requests of the deployment that its labels name."""
    asked = {
        "team": "images",
        "diffusion-operator.dev/routable": "true",
        "diffusion-operator.dev/deployment": "another",
        "x.diffusion-operator.dev/revision": "r",
        "app.kubernetes.io/managed-by": "me",
    }
    annotations = {"example.com/scrape": "yes", "diffusion-operator.dev/restartedAt": "now"}
    metadata = rendered_pod(podMetadata={"labels": asked, "annotations": annotations})["metadata"]
    assert metadata["labels"] == rendered_pod()["metadata"]["labels"] | {
        "team": "images",
        "diffusion-operator.dev/revision": metadata["labels"]["diffusion-operator.dev/revision"],
    }
    own = {"diffusion-operator.dev/owner-uid": "u"}
    assert metadata["annotations"] == {"example.com/scrape": "yes", **dict.fromkeys(MESH_ANNOTATIONS, "8001"), **own}


def test_the_image_is_pulled_with_the_secrets_of_the_spec() -> None:
    assert rendered_pod(engine={"pullSecrets": [{"name": "registry"}]})["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert "imagePullSecrets" not in rendered_pod()["spec"]


def test_a_pod_waits_for_its_api_key_and_gets_no_other_entry_of_the_secret() -> None:
    api_key = {"name": "edge", "key": "token"}
    volume, read_only = mounts(service={"apiKeySecret": api_key})["/etc/diffusion/api-key"]
    assert volume == {"secret": {"secretName": "edge", "defaultMode": 0o440, "items": [{"key": "token", "path": "token"}]}}
    assert read_only
    assert "--api-key-file=/etc/diffusion/api-key/token" in worker(service={"apiKeySecret": api_key})["args"]
    assert "/etc/diffusion/api-key" not in mounts()


@pytest.mark.parametrize(("drain", "seconds"), [({}, 300), ({"timeoutSeconds": 7200}, 7200)])
def test_a_replica_may_finish_its_requests_and_its_pod_has_the_time_for_it(drain: dict[str, int], seconds: int) -> None:
    assert f"--drain-timeout-seconds={seconds}" in worker(drain=drain)["args"]
    assert rendered_pod(drain=drain)["spec"]["terminationGracePeriodSeconds"] == seconds + 15


def test_the_control_port_is_open_to_the_operators_pods_alone() -> None:
    spec = network_policy(made(), OPERATOR_PODS)["spec"]
    assert spec["podSelector"]["matchLabels"].items() <= rendered_pod()["metadata"]["labels"].items()
    assert spec["policyTypes"] == ["Ingress"]
    data, control = spec["ingress"]
    assert data == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    assert control["ports"] == [{"port": 8001, "protocol": "TCP"}]
    (peer,) = control["from"]
    assert peer == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "operators"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "diffusion-operator"}},
    }


@pytest.mark.parametrize(
    ("access", "rules"),
    [
        ("SameNamespace", [{"ports": [{"port": 8000, "protocol": "TCP"}], "from": [{"podSelector": {}}]}]),
        ("None", []),
    ],
)
def test_the_data_port_is_open_to_those_whom_the_spec_names(access: str, rules: list[dict[str, Any]]) -> None:
    *data, control = network_policy(made(networkPolicy={"data": access}), OPERATOR_PODS)["spec"]["ingress"]
    assert data == rules
    assert control["ports"] == [{"port": 8001, "protocol": "TCP"}]


def test_a_drain_takes_one_replica_at_a_time_and_is_never_held_up_by_the_only_one_or_by_one_that_does_not_serve() -> None:
    spec = disruption_budget(made())["spec"]
    assert spec["selector"]["matchLabels"].items() <= rendered_pod()["metadata"]["labels"].items()
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_shared_memory_is_there_only_for_several_ranks() -> None:
    spec = rendered_pod(parallelism={"ranksPerReplica": 2}, resources={"sharedMemory": "64Mi"})["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]
    assert "shm" not in {volume["name"] for volume in rendered_pod()["spec"]["volumes"]}


def test_the_startup_probe_waits_longer_than_the_worker_itself() -> None:
    probe = worker(startup={"timeoutSeconds": 60})["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > 60
    assert probe["httpGet"]["path"] == "/readyz"


def test_the_users_environment_follows_ours_and_cannot_take_a_name_twice() -> None:
    given = [{"name": "HOME", "value": "/root"}, {"name": "A", "value": "b"}]
    env = worker(resources={"gpuResourceName": "none"}, engine={"env": given})["env"]
    uid = {"name": "DIFFUSION_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    assert env == [{"name": "HOME", "value": "/tmp"}, {"name": "XDG_CACHE_HOME", "value": "/tmp/.cache"}, uid, {"name": "A", "value": "b"}]


def test_the_service_selects_routable_pods_and_only_the_data_port() -> None:
    spec = service(made())["spec"]
    assert spec["selector"] == {"diffusion-operator.dev/deployment": "d", "diffusion-operator.dev/routable": "true"}
    assert [(port["port"], port["targetPort"]) for port in spec["ports"]] == [(80, 8000)]


def test_the_control_port_is_kept_out_of_meshes_beside_what_the_spec_keeps_out() -> None:
    istio, linkerd = MESH_ANNOTATIONS
    asked = {istio: "9000, 9001", linkerd: "8001"}
    annotations = rendered_pod(podMetadata={"annotations": asked})["metadata"]["annotations"]
    assert (annotations[istio], annotations[linkerd]) == ("9000,9001,8001", "8001")


def test_the_service_has_the_annotations_of_the_spec() -> None:
    annotations = {"example.com/class": "internal"}
    metadata = service(made(service={"annotations": annotations | {"diffusion-operator.dev/x": "y"}}))["metadata"]
    assert metadata["annotations"] == annotations | {"diffusion-operator.dev/owner-uid": "u"}
    assert service(made())["metadata"]["annotations"] == {"diffusion-operator.dev/owner-uid": "u"}


def test_the_desired_file_is_the_same_for_the_same_content() -> None:
    first = desired_config(made(sleep={"policy": "Asleep"}))["data"]["desired.json"]
    assert first == desired_config(made(sleep={"policy": "Asleep"}))["data"]["desired.json"]
    content = json.loads(first)
    assert content["sleep"] == {"policy": "Asleep", "level": "HostMemory", "wakeTimeoutSeconds": 120}
    assert content["coldRequests"] == {"mode": "Hold", "maxHeld": 64, "holdTimeoutSeconds": 300}


def test_a_token_belongs_to_one_uid_and_one_key() -> None:
    one = made().metadata
    tokens = {control_token(key, metadata) for key in (KEY, b"j" * 32) for metadata in (one, msgspec.structs.replace(one, uid="v"))}
    assert len(tokens) == 4


def test_an_event_has_the_times_by_which_kubectl_describe_sorts() -> None:
    planned = PlannedEvent(type=EventType.NORMAL, reason="Slept", key="1", message="asleep")
    made_event = event(planned, kind=DEPLOYMENT, about=made().metadata, now=EPOCH)
    assert made_event["firstTimestamp"] == made_event["lastTimestamp"] == EPOCH.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert made_event["count"] == 1
    assert made_event["involvedObject"]["name"] == "d"


def test_an_event_about_an_object_with_the_longest_name_has_a_name_of_its_own() -> None:
    about = msgspec.structs.replace(made().metadata, name=f"{'a' * 235}.{'b' * 17}")
    planned = [PlannedEvent(type=EventType.NORMAL, reason="Slept", key=key, message="m") for key in ("1", "2")]
    names = {event(one, kind=DEPLOYMENT, about=about, now=EPOCH)["metadata"]["name"] for one in planned}
    assert len(names) == 2
    assert all(len(name) <= 253 and name.startswith(f"{'a' * 235}.") and ".." not in name for name in names)


def test_an_events_name_depends_on_what_it_is_about_and_not_on_the_time() -> None:
    deployment = made()
    planned = PlannedEvent(type=EventType.WARNING, reason="ReplicaRestarted", message="m", key="boot-1")
    other = msgspec.structs.replace(planned, key="boot-2")
    names = [event(one, kind=DEPLOYMENT, about=deployment.metadata, now=EPOCH)["metadata"]["name"] for one in (planned, planned, other)]
    assert names[0] == names[1] != names[2]
