# SPDX-License-Identifier: Apache-2.0
"""No deployment gets the operator's key or account, and none gets access to its node unless that is allowed."""

from typing import Any

import msgspec
import pytest

from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.settings import OperatorPods
from support.operator.rig import Rig, deployment

KEY = "operator-key"
MOUNTS: list[dict[str, Any]] = [
    {"lora": {"secrets": [KEY]}},
    {"service": {"apiKeySecret": {"name": KEY, "key": "key"}}},
    {"model": {"source": {"huggingFace": {"repo": "org/name", "tokenSecretRef": {"name": KEY}}}}},
    {"volumes": [{"name": "stolen", "secret": {"secretName": KEY}}]},
    {"engine": {"env": [{"name": "STOLEN", "valueFrom": {"secretKeyRef": {"name": KEY, "key": "key"}}}]}},
    {"engine": {"envFrom": [{"secretRef": {"name": KEY}}]}},
]
NAMES = ["lora.secrets", "service.apiKeySecret", "model.source", "volumes", "env", "envFrom"]
HOST_ACCESS: dict[str, dict[str, Any]] = {
    "hostNetwork": {"hostNetwork": True},
    "hostIPC": {"hostIPC": True},
    "hostPID": {"hostPID": True},
    "the hostPath of volume disk": {"volumes": [{"name": "disk", "hostPath": {"path": "/"}}]},
    "engine.securityContext.privileged": {"engine": {"securityContext": {"privileged": True}}},
    "engine.securityContext.capabilities.add": {"engine": {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}},
}


def rig_in(namespace: str) -> Rig:
    """Return a rig whose operator runs in this namespace; the deployments are in `default`."""
    rig = Rig()
    own = OperatorPods(namespace=namespace, labels={})
    rig.runtime.settings = msgspec.structs.replace(rig.runtime.settings, operator_key_secret=KEY, operator_pods=own)
    return rig


@pytest.mark.parametrize("spec", MOUNTS, ids=NAMES)
async def test_a_deployment_in_the_operators_namespace_cannot_mount_its_key(spec: dict[str, Any]) -> None:
    rig = rig_in("default")
    rig.cluster.put(deployment(**spec))
    await rig.run(60)
    assert rig.cluster.names(POD) == []
    assert rig.condition("Ready") == ("False", "PodsRefused")
    assert "the Secret operator-key is the operator's own key" in rig.message("Ready")
    rig.cluster.change(
        DEPLOYMENT, "d", lambda changed: changed.update(deployment()["spec"] | {"lora": {}, "service": {}, "volumes": [], "engine": {}})
    )
    await rig.run(60)
    assert len(rig.cluster.names(POD)) == 1


async def test_a_running_deployment_that_asks_for_the_key_goes_on_with_what_it_had() -> None:
    rig = rig_in("default")
    rig.cluster.put(deployment())
    await rig.run()
    rig.start_all()
    await rig.run()
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(MOUNTS[0]))
    await rig.run(60)
    assert rig.cluster.names(POD) == ["d-0-0"]
    assert rig.condition("Ready") == ("True", "Serving")
    assert rig.condition("Progressing") == ("False", "TemplateInvalid")


async def test_a_secret_of_the_same_name_in_another_namespace_is_the_teams_own() -> None:
    rig = rig_in("operators")
    rig.cluster.put(deployment(**MOUNTS[0]))
    await rig.run()
    assert rig.cluster.names(POD) == ["d-0-0"]


async def test_a_deployment_in_the_operators_namespace_cannot_have_its_account() -> None:
    rig = rig_in("default")
    rig.runtime.settings = msgspec.structs.replace(rig.runtime.settings, operator_service_account="operator")
    rig.cluster.put(deployment(serviceAccountName="operator"))
    await rig.run(30)
    assert rig.cluster.names(POD) == []
    assert "the ServiceAccount operator is the operator's own" in rig.message("Ready")
    rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(serviceAccountName="team"))
    await rig.run(30)
    assert rig.cluster.names(POD) == ["d-0-0"]


async def test_an_account_of_the_same_name_in_another_namespace_is_the_teams_own() -> None:
    rig = rig_in("operators")
    rig.runtime.settings = msgspec.structs.replace(rig.runtime.settings, operator_service_account="operator")
    rig.cluster.put(deployment(serviceAccountName="operator"))
    await rig.run()
    assert rig.cluster.names(POD) == ["d-0-0"]


@pytest.mark.parametrize("field", HOST_ACCESS)
async def test_access_to_the_node_is_refused_by_name_unless_it_is_allowed(field: str) -> None:
    rig = Rig()
    rig.cluster.put(deployment(**HOST_ACCESS[field]))
    await rig.run(30)
    assert rig.cluster.names(POD) == []
    assert rig.condition("Ready") == ("False", "PodsRefused")
    assert rig.message("Ready").startswith(f"{field} would give the pod access to its node")
    rig.runtime.settings = msgspec.structs.replace(rig.runtime.settings, allow_host_access=True)
    await rig.run(120)
    assert rig.cluster.names(POD) == ["d-0-0"]
