# SPDX-License-Identifier: Apache-2.0
"""A deployment as P12 applies it, and its children as the operator makes them."""

from datetime import UTC, datetime
from typing import Any

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, NETWORK_POLICY, POD, SECRET, SERVICE, Kind
from diffusion_operator.plan.deployment import plan_deployment
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.pods import read_pod
from diffusion_operator.plan.replicas.revision import template_of
from diffusion_operator.reconcile.status_write import encode_status
from diffusion_operator.reconcile.store.parsing import parse
from diffusion_operator.render.control_secret import control_secret
from diffusion_operator.render.desired_config import desired_config
from diffusion_operator.render.disruption_budget import disruption_budget
from diffusion_operator.render.network_policy import network_policy
from diffusion_operator.render.pod import pod
from diffusion_operator.render.service import service
from diffusion_operator.settings import OperatorPods, Settings

IMAGE = "worker:1"
KEY = b"k" * 32
AT_ONCE = Settings(engine_image=IMAGE, operator_key=KEY).parallel_reconciles
OPERATOR_PODS = OperatorPods(namespace="operators", labels={"app": "operator"})
CHILD_KINDS: tuple[Kind, ...] = (SECRET, CONFIG_MAP, SERVICE, NETWORK_POLICY, DISRUPTION_BUDGET, POD)


def deployment(name: str, namespace: str) -> dict[str, Any]:
    """Build the manifest of a deployment of a single replica without a GPU."""
    metadata = {"name": name, "namespace": namespace}
    spec = {"model": {"source": {"path": "/models/digits"}}, "resources": {"gpuResourceName": "none"}, "replicas": 1}
    return {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "metadata": metadata, "spec": spec}


def children(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of the six children that the operator makes for a deployment, in its order: the pod is the last.

    The deployment's manifest is as an API server returns it, with a UID.
    """
    owner = parse(manifest, DiffusionDeployment)
    template = template_of(owner, default_image=IMAGE)
    own = [control_secret(owner, key=KEY), desired_config(owner), service(owner)]
    guards = [network_policy(owner, OPERATOR_PODS), disruption_budget(owner)]
    return [*own, *guards, pod(owner, template, index=0, incarnation=0)]


def with_identity(manifest: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a copy of a manifest with the UID, creation time and generation that an API server would give it; the UID is from `number`."""
    identity = {"uid": f"00000000-0000-0000-0000-{number:012}", "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}
    return manifest | {"metadata": manifest["metadata"] | identity}


def first_status(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the status that the operator writes for a deployment after it has created the pod, while no node has it."""
    owner = parse(manifest, DiffusionDeployment)
    made = with_identity(children(manifest)[-1], 1)
    observed = Observed(deployment=owner, default_image=IMAGE, pods=(read_pod(made, index=0, incarnation=0),))
    return encode_status(plan_deployment(observed, datetime.now(UTC)).status)
