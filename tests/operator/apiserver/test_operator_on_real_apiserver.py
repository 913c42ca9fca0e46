# SPDX-License-Identifier: Apache-2.0
"""The whole operator process, kopf and client library included, against a real API server. Without a kubelet pods stay Pending."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf
import pytest

from diffusion_operator.api.adapter import (
    AdapterStatus,
    ErrorStatus,
    InstanceState,
    InstanceStatus,
    LoRAAdapter,
    OwnerStatus,
    ResolvedStatus,
    UsageStatus,
)
from diffusion_operator.api.meta import Condition, ConditionStatus
from diffusion_operator.api.names import ADAPTER
from diffusion_operator.cluster import connect
from diffusion_operator.handlers import Process, build_kopf_settings, build_registry
from diffusion_operator.reconcile.status_write import encode_status
from diffusion_operator.reconcile.store.parsing import parse
from diffusion_operator.settings import Settings
from support.apiserver.real_apiserver import kubectl
from support.operator.mounted import mounted_desired
from tools.devcluster import programs

pytestmark = pytest.mark.apiserver
DEADLINE_S = 120.0


@asynccontextmanager
async def running_operator(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, *namespaces: str) -> AsyncIterator[None]:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    settings = Settings(engine_image="worker:1", operator_key=b"k" * 32, namespaces=namespaces)
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(
        kopf.operator(
            registry=build_registry(Process(settings)),
            settings=build_kopf_settings(),
            standalone=True,
            namespaces=namespaces,
            clusterwide=not namespaces,
            ready_flag=ready,
            stop_flag=stop,
        )
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            await ready.wait()
        yield
    finally:
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await task


async def eventually(look: Callable[[], Awaitable[Any]]) -> Any:
    """Return the first truthy result of `look`; TimeoutError after DEADLINE_S."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await look()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return found


class Namespace:
    def __init__(self, kubeconfig: Path, name: str) -> None:
        self._kubeconfig = kubeconfig
        self.name = name

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return await asyncio.to_thread(kubectl, self._kubeconfig, "-n", self.name, *arguments, stdin=stdin)

    async def create(self, document: dict[str, Any]) -> None:
        await self.kubectl("create", "-f", "-", stdin=json.dumps(document))

    async def get(self, *what: str) -> Any:
        output = await self.kubectl("get", *what, "-o", "json", "--ignore-not-found", "--show-managed-fields")
        return json.loads(output) if output else None

    async def list(self, kind: str) -> list[Any]:
        return ((await self.get(kind)) or {"items": []})["items"]

    async def reason(self, kind: str, name: str, condition: str = "Ready") -> str | None:
        conditions = (await self.get(kind, name)).get("status", {}).get("conditions", [])
        return next((one["reason"] for one in conditions if one["type"] == condition), None)


@pytest.fixture
async def namespace(kubeconfig_of_apiserver: Path, request: pytest.FixtureRequest) -> Namespace:
    name = f"t{abs(hash(request.node.name)) % 10**8}"
    await asyncio.to_thread(kubectl, kubeconfig_of_apiserver, "create", "namespace", name)
    return Namespace(kubeconfig_of_apiserver, name)


def deployment(**spec: Any) -> dict[str, Any]:
    base = {"model": {"source": {"path": "/models/digits"}}, "resources": {"gpuResourceName": "none"}}
    return {"apiVersion": "diffusion-operator.dev/v1alpha1", "kind": "DiffusionDeployment", "metadata": {"name": "d"}, "spec": base | spec}


def adapter(**spec: Any) -> dict[str, Any]:
    base = {"deploymentRef": {"name": "d"}, "source": {"path": "/loras/x"}}
    return {"apiVersion": "diffusion-operator.dev/v1alpha1", "kind": "LoRAAdapter", "metadata": {"name": "x"}, "spec": base | spec}


