# SPDX-License-Identifier: Apache-2.0
"""The operator without kopf, in virtual time: real reconciles over the fake cluster and scripted workers.

Changes in the cluster wake keys as the handlers do, and requeue times are kept. `run(seconds)` advances the time.

Real: every reconcile and plan. Not real: the API server, which is FakeCluster, the workers, the clock and the queue.
"""

import itertools
from datetime import datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, LABEL_DEPLOYMENT, LABEL_ROUTABLE, POD
from diffusion_operator.errors import OperatorError
from diffusion_operator.metrics import PrometheusMeter
from diffusion_operator.reconcile.dispatch import reconcile
from diffusion_operator.reconcile.keyed_queue import Key
from diffusion_operator.reconcile.runtime import Runtime, adapter_key, deployment_key
from diffusion_operator.reconcile.workers.calls import WorkerCalls
from diffusion_operator.settings import OperatorPods, Settings
from support.apiserver.kind_api import dd, lora
from support.operator.fake_cluster import EPOCH, FakeCluster, terminated
from support.operator.looking_watches import LookingWatches
from support.operator.mounted import mounted_desired
from support.operator.scripted_workers import ScriptedWorker, ScriptedWorkers

JOIN_S = 0.05
LOOK_S = 0.5
RETRY_S = 1.0
OPERATOR_PODS = OperatorPods(namespace="operators", labels={"app.kubernetes.io/name": "diffusion-operator"})


def deployment(name: str = "d", **spec: Any) -> dict[str, Any]:
    return dd(name, **{"model": {"source": {"path": "/models/digits"}}, "resources": {"gpuResourceName": "none"}} | spec)


def adapter(name: str = "x", path: str = "/loras/x", deployment: str = "d", **spec: Any) -> dict[str, Any]:
    return lora(name, **{"deploymentRef": {"name": deployment}, "source": {"path": path}} | spec)


