# SPDX-License-Identifier: Apache-2.0
"""Both ports behind the gate: every write, every dry run and every call of a worker asks for passage. Reads of the cluster do not."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from diffusion_operator.api.names import Kind
from diffusion_operator.api.worker_state import WorkerState
from diffusion_operator.cluster import Cluster, Manifest, Operation, before_sending
from diffusion_operator.election.leadership import Leadership
from diffusion_operator.plan.results.actions import DrainWorker, PutAdapter, RemoveAdapter, SleepWorker, WakeWorker
from diffusion_operator.worker_client import WorkerClient


class GatedCluster:
    """A Cluster whose writes and dry runs raise NotLeading unless this process leads. Reads always pass."""

    def __init__(self, cluster: Cluster, leadership: Leadership) -> None:
        self._cluster = cluster
        self._leadership = leadership

    @asynccontextmanager
    async def _write(self) -> AsyncIterator[None]:
        """Give a context manager around a write, which raises NotLeading unless this process leads.

        It asks when the write begins and again when its bytes are about to leave: the process may have been stopped meanwhile.
        """
        async with self._leadership.passage():
            asked = before_sending.set(self._leadership.require)
            try:
                yield
            finally:
                before_sending.reset(asked)

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return await self._cluster.get(kind, namespace, name)

    async def adapter_versions(self, namespace: str, deployment: str) -> Mapping[str, object]:
        return await self._cluster.adapter_versions(namespace, deployment)

    async def list(self, kind: Kind, namespace: str, *, labels: Mapping[str, str] | None = None) -> list[Manifest]:
        return await self._cluster.list(kind, namespace, labels=labels)

    async def look_up(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return await self._cluster.look_up(kind, namespace, name)

    async def warnings(self, namespace: str, uid: str) -> Sequence[Manifest]:
        return await self._cluster.warnings(namespace, uid)

    async def create(self, manifest: Manifest) -> bool:
        async with self._write():
            return await self._cluster.create(manifest)

    async def try_create(self, manifest: Manifest) -> None:
        async with self._write():
            await self._cluster.try_create(manifest)

    async def apply(self, manifest: Manifest) -> Manifest:
        async with self._write():
            return await self._cluster.apply(manifest)

    async def patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Operation]) -> Manifest:
        async with self._write():
            return await self._cluster.patch(kind, namespace, name, operations)

    async def apply_status(self, kind: Kind, namespace: str, name: str, *, status: Manifest, version: str) -> None:
        async with self._write():
            await self._cluster.apply_status(kind, namespace, name, status=status, version=version)

    async def set_labels(self, kind: Kind, namespace: str, name: str, *, uid: str, labels: Mapping[str, str | None]) -> None:
        async with self._write():
            await self._cluster.set_labels(kind, namespace, name, uid=uid, labels=labels)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        async with self._write():
            await self._cluster.delete(kind, namespace, name, uid=uid)


class GatedWorkers:
    """A WorkerClient whose calls, reads of a state too, raise NotLeading unless this process leads.

    The epochs that workers have seen are reported to the leadership.
    """

    def __init__(self, workers: WorkerClient, leadership: Leadership) -> None:
        self._workers = workers
        self._leadership = leadership

    async def state(self, ip: str, *, token: str, pod_uid: str = "", after: str = "", wait_s: float = 0.0) -> WorkerState:
        async with self._leadership.passage():
            found = await self._workers.state(ip, token=token, pod_uid=pod_uid, after=after, wait_s=wait_s)
        self._leadership.report(found.operator_epoch)
        return found

    async def sleep(self, call: SleepWorker, *, token: str) -> None:
        async with self._leadership.passage():
            await self._workers.sleep(call, token=token)

    async def wake(self, call: WakeWorker, *, token: str) -> None:
        async with self._leadership.passage():
            await self._workers.wake(call, token=token)

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None:
        async with self._leadership.passage():
            await self._workers.put_adapter(call, token=token)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        async with self._leadership.passage():
            await self._workers.remove_adapter(call, token=token)

    async def drain(self, call: DrainWorker, *, token: str) -> None:
        async with self._leadership.passage():
            await self._workers.drain(call, token=token)
