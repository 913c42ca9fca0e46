# SPDX-License-Identifier: Apache-2.0
"""Parts of a pod that a spec adds: variables, volumes, mounts, an account, privileges. A spec without them renders as before."""

import json
from typing import Any

import kubernetes_validate
import msgspec
import pytest

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.plan.replicas.revision import template_of
from diffusion_operator.render.pod import pod

VOLUMES = [
    {
        "name": "config",
        "configMap": {"name": "c", "items": [{"key": "a", "path": "b/a", "mode": 292}], "defaultMode": 288, "optional": True},
    },
    {"name": "certs", "secret": {"secretName": "s", "optional": False}},
    {"name": "data", "persistentVolumeClaim": {"claimName": "p", "readOnly": True}},
    {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    {"name": "disk", "emptyDir": {}},
    {"name": "driver", "csi": {"driver": "d.example.com", "readOnly": True, "volumeAttributes": {"a": "b"}}},
    {"name": "host", "hostPath": {"path": "/data", "type": "Directory"}},
]
MOUNTS = [{"name": "config", "mountPath": "/config", "readOnly": True}, {"name": "data", "mountPath": "/data", "subPath": "in/it"}]
ENV = [
    {"name": "PLAIN", "value": "v"},
    {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
    {"name": "CONFIG", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
]
ENV_FROM = [{"configMapRef": {"name": "c"}}, {"prefix": "A_", "secretRef": {"name": "s", "optional": True}}]


def made(**spec: Any) -> DiffusionDeployment:
    metadata = {"name": "d", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return msgspec.convert({"metadata": metadata, "spec": {"model": {"source": {"path": "/m"}}} | spec}, DiffusionDeployment)


def rendered(**spec: Any) -> dict[str, Any]:
    deployment = made(**spec)
    result = pod(deployment, template_of(deployment, default_image="worker:1"), index=0, incarnation=0)
    kubernetes_validate.validate(json.loads(json.dumps(result)), "1.33", strict=True)
    return dict(result["spec"])


def test_volumes_and_mounts_follow_ours_as_kubernetes_has_them() -> None:
    before, spec = rendered(), rendered(volumes=VOLUMES, engine={"volumeMounts": MOUNTS})
    assert spec["volumes"] == [*before["volumes"], *VOLUMES]
    (container,) = spec["containers"]
    assert container["volumeMounts"] == [*before["containers"][0]["volumeMounts"], *MOUNTS]


def test_variables_come_from_secrets_configmaps_and_fields() -> None:
    (before,) = rendered()["containers"]
    (container,) = rendered(engine={"env": ENV, "envFrom": ENV_FROM})["containers"]
    assert container["env"] == [*before["env"], *ENV]
    assert container["envFrom"] == ENV_FROM
    assert "envFrom" not in before


def test_the_account_is_the_specs_and_its_token_stays_out() -> None:
    spec = rendered(serviceAccountName="team")
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("team", False)
    assert "serviceAccountName" not in rendered()


def test_host_namespaces_and_privileges_are_rendered_where_the_spec_asks() -> None:
    spec = rendered(hostNetwork=True, hostIPC=True, engine={"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}})
    assert (spec["hostNetwork"], spec["hostIPC"], "hostPID" in spec) == (True, True, False)
    security = spec["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert security["allowPrivilegeEscalation"] is False
    privileged = rendered(hostPID=True, engine={"securityContext": {"privileged": True}})
    assert (privileged["hostPID"], privileged["containers"][0]["securityContext"]["privileged"]) == (True, True)


@pytest.mark.parametrize(
    "unset",
    [
        {},
        {"volumes": [], "hostNetwork": False, "hostIPC": False, "hostPID": False},
        {"engine": {"envFrom": [], "volumeMounts": [], "securityContext": {"capabilities": {}}}},
        {"engine": {"securityContext": {"capabilities": {"add": []}}}},
    ],
    ids=["nothing", "pod", "container", "capabilities"],
)
def test_what_nobody_set_changes_no_revision(unset: dict[str, Any]) -> None:
    """Check that empty values and the schema's defaults give the same revision, so that pods of an earlier operator stay."""
    assert revision(**unset) == revision() == "05201e9e-08071b6f"


@pytest.mark.parametrize(
    "field",
    [
        {"serviceAccountName": "a"},
        {"volumes": [VOLUMES[0]]},
        {"hostNetwork": True},
        {"engine": {"envFrom": [ENV_FROM[0]]}},
        {"engine": {"env": [ENV[1]]}},
        {"engine": {"securityContext": {"privileged": True}}},
    ],
    ids=str,
)
def test_a_change_of_each_makes_new_pods(field: dict[str, Any]) -> None:
    assert revision(**field) != revision()


def revision(**spec: Any) -> str:
    return template_of(made(**spec), default_image="worker:1").revision