async def test_children_are_made_repaired_and_scaled_and_nothing_is_written_to_the_object(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_operator(kubeconfig_of_apiserver, monkeypatch, namespace.name):
        await namespace.create(deployment(replicas=2))
        pods = await eventually(lambda: _count(namespace, "pods", 2))
        assert sorted(pod["metadata"]["name"] for pod in pods) == ["d-0-0", "d-1-0"]
        assert (await namespace.get("service", "d"))["spec"]["ports"][0]["port"] == 80
        assert (await namespace.get("configmap", "d-desired"))["data"].keys() == {"desired.json"}
        assert (await namespace.get("secret", "d-control"))["data"].keys() == {"token"}
        await eventually(lambda: _is(namespace.reason("dd", "d"), "Starting"))

        await namespace.kubectl("delete", "pod", "d-0-0", "--force", "--grace-period=0")
        await eventually(lambda: namespace.get("pod", "d-0-1"))
        await namespace.kubectl("delete", "configmap", "d-desired")
        await eventually(lambda: namespace.get("configmap", "d-desired"))
        await namespace.kubectl("scale", "dd", "d", "--replicas=1")
        await eventually(lambda: _count(namespace, "pods", 1))

        found = await namespace.get("dd", "d")
        assert "annotations" not in found["metadata"]
        assert "finalizers" not in found["metadata"]
        managers = {(entry["manager"], entry.get("subresource")) for entry in found["metadata"]["managedFields"]}
        assert ("diffusion-operator", "status") in managers
        assert ("diffusion-operator", None) not in managers, "the operator never writes spec or metadata"


async def test_changes_by_somebody_else_are_events_and_those_by_the_operator_are_not(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that another client's changes of children are Events, and that the operator's own changes and the API server's defaults are
    none."""

    async def repairs() -> list[str]:
        return sorted(event["note"] for event in await namespace.list("events.events.k8s.io") if event["reason"] == "Repaired")

    async def patch(kind: str, name: str, **change: Any) -> None:
        await namespace.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change))

    async with running_operator(kubeconfig_of_apiserver, monkeypatch, namespace.name):
        await namespace.create(deployment(replicas=2))
        await eventually(lambda: _count(namespace, "pods", 2))
        await eventually(lambda: namespace.get("pdb", "d"))
        await patch("dd", "d", spec={"service": {"port": 8080}, "sleep": {"policy": "Asleep"}, "replicas": 3})
        await eventually(lambda: _count(namespace, "pods", 3))
        await patch("dd", "d", spec={"service": {"port": 80}, "sleep": {"policy": "AlwaysAwake"}, "replicas": 2})
        await eventually(lambda: _count(namespace, "pods", 2))
        await namespace.kubectl("annotate", "service", "d", "somebody.example/else=1")
        assert await repairs() == []

        await namespace.kubectl("label", "pod", "d-0-0", "diffusion-operator.dev/deployment-")
        await eventually(lambda: _if_many(repairs(), 1))
        await patch("service", "d", spec={"selector": {"app": "mine"}})
        await namespace.kubectl("delete", "pdb", "d")
        told = await eventually(lambda: _if_many(repairs(), 3))
        assert told == [
            "PodDisruptionBudget d was deleted or its labels were removed by another client; the operator repairs it",
            "Service d was changed: spec.selector by another client; the operator repairs it",
            "labels of pod d-0-0 were changed by another client; the operator repairs it",
        ]
        assert "app" not in (await namespace.get("service", "d"))["spec"]["selector"]
        await namespace.kubectl("delete", "pod", "d-1-0", "--force", "--grace-period=0")
        assert "pod d-1-0 was deleted by another client; the operator repairs it" in await eventually(lambda: _if_many(repairs(), 4))
        assert sorted(pod["metadata"]["name"] for pod in await namespace.list("pods")) == ["d-0-0", "d-1-1"]


async def _if_many(look: Awaitable[list[str]], count: int) -> list[str] | None:
    found = await look
    return found if len(found) >= count else None


async def test_an_adapter_has_a_true_status_before_its_deployment_with_it_and_after_it(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_operator(kubeconfig_of_apiserver, monkeypatch):
        await namespace.create(adapter())
        await eventually(lambda: _is(namespace.reason("lora", "x"), "DeploymentMissing"))
        await namespace.create(deployment())
        await eventually(lambda: _is(namespace.reason("lora", "x"), "Loading"))
        desired = await eventually(lambda: _desired(namespace))
        (wanted,) = desired["adapters"]
        assert (wanted["name"], wanted["source"], wanted["digest"]) == ("x", {"path": "/loras/x"}, None)
        await namespace.kubectl("delete", "dd", "d", "--wait=true", "--timeout=5s")
        await eventually(lambda: _is(namespace.reason("lora", "x", "Accepted"), "DeploymentNotFound"))
        await namespace.kubectl("delete", "lora", "x", "--wait=true", "--timeout=5s")


async def test_events_are_written_once(kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_operator(kubeconfig_of_apiserver, monkeypatch, namespace.name):
        await namespace.create(deployment(lora={"maxLoaded": 0}))
        await namespace.create(adapter())
        events = await eventually(lambda: _events(namespace, "AdapterRejected"))
        assert "spec.lora.maxLoaded" in events[0]["note"]
        await namespace.kubectl("scale", "dd", "d", "--replicas=2")
        await eventually(lambda: _count(namespace, "pods", 2))
        assert len(await _events(namespace, "AdapterRejected")) == 1


async def test_what_a_source_needs_is_mounted_or_the_adapter_is_refused(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"huggingFace": {"repo": "org/style", "file": "a.safetensors", "tokenSecretRef": {"name": "hub"}}}
    async with running_operator(kubeconfig_of_apiserver, monkeypatch, namespace.name):
        await namespace.create(deployment())
        await namespace.create(adapter(source=source, residency="OnDemand", priority=3, components=["Transformer"]))
        await eventually(lambda: _is(namespace.reason("lora", "x", "Accepted"), "SecretNotMounted"))
        await namespace.kubectl("patch", "dd", "d", "--type=merge", "-p", json.dumps({"spec": {"lora": {"secrets": ["hub"]}}}))
        await eventually(lambda: _is(namespace.reason("lora", "x", "Accepted"), "Accepted"))
        (wanted,) = (await eventually(lambda: _desired(namespace)))["adapters"]
        assert wanted["source"]["huggingFace"]["revision"] == "main", "the schema's default"
        assert (wanted["residency"], wanted["priority"], wanted["components"]) == ("OnDemand", 3, ["transformer", "transformer_2"])


async def test_the_schema_takes_every_field_of_a_status_and_gives_it_back(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_apiserver))
    await namespace.create(adapter())
    async with await connect() as cluster:
        version = (await cluster.get(ADAPTER, namespace.name, "x") or {})["metadata"]["resourceVersion"]
        await cluster.apply_status(ADAPTER, namespace.name, "x", status=encode_status(FULL_STATUS), version=version)
        found = parse(await cluster.get(ADAPTER, namespace.name, "x") or {}, LoRAAdapter)
    assert found.status == FULL_STATUS


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FULL_STATUS = AdapterStatus(
    observed_generation=1,
    deployment_uid="u",
    resolved=ResolvedStatus(
        source="hf://org/style@main/a.safetensors (Transformer, Kohya, rank 16)",
        revision="c0ffee",
        digest="sha256:" + "a" * 64,
        size_bytes=2**33,
        rank=16,
        alpha="8",
        modules=400,
        components=("Transformer", "TextEncoder"),
        format="Kohya",
        base_model_hint="org/base",
        resolved_at=NOON,
    ),
    desired_replicas=8,
    loaded_replicas=1,
    failed_replicas=1,
    deferred_replicas=1,
    owner=OwnerStatus(served_name="x", conflict_with="y"),
    usage=UsageStatus(requests_total=2**40, last_request_time=NOON),
    replica_instances=tuple(
        InstanceStatus(
            replica=replica,
            state=state,
            pod_uid="p",
            boot_id="b",
            incarnation=3,
            ranks_loaded=1,
            ranks_total=2,
            digest="sha256:" + "b" * 64,
            fetched_bytes=2**32,
            total_bytes=2**33,
            attempts=4,
            next_retry_time=NOON,
            last_error=ErrorStatus(code="NetworkError", message="no byte for 60 s", retryable=True),
        )
        for replica, state in enumerate(InstanceState)
    ),
    conditions=(
        Condition(
            type="Ready",
            status=ConditionStatus.TRUE,
            last_transition_time=NOON,
            reason="CachedOnDemand",
            message="loaded on 0 of 1 replicas",
            observed_generation=1,
        ),
    ),
)


async def _count(namespace: Namespace, kind: str, number: int) -> list[Any] | None:
    found = await namespace.list(kind)
    return found if len(found) == number else None


async def _is(answer: Awaitable[str | None], expected: str) -> bool:
    return await answer == expected


async def _desired(namespace: Namespace) -> Any:
    maps = {one["metadata"]["name"]: one for one in await namespace.list("configmap")}
    content = mounted_desired(maps.get, "d")
    return content if content["adapters"] else None


async def _events(namespace: Namespace, reason: str) -> list[Any]:
    found = await namespace.list("events.events.k8s.io")
    return [event for event in found if event["reason"] == reason]


POLICY = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "no-variable-b"},
    "spec": {
        "matchConstraints": {
            "resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
        },
        "validations": [
            {"expression": "object.spec.containers.all(c, !c.env.exists(e, e.name == 'B'))", "message": "variable B is not allowed here"}
        ],
    },
}


async def forbid_variable_b(namespace: Namespace) -> None:
    """Deny pods with an environment variable B, in this namespace only. Return once the API server enforces the policy."""
    labels = {"kubernetes.io/metadata.name": namespace.name}
    binding = {
        "apiVersion": POLICY["apiVersion"],
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "no-variable-b"},
        "spec": {
            "policyName": "no-variable-b",
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": labels}},
        },
    }
    container = {"name": "c", "image": "i", "env": [{"name": "B", "value": "1"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tried"}, "spec": {"containers": [container]}}
    await namespace.create(POLICY)
    await namespace.create(binding)

    async def refused() -> bool:
        try:
            await namespace.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        except AssertionError as error:
            return "variable B is not allowed here" in str(error)
        return False

    await eventually(refused)


async def test_an_edit_that_no_pod_can_be_made_of_takes_no_replica_away(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_operator(kubeconfig_of_apiserver, monkeypatch, namespace.name):
        await namespace.create(deployment(replicas=2))
        before = {pod["metadata"]["uid"] for pod in await eventually(lambda: _count(namespace, "pods", 2))}

        async def progressing(reason: str) -> str | None:
            conditions = (await namespace.get("diffusiondeployment", "d")).get("status", {}).get("conditions", [])
            return next((one["message"] for one in conditions if (one["type"], one["reason"]) == ("Progressing", reason)), None)

        async def patch(spec: dict[str, Any]) -> None:
            await namespace.kubectl("patch", "diffusiondeployment", "d", "--type=merge", "-p", json.dumps({"spec": spec}))

        term = {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "In"}]}}
        await patch({"scheduling": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}}})
        told = await eventually(lambda: progressing("TemplateInvalid"))
        assert "422" in told
        assert "must be specified when `operator` is 'In'" in told
        await asyncio.sleep(3)
        assert {pod["metadata"]["uid"] for pod in await namespace.list("pods")} == before
        events = [one for one in await namespace.list("events.events.k8s.io") if one["reason"] == "TemplateInvalid"]
        assert len(events) == 1
        assert "must be specified when `operator` is 'In'" in events[0]["note"]

        await forbid_variable_b(namespace)
        await patch({"scheduling": None, "engine": {"env": [{"name": "B", "value": "1"}]}})
        await eventually(lambda: _policy_told(progressing))
        assert {pod["metadata"]["uid"] for pod in await namespace.list("pods")} == before
        await patch({"engine": {"env": [{"name": "C", "value": "1"}]}})
        await eventually(lambda: _replaced(namespace, before))


async def _policy_told(progressing: Callable[[str], Awaitable[str | None]]) -> bool:
    return "variable B is not allowed here" in (await progressing("TemplateInvalid") or "")


async def _replaced(namespace: Namespace, before: set[str]) -> bool:
    now = {pod["metadata"]["uid"] for pod in await namespace.list("pods") if not pod["metadata"].get("deletionTimestamp")}
    return len(now) == 2 and not now & before


QUEUED, GATE, HELD = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/admission", "kueue.x-k8s.io/managed"


async def act_as_kueue(namespace: Namespace) -> None:
    """Stand in for Kueue's webhook in this namespace, by a policy that adds its scheduling gate and finalizer to pods with a queue label.

    Return once the API server applies the policy.
    """
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    metadata, spec = (
        f'Object.metadata{{finalizers: ["{HELD}"]}}',
        f'Object.spec{{schedulingGates: [Object.spec.schedulingGates{{name: "{GATE}"}}]}}',
    )
    policy = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {"resourceRules": rules},
        "matchConditions": [{"name": "queued", "expression": f"has(object.metadata.labels) && '{QUEUED}' in object.metadata.labels"}],
        "mutations": [
            {
                "patchType": "ApplyConfiguration",
                "applyConfiguration": {"expression": f"Object{{metadata: {metadata}, spec: {spec}}}"},
            }
        ],
    }
    selected = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}}
    for kind, made in (("", policy), ("Binding", {"policyName": "as-kueue", "matchResources": selected})):
        about = {"apiVersion": POLICY["apiVersion"], "kind": f"MutatingAdmissionPolicy{kind}", "metadata": {"name": "as-kueue"}}
        await namespace.create(about | {"spec": made})
    named = {"name": "tried", "labels": {QUEUED: "q"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": {"containers": [{"name": "c", "image": "i"}]}}

    async def gates() -> bool:
        return GATE in await namespace.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod))

    await eventually(gates)


async def test_a_replica_waits_in_a_queue_of_kueue_and_one_that_ended_there_is_replaced(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await act_as_kueue(namespace)
    async with running_operator(kubeconfig_of_apiserver, monkeypatch, namespace.name):
        await namespace.create(deployment(podMetadata={"labels": {QUEUED: "q"}}))
        await eventually(lambda: _is(namespace.reason("dd", "d", "Scheduled"), "WaitingForQuota"))
        (pod,) = await namespace.list("pods")
        assert pod["spec"]["schedulingGates"] == [{"name": GATE}]

        await namespace.kubectl("patch", "pod", "d-0-0", "--type=json", "-p", '[{"op": "remove", "path": "/spec/schedulingGates"}]')
        await eventually(lambda: _is(namespace.reason("dd", "d", "Scheduled"), "Scheduling"))
        ended = {"status": {"phase": "Failed", "reason": "Evicted"}}
        await namespace.kubectl("patch", "pod", "d-0-0", "--subresource=status", "--type=merge", "-p", json.dumps(ended))
        await namespace.kubectl("delete", "pod", "d-0-0", "--grace-period=0", "--force", "--wait=false")
        await eventually(lambda: namespace.get("pod", "d-0-1"))
        held = await namespace.get("pod", "d-0-0")
        assert held["metadata"]["deletionTimestamp"] and held["metadata"]["finalizers"] == [HELD]
        await namespace.kubectl("patch", "pod", "d-0-0", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')


async def test_what_a_spec_adds_to_a_pod_is_in_the_pod_that_the_api_server_made(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    volumes = [{"name": "ca", "configMap": {"name": "authority", "optional": True}}, {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}]
    env = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}, {"name": "PLAIN", "value": "v"}]
    engine = {"env": env, "envFrom": [{"secretRef": {"name": "s", "optional": True}}], "volumeMounts": [{"name": "ca", "mountPath": "/ca"}]}
    async with running_operator(kubeconfig_of_apiserver, monkeypatch, namespace.name):
        await namespace.kubectl("create", "serviceaccount", "team")
        await namespace.create(deployment(serviceAccountName="team", volumes=volumes, engine=engine, rollout={"maxUnavailable": "50%"}))
        pod = await eventually(lambda: namespace.get("pod", "d-0-0"))
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["serviceAccountName"] == "team"
        assert [one for one in container["env"] if one["name"] in ("KEY", "PLAIN")] == env
        assert container["envFrom"] == engine["envFrom"]
        assert {"name": "ca", "mountPath": "/ca"} in container["volumeMounts"]
        assert {"ca", "scratch"} <= {one["name"] for one in pod["spec"]["volumes"]}
        assert pod["metadata"]["annotations"]["diffusion-operator.dev/owner-uid"] == (await namespace.get("dd", "d"))["metadata"]["uid"]


async def test_lists_of_a_spec_merge_by_name(kubeconfig_of_apiserver: Path, namespace: Namespace) -> None:
    """Apply the deployment as two clients, each with a variable and a volume of its own, and check that the spec has both."""
    for manager in ("one", "two"):
        spec = {"volumes": [{"name": manager, "emptyDir": {}}], "engine": {"env": [{"name": manager.upper(), "value": "v"}]}}
        await namespace.kubectl("apply", "--server-side", f"--field-manager={manager}", "-f", "-", stdin=json.dumps(deployment(**spec)))
    spec = (await namespace.get("dd", "d"))["spec"]
    assert [one["name"] for one in spec["volumes"]] == ["one", "two"]
    assert [one["name"] for one in spec["engine"]["env"]] == ["ONE", "TWO"]


OPERATIONS = Path(__file__).resolve().parents[3] / "docs" / "operations.md"


async def test_the_commands_of_the_page_wait_for_a_rollout_and_go_back(
    kubeconfig_of_apiserver: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    section = OPERATIONS.read_text().partition("\n### Wait for a rollout, go back, see its history\n")[2].partition("\n### ")[0]
    wait, degraded, back, history = re.findall(r"```bash\n(.*?)```", section, re.S)
    program = f"{programs.kube() / 'kubectl'} --kubeconfig {kubeconfig_of_apiserver} -n {namespace.name}"

    async def run(script: str) -> str:
        (tmp_path / "digits.yaml").write_text(json.dumps(deployment(replicas=replicas) | {"metadata": {"name": "digits"}}))
        quick = script.replace("--timeout=45m", "--timeout=3s")
        shell = ["bash", "-euc", f'kubectl() {{ {program} "$@"; }}\n{quick}']
        done = await asyncio.to_thread(subprocess.run, shell, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    async with running_operator(kubeconfig_of_apiserver, monkeypatch, namespace.name):
        replicas = 0  # without a kubelet only what has no replicas is ever complete
        assert (await run(wait)).count("condition met") == 2
        assert "False AsExpected" in await run(degraded)
        saved, put_back = back.splitlines()
        assert await run(saved) == ""
        replicas = 1
        waited = await run(wait)
        assert waited.count("condition met") == 1, waited  # the change was seen, and the rollout before it counts no more
        assert "timed out" in waited
        assert "patched" in await run(put_back)
        assert (await run(wait.partition("\n")[2])).count("condition met") == 2
        seen = await run(history)
        assert "PodDeleted" in seen, seen
