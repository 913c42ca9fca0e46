# SPDX-License-Identifier: Apache-2.0
"""An upgrade from the version before and the way back, with real processes, over deployments that serve (faults 62, 63, 65 and 95).

Real: the API server, both operators' programs, both versions of the kinds. Not real: the kubelet and its workers, which are FakeKubelet.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, NETWORK_POLICY, POD, SECRET, SERVICE, Kind
from support.apiserver.real_apiserver import kubectl
from support.apiserver.rest_client import RestClient
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rig import adapter
from support.operator.sole_operator import eventually_nothing
from support.release.earlier import EarlierVersion
from support.release.operators import actions, define, operator
from support.soak.operator_process import OperatorProcess
from support.soak.operator_truth import condition, owners
from tools.devcluster.apiserver import apiserver
from tools.release.upgrades import UPGRADES_FROM

pytestmark = [pytest.mark.apiserver, pytest.mark.slow, pytest.mark.timeout(900)]
NAMESPACE = "upgraded"
PLAIN: dict[str, Any] = {"model": {"source": {"path": "/models/digits"}}, "resources": {"gpuResourceName": "none"}}
CLAIM = {"name": "gpus", "resourceClaimTemplateName": "two"}
# Deployments by name. Together they set every part of the earlier spec, which shows that no part changes a template.
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"replicas": 2, "rollout": {"maxSurge": 1, "maxUnavailable": 0, "progressDeadlineSeconds": 90}},
    "asleep": {"sleep": {"policy": "Asleep", "level": "Discard", "drain": "Abort", "wakeTimeoutSeconds": 60}},
    "on-idle": {"sleep": {"policy": "OnIdle", "idleSeconds": 3600, "minAwakeSeconds": 30}, "coldRequests": {"maxHeld": 3}},
    "named": {"servedName": "images"},
    "from-a-hub": {"model": {"source": {"huggingFace": {"repo": "o/m"}}, "dtype": "Float16", "cache": {"emptyDir": {"sizeLimit": "9Gi"}}}},
    "from-a-claim": {"model": {"source": {"pvc": {"claimName": "c", "path": "m"}}, "pipeline": "FluxPipeline"}},
    "tuned": {"engine": {"maxBatchSize": 2, "stepCache": "FirstBlock", "vaeTiling": True, "promptCacheSize": 0}},
    "own-image": {"engine": {"image": "worker:own", "pullPolicy": "Always", "pullSecrets": [{"name": "s"}]}},
    "with-env": {"engine": {"env": [{"name": "A", "value": "1"}], "quantization": "Int8"}},
    "on-gpus": {"resources": {}, "parallelism": {"ranksPerReplica": 4, "sequence": 2}},
    "by-claims": {"resources": {"claims": [CLAIM]}},
    "bounded": {"resources": {"gpuResourceName": "none", "requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}, "sharedMemory": "1Gi"}},
    "styled": {"lora": {"maxLoaded": 2, "maxCached": 3, "maxRank": 16, "onMissing": "Load", "secrets": ["tokens"]}},
    "slow-start": {"startup": {"timeoutSeconds": 3600, "warmup": {"steps": 2, "sizes": ["64x64"]}}},
    "keyed": {"service": {"port": 8080, "annotations": {"a": "b"}, "apiKeySecret": {"name": "keys"}}},
    "limited": {"requests": {"defaults": {"steps": 3, "size": "64x64"}, "limits": {"maxSteps": 5, "maxImages": 2}}},
    "impatient": {"groupRecovery": {"backoffSeconds": 1, "backoffMaxSeconds": 1, "failureThreshold": 1}},
    "open": {"control": {"networkPolicy": "None"}, "podDisruptionBudget": "None"},
    "placed": {
        "scheduling": {
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "topologySpread": [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        },
        "podMetadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}},
    },
    "suspended": {"suspend": True},
}
SPENT = "impatient"
"""The deployment whose replica fails; the earlier operator gives it up for good."""


@pytest.fixture(scope="module", params=UPGRADES_FROM)
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EarlierVersion:
    return EarlierVersion(tmp_path_factory.mktemp("earlier"), request.param)


@pytest.fixture
def kubeconfig() -> Iterator[Path]:
    """Start a separate API server, because the kinds change."""
    with apiserver() as path:
        kubectl(path, "create", "namespace", NAMESPACE)
        yield path


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[RestClient]:
    async with RestClient(kubeconfig) as made:
        yield made


class Objects:
    """All objects of the namespace at one moment."""

    def __init__(self, found: dict[Kind, list[Any]]) -> None:
        self.found = found

    @classmethod
    async def look(cls, client: RestClient) -> "Objects":
        kinds = (DEPLOYMENT, ADAPTER, POD, SERVICE, CONFIG_MAP, SECRET, NETWORK_POLICY)
        return cls({kind: await client.list(kind, NAMESPACE) for kind in kinds})

    def lasting(self) -> dict[str, Any]:
        """Return what an upgrade must not change: the UID and routable label of each pod, and the UID and clusterIP of each Service."""
        pods = {f"pod {name_of(one)}": (one["metadata"]["uid"], routable(one)) for one in self.found[POD]}
        return pods | {f"service {name_of(one)}": (one["metadata"]["uid"], one["spec"]["clusterIP"]) for one in self.found[SERVICE]}

    def pods_of(self, deployment: str) -> list[Any]:
        (owner,) = [one["metadata"]["uid"] for one in self.found[DEPLOYMENT] if name_of(one) == deployment]
        return [one for one in self.found[POD] if owner in owners(one)]

    def untrue(self, *, states: str, instances: str, gone: Collection[str] = ()) -> list[str]:
        """Return the statuses that are not true; `states` and `instances` are the names of lists in statuses.

        The replicas of deployments in `gone` have failed for good.
        """
        wrong = [what for one in self.found[DEPLOYMENT] for what in self._untrue_of_deployment(one, states, gone)]
        for one in self.found[ADAPTER]:
            status = one.get("status", {})
            told = [(each["state"], each.get("podUID")) for each in status.get(instances, ())]
            pods = [("Loaded", pod["metadata"]["uid"]) for pod in self.found[POD] if name_of(pod).startswith("plain-")]
            if condition(status, "Ready")["status"] != "True" or told != pods:
                wrong.append(f"adapter {name_of(one)}: {told}, {condition(status, 'Ready')}, expected {pods}")
        return wrong

    def _untrue_of_deployment(self, one: Any, states: str, gone: Collection[str]) -> list[str]:
        name, status = name_of(one), one.get("status", {})
        if status.get("observedGeneration") != one["metadata"]["generation"]:
            return [f"{name} is not observed"]
        pods, told = sorted(map(name_of, self.pods_of(name))), sorted(each.get("leaderPod", "none yet") for each in status.get(states, ()))
        serves = name not in ("asleep", "suspended", *gone)
        expected = {"Ready": serves, "Degraded": name in gone, "Progressing": False if name in gone else None}
        expected |= {"ChildrenReady": True} if states == WORDS["states"] else {}
        found = {kind: condition(status, kind) for kind in expected}
        wrong = [f"{name}: the status says {told}, expected {pods}"] if told != pods else []
        return wrong + [
            f"{name}: {kind} is {found[kind]}"
            for kind, value in expected.items()
            if value is not None and found[kind]["status"] != str(value)
        ]


def name_of(one: Any) -> str:
    return str(one["metadata"]["name"])


def routable(pod: Any) -> bool:
    return pod["metadata"]["labels"].get("diffusion-operator.dev/routable") == "true"


EARLIER_WORDS = {"states": "groups", "instances": "instances"}
WORDS = {"states": "replicaStates", "instances": "replicaInstances"}
CHILD_WRITES = {"apply ConfigMap", "apply Service", "apply NetworkPolicy", "apply PodDisruptionBudget"}
# A process looks at every object once: it writes children that this version renders differently, and each status with its names.
WRITES_EACH = 3
QUIET_S = 6.0
BESIDE_S = 30.0


class Place:
    """The namespace with all objects of a test."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet) -> None:
        self._client, self._kubelet = client, kubelet

    async def make(self, *names: str) -> None:
        """Make these deployments; the first one has two adapters."""
        for name in names:
            document = {
                "apiVersion": DEPLOYMENT.api_version,
                "kind": DEPLOYMENT.kind,
                "metadata": {"name": name},
                "spec": PLAIN | SPECS[name],
            }
            status, answer = await self._client.create(DEPLOYMENT, NAMESPACE, document, strict=True)
            assert status == 201, f"{name}: {answer['message']}"
        for name in ("stripes", "dots"):
            await self._client.create(ADAPTER, NAMESPACE, adapter(name, f"/loras/{name}", deployment=names[0]))

    async def look(self) -> Objects:
        return await Objects.look(self._client)

    async def until_true(self, words: Mapping[str, str], *, gone: Collection[str] = ()) -> dict[str, Any]:
        """Wait until every status is true; return the part of the objects that must outlast an upgrade. `words` has the names of lists
        in statuses."""

        async def untrue() -> list[str]:
            return (await self.look()).untrue(**words, gone=gone)

        await eventually_nothing(untrue)
        return (await self.look()).lasting()

    async def fail(self, name: str) -> None:
        """Let a deployment's pods fail for good, as an eviction through the pod's own fault does."""
        for pod in (await self.look()).pods_of(name):
            ended = {"status": {"phase": "Failed", "reason": "Evicted", "message": "it took too much", "conditions": []}}
            await self._client.patch(POD, NAMESPACE, name_of(pod), ended, subresource="/status")


