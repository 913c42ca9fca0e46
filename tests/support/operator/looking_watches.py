# SPDX-License-Identifier: Apache-2.0
"""A fake of the watches of workers for virtual time: it polls each worker when `look` is called.

Real: the records that it fills, and what counts as news. Not real: the tasks, the connections and the waiting.
"""

from collections import defaultdict
from collections.abc import Sequence

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.errors import ControlError
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.runtime import Runtime, deployment_key
from diffusion_operator.reconcile.workers.watches import hear
from support.operator.scripted_workers import Revisions


class LookingWatches:
    """A stand-in for `WorkerWatches` that polls the followed workers only when `look` is called."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._followed: dict[tuple[str, str], tuple[DeploymentMemory, Sequence[Pod]]] = {}
        self._revisions: defaultdict[str, Revisions] = defaultdict(Revisions)
        """Keys are UIDs of pods."""

    def follow(self, deployment: ObjectMeta, memory: DeploymentMemory, pods: Sequence[Pod]) -> None:
        self._followed[deployment.namespace, deployment.name] = (memory, pods)

    def forget(self, namespace: str, deployment: str) -> None:
        self._followed.pop((namespace, deployment), None)

    async def look(self) -> None:
        """Poll every worker that is followed, and wake the deployments that have news."""
        for place, (memory, pods) in list(self._followed.items()):
            if any([await self._news(memory, pod) for pod in pods]):
                self._runtime.wake(deployment_key(*place))

    async def _news(self, memory: DeploymentMemory, pod: Pod) -> bool:
        runtime, record = self._runtime, memory.record_of(pod, self._runtime.now())
        try:
            state = await memory.tokens.call(pod.ip, lambda token: runtime.workers.state(pod.ip, token=token, pod_uid=pod.uid))
        except ControlError as error:
            return record.failed(str(error), runtime.now())
        return hear(runtime, record, self._revisions[pod.uid].revised(state))