class Rig:
    def __init__(self) -> None:
        self.now = EPOCH
        self.cluster = FakeCluster(clock=self.clock)
        self.cluster.on_change = self._changed
        self.workers = ScriptedWorkers()
        self._due: dict[Key, datetime] = {}
        self._look_at = EPOCH
        self._boots = itertools.count(1)
        self.errors: list[str] = []
        self.survives: type[Exception] = OperatorError
        """Errors that end a pass only. The real process survives every Exception, but a test fails at an unexpected one."""
        self.keys: tuple[bytes, ...] = (b"k" * 32,)
        """The operator's keys, the current one first; a change takes effect at its restart."""
        self.runtime = self._new_runtime()

    def clock(self) -> datetime:
        return self.now

    def _new_runtime(self) -> Runtime:
        settings = Settings(engine_image="worker:1", operator_key=self.keys[0], previous_keys=self.keys[1:], operator_pods=OPERATOR_PODS)
        self.registry = CollectorRegistry()
        meter = PrometheusMeter(self.registry)
        runtime = Runtime(cluster=self.cluster, workers=self.workers, settings=settings, clock=self.clock, wake=self._wake, meter=meter)
        self.watches = runtime.watches = LookingWatches(runtime)
        self.calls = runtime.calls = WorkerCalls(runtime)
        return runtime

    def restart_operator(self) -> None:
        """Restart the operator: its memory is lost, and it looks at every object again."""
        self.runtime = self._new_runtime()
        for kind in (DEPLOYMENT, ADAPTER):
            for name in self.cluster.names(kind):
                self._wake(Key(kind.kind, "default", name))

    async def run(self, seconds: float = 5.0) -> None:
        end = self.now + timedelta(seconds=seconds)
        await self.watches.look()
        while (when := min([self._look_at, *self._due.values()])) <= end:
            self.now = max(self.now, when)
            for key in [key for key, due in self._due.items() if due <= self.now]:
                del self._due[key]
                await self._reconcile(key)
            await self.watches.look()
            self._look_at = self.now + timedelta(seconds=LOOK_S)
        self.now = end

    async def _reconcile(self, key: Key) -> None:
        try:
            result = await reconcile(self.runtime, key)
            resync_s = self.runtime.settings.resync_s
            again_s = None if result.gone else resync_s if result.requeue_after_s is None else result.requeue_after_s
            if result.failure is not None:
                again_s = min(RETRY_S, again_s or RETRY_S)
                self._survive(result.failure)
        except self.survives as error:
            self.errors.append(str(error))
            again_s = RETRY_S
        except BaseException:
            await self.calls.close()  # a process that ends takes its calls with it
            raise
        await self.calls.settled()
        if again_s is not None:
            self._due.setdefault(key, self.now + timedelta(seconds=again_s))

    def _survive(self, failure: Exception) -> None:
        if not isinstance(failure, self.survives):
            raise failure
        self.errors.append(str(failure))

    def _wake(self, key: Key) -> None:
        self._due[key] = min(self._due.get(key, EPOCH + timedelta(days=9999)), self.now + timedelta(seconds=JOIN_S))

    def _changed(self, change: str, manifest: dict[str, Any]) -> None:
        """Queue the keys that a changed object concerns: those of a deployment, of an adapter and its deployment, or of a labelled
        child's owner."""
        metadata, kind = manifest["metadata"], manifest["kind"]
        if kind == DEPLOYMENT.kind:
            self._wake(deployment_key(metadata["namespace"], metadata["name"]))
        elif kind == ADAPTER.kind:
            self._wake(adapter_key(metadata["namespace"], metadata["name"]))
            self._wake(deployment_key(metadata["namespace"], manifest["spec"]["deploymentRef"]["name"]))
        elif LABEL_DEPLOYMENT in metadata.get("labels", {}):
            self.runtime.child_changed(metadata["namespace"], metadata["labels"][LABEL_DEPLOYMENT], kind, metadata["name"])

    # a kubelet and workers --------------------------------------------------------------------------------------------

    def start(self, pod: str, **script: Any) -> ScriptedWorker:
        """Mark a pod as running and ready at a new address, and return its worker there, which has tried the mounted adapters.

        `script` sets fields of the worker.
        """
        number = next(self._boots)
        return self._begin(pod, f"10.0.0.{number}", number, script)

    def start_all(self, **script: Any) -> list[ScriptedWorker]:
        """Start each pod that has no status yet, as a kubelet would, with the script given. Return their workers, perhaps none."""
        waiting = [name for name in self.cluster.names(POD) if not (self.cluster.find(POD, name) or {}).get("status")]
        return [self.start(name, **script) for name in waiting]

    def restart_container(self, pod: str, *, code: int = 137, message: str = "", **script: Any) -> ScriptedWorker:
        """Restart a pod's container on the pod's address with a new boot id, and count the restart. Return the new worker; `code` and
        `message` are how the old one ended."""
        found = self.cluster.find(POD, pod)
        assert found is not None
        said = {"restarts": found["status"]["containerStatuses"][0]["restartCount"] + 1, "last": terminated(code, message)}
        return self._begin(pod, found["status"]["podIP"], next(self._boots), script, **said)

    def _begin(self, pod: str, ip: str, number: int, script: dict[str, Any], **said: Any) -> ScriptedWorker:
        worker = self.workers.add(ip, ScriptedWorker(boot_id=f"boot-{number}", clock=self.clock, **script))
        worker.load_mounted(self.desired()["adapters"])
        worker.calls.clear()
        self.cluster.running(pod, ip, ready=True, **said)
        return worker

    # looking ----------------------------------------------------------------------------------------------------------

    def desired(self, name: str = "d") -> dict[str, Any]:
        return mounted_desired(lambda config: self.cluster.find(CONFIG_MAP, config), name)

    def status(self, name: str = "d") -> dict[str, Any]:
        return (self.cluster.find(DEPLOYMENT, name) or {}).get("status", {})

    def condition(self, type_: str, name: str = "d") -> tuple[str, str]:
        return _condition(self.status(name), type_)

    def message(self, type_: str, name: str = "d") -> str:
        return next(one["message"] for one in self.status(name)["conditions"] if one["type"] == type_)

    def adapter_status(self, name: str = "x") -> dict[str, Any]:
        return (self.cluster.find(ADAPTER, name) or {}).get("status", {})

    def adapter_condition(self, type_: str, name: str = "x") -> tuple[str, str]:
        return _condition(self.adapter_status(name), type_)

    def adapter_message(self, type_: str, name: str = "x") -> str:
        return next(one["message"] for one in self.adapter_status(name)["conditions"] if one["type"] == type_)

    def instance(self, name: str = "x", group: int = 0) -> dict[str, Any]:
        return next(one for one in self.adapter_status(name)["replicaInstances"] if one["replica"] == group)

    def states(self, name: str = "d") -> list[str]:
        return [group["state"] for group in self.status(name).get("replicaStates", [])]

    def routable(self) -> list[str]:
        pods = [self.cluster.find(POD, name) for name in self.cluster.names(POD)]
        return [pod["metadata"]["name"] for pod in pods if pod and pod["metadata"]["labels"].get(LABEL_ROUTABLE) == "true"]


async def serving(replicas: int = 1, **spec: Any) -> Rig:
    """Create a deployment of so many replicas, let the operator make its pods, start them, and let it look again. Return the rig."""
    rig = Rig()
    rig.cluster.put(deployment(replicas=replicas, **spec))
    await rig.run()
    rig.start_all()
    await rig.run()
    return rig


async def with_adapter(replicas: int = 1, **spec: Any) -> Rig:
    """Return a rig with an awake deployment and an adapter, from `spec`, that was pushed to all replicas."""
    rig = await serving(replicas)
    rig.cluster.put(adapter(**spec))
    await rig.run()
    return rig


def _condition(status: dict[str, Any], type_: str) -> tuple[str, str]:
    return next(((one["status"], one["reason"]) for one in status.get("conditions", []) if one["type"] == type_), ("", ""))