async def test_an_upgrade_and_the_way_back_replace_no_pod(
    earlier: EarlierVersion, kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    place = Place(client, kubelet)
    start = partial(operator, kubeconfig=kubeconfig, control_port=kubelet.port)
    define(kubeconfig, earlier.crds)
    with start(tmp_path / "old", earlier=earlier):
        await place.make(*SPECS)
        before = await place.until_true(EARLIER_WORDS)
    define(kubeconfig)
    with start(tmp_path / "new") as new:
        assert await place.until_true(WORDS) == before
        await writes_little(new)
        assert new.complaints() == []
    define(kubeconfig, earlier.crds)
    with start(tmp_path / "back", earlier=earlier) as back:
        assert await place.until_true(EARLIER_WORDS) == before
        await writes_little(back)
    assert kubelet.wrong == []
    assert set(kubelet.pods_made.values()) == {1}


async def writes_little(process: OperatorProcess) -> None:
    """Check that an operator makes no pod, calls no worker and writes each other object a few times at most, and then nothing."""
    began = actions(process)
    assert not {what for what in began if what.partition(" ")[0] not in ("create", "patch", "apply", "apply_status")}, began
    assert "create Pod" not in began, began
    for what in ("apply_status DiffusionDeployment", *CHILD_WRITES, "create Event"):
        assert began.get(what, 0) <= WRITES_EACH * len(SPECS), began
    await asyncio.sleep(QUIET_S)
    assert actions(process) == began


async def test_a_replica_that_the_earlier_operator_gave_up_is_tried_again(
    earlier: EarlierVersion, kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    place = Place(client, kubelet)
    start = partial(operator, kubeconfig=kubeconfig, control_port=kubelet.port)
    define(kubeconfig, earlier.crds)
    with start(tmp_path / "old", earlier=earlier):
        await place.make("plain", SPENT)
        await place.until_true(EARLIER_WORDS)
        await place.fail(SPENT)
        await place.until_true(EARLIER_WORDS, gone=[SPENT])
    (ended,) = (await place.look()).pods_of(SPENT)
    define(kubeconfig)
    with start(tmp_path / "new"):
        await place.until_true(WORDS)
    (pod,) = (await place.look()).pods_of(SPENT)
    assert name_of(ended) == "impatient-0-0" and name_of(pod) == "impatient-0-1"


async def test_what_an_earlier_operator_wrote_beside_this_one_is_put_back_when_it_has_ended(
    earlier: EarlierVersion, kubeconfig: Path, tmp_path: Path, client: RestClient, kubelet: FakeKubelet
) -> None:
    """Run an earlier operator beside this one for longer than an upgrade takes, while the kinds are new already. The earlier one's
    writes must be put back."""
    place = Place(client, kubelet)
    start = partial(operator, kubeconfig=kubeconfig, control_port=kubelet.port)
    define(kubeconfig, earlier.crds)
    with start(tmp_path / "old", earlier=earlier) as old:
        await place.make("plain", "two", "tuned")
        before = await place.until_true(EARLIER_WORDS)
        define(kubeconfig)
        with start(tmp_path / "new") as new:
            await asyncio.to_thread(new.eventually, lambda: new.metrics()["diffusion_operator_leader"])
            await asyncio.sleep(BESIDE_S)
            await asyncio.to_thread(old.kill)
            assert await place.until_true(WORDS) == before
            begun = actions(new)
            assert max(begun[what] for what in CHILD_WRITES) <= 3 * (2 + BESIDE_S / 10), begun
    assert kubelet.wrong == []


async def test_an_operator_that_is_newer_than_the_kinds_ends_and_names_what_they_lack(
    earlier: EarlierVersion, kubeconfig: Path, tmp_path: Path
) -> None:
    """Start this operator with the earlier kinds, as with `crds.enabled` false. It ends, and names what they lack; with this version's
    kinds it starts."""
    define(kubeconfig, earlier.crds)
    process = OperatorProcess(tmp_path, kubeconfig)
    process.start()
    await eventually_nothing(lambda: asyncio.to_thread(process.is_alive))
    said = process.log.read_text()
    assert "are older than this operator" in said and "diffusiondeployments: status.replicaStates" in said
    define(kubeconfig)
    process.start()
    try:
        await asyncio.to_thread(process.wait_ready)
    finally:
        await asyncio.to_thread(process.stop)
