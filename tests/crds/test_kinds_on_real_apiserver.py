# SPDX-License-Identifier: Apache-2.0
"""Both kinds on a real API server, as people and autoscalers use them: defaults, scale, columns, explanations."""

import json
from pathlib import Path

import pytest
import yaml

from support.apiserver.kind_api import Api, dd, lora
from support.apiserver.real_apiserver import kubectl

pytestmark = pytest.mark.apiserver


FILLED_IN = """
model: {source: {path: /m}, pipeline: Auto, dtype: Auto, cache: {emptyDir: {}}}
engine:
  {pullPolicy: IfNotPresent, maxBatchSize: 8, batchWindowMilliseconds: 0, exact: false, promptCacheSize: 32, vaeTiling: false,
   loadFormat: Default, compile: Disabled, offload: None, quantization: None, stepCache: None,
   securityContext: {capabilities: {}}}
replicas: 1
parallelism: {ranksPerReplica: 1, tensor: 1, sequence: 1, shard: 1}
resources: {sharedMemory: 8Gi}
lora: {enabled: true, maxLoaded: 4, maxRank: 64, onMissing: Reject, drainTimeoutSeconds: 120, loadTimeoutSeconds: 120}
sleep:
  {policy: AlwaysAwake, level: HostMemory, idleSeconds: 300, minAwake: 0, minAwakeSeconds: 60, drain: Wait,
   drainTimeoutSeconds: 300, wakeTimeoutSeconds: 120}
coldRequests: {mode: Hold, maxHeld: 64, holdTimeoutSeconds: 300}
startup: {timeoutSeconds: 1800, warmup: {enabled: true, steps: 1}}
service: {type: ClusterIP, port: 80}
requests: {defaults: {}, limits: {maxSteps: 200, maxPixels: 4194304, maxImages: 10, maxQueued: 512, maxQueuedSeconds: 3600,
  maxQueuedBytes: 1073741824, maxConnections: 900}}
rollout: {type: RollingUpdate, progressDeadlineSeconds: 1800}
replicaRecovery: {backoffSeconds: 10, backoffMaxSeconds: 300, failureThreshold: 5, windowSeconds: 3600}
drain: {timeoutSeconds: 300}
control: {networkPolicy: Managed}
networkPolicy: {data: Open}
scheduling: {}
securityContext: {identity: Image}
podMetadata: {}
podDisruptionBudget: Auto
suspend: false
hostIPC: false
hostNetwork: false
hostPID: false
"""


def test_the_schema_fills_in_every_default_so_that_yaml_shows_what_will_happen(api: Api) -> None:
    assert api.create(dd())["spec"] == yaml.safe_load(FILLED_IN)
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
    hub = {"repo": "org/name", "tokenSecretRef": {"name": "s"}}
    assert api.create(lora(source={"huggingFace": hub}))["spec"]["source"] == {
        "huggingFace": {"repo": "org/name", "revision": "main", "tokenSecretRef": {"name": "s", "key": "token"}}
    }


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
        assert header.split() == ["NAME", "READY", "DESIRED", "AWAKE", "UP-TO-DATE", "REASON", "MODEL", "REVISION", "ADAPTERS", "AGE"]
        assert row.split()[:2] == ["shown", "1"]
        assert "shown" in kubectl(kubeconfig_of_apiserver, "get", "diffusion", "-o", "name")
    finally:
        kubectl(kubeconfig_of_apiserver, "delete", "dd", "shown", "--wait=false")


def test_an_explanation_exists_for_the_fields(kubeconfig_of_apiserver: Path) -> None:
    assert "OnIdle frees it after idleSeconds" in " ".join(kubectl(kubeconfig_of_apiserver, "explain", "dd.spec.sleep.policy").split())
