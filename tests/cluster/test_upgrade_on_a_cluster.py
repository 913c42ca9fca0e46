# SPDX-License-Identifier: Apache-2.0
"""An upgrade from the version before under requests on a cluster, with 20 deployments that serve, and the way back.

Real: the version before, its chart, its operator and its workers, on today's layers. Three deployments serve the digits model, and 17 are
real server processes over fake ranks. Tests run in their order; each says what it leaves.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from support.cluster.earlier_images import EarlierImages, build_earlier
from support.cluster.faults import resident_mib, service_address
from support.cluster.rig import ADAPTER_READY, HELM_S, PROMPT, SERVING, Clients, ClusterRig, HelmRig
from support.release.earlier import EarlierVersion
from tools.demo.images import DemoImage, Request, ask, client_for
from tools.demo.installation import RELEASE
from tools.demo.kubectl import Document, condition
from tools.demo.stage import stage
from tools.release.upgrades import UPGRADES_FROM

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(2400)]

NAMESPACE = "diffusion-upgrade"
DIGITS = ("digits-a", "digits-b", "digits-c")
SERVERS = tuple(f"server-{number}" for number in range(17))
ASLEEP = SERVERS[-1]
STYLE = "stripes"
# Three models share two cores with everything else.
STEPS = 1
# 20 pods start at once; a minute and a half on two idle cores.
START_ALL_S = 1200.0
WATCHED_S = 60.0
OWNED = "diffusion-operator.dev/deployment"
EARLIER_WORDS, WORDS = "groups", "replicaStates"


@dataclass
class Release:
    """The namespace and both versions' releases in it, with the state of its objects before the upgrade."""

    rig: ClusterRig
    earlier: HelmRig
    this: HelmRig
    charts: EarlierVersion
    before: dict[str, Any] = field(default_factory=dict)

    def lasting(self) -> dict[str, Any]:
        """Return the state that must outlast an upgrade: the pods, their restarts, whether they are in service, and addresses."""
        pods = {
            f"pod {one['metadata']['name']}": (
                one["metadata"]["uid"],
                one["status"]["containerStatuses"][0]["restartCount"],
                one["metadata"]["labels"].get("diffusion-operator.dev/routable"),
                condition(one, "Ready"),
            )
            for one in self.rig.kubectl.get("pods", "-l", OWNED)["items"]
        }
        services = self.rig.kubectl.get("services", "-l", OWNED)["items"]
        return pods | {f"service {one['metadata']['name']}": (one["metadata"]["uid"], one["spec"]["clusterIP"]) for one in services}

    def untrue(self, states: str) -> list[str]:
        """List the false statements of all statuses; `states` is the name of the field with the list of replicas."""
        found = self.rig.kubectl.get("dd,lora")["items"]
        return [what for one in found for what in _untrue(one, states)]

    def settle(self, states: str, deadline_s: float = 180.0) -> None:
        self.rig.eventually(f"true statuses, found {self.untrue(states)}", lambda: not self.untrue(states), deadline_s=deadline_s)


def _untrue(one: Document, states: str) -> list[str]:
    name, status = f"{one['kind']} {one['metadata']['name']}", one.get("status", {})
    if status.get("observedGeneration") != one["metadata"]["generation"]:
        return [f"{name} is not observed"]
    told = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    if one["kind"] == "LoRAAdapter":
        return [] if told["Ready"][0] == "True" else [f"{name}: {told['Ready']}"]
    asleep = one["metadata"]["name"] == ASLEEP
    state = [(each["leaderPod"], each["state"]) for each in status.get(states, ())]
    expected = {"Ready": "False" if asleep else "True", "Degraded": "False", "ControlSecured": "True", "ChildrenReady": "True"}
    wrong = [f"{name}: {kind} is {told[kind]}" for kind, value in expected.items() if kind in told and told[kind][0] != value]
    right = [(f"{one['metadata']['name']}-0-0", "Asleep" if asleep else "Awake")]
    return wrong + ([f"{name}: {states} are {state}, expected {right}"] if state != right else [])


class Visitors:
    """A thread that asks all servers in turn, once each, while the block lasts. Answers without an image and errors of the connection
    are in `lost`; nothing is raised."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses = addresses
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._visit, daemon=True)
        self.answered: Counter[str] = Counter()
        self.lost: list[str] = []
        self.slowest_s = 0.0

    def __enter__(self) -> "Visitors":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(HELM_S)

    def _visit(self) -> None:
        with httpx2.Client(timeout=30) as http:
            while not self._ended.is_set():
                for name, address in self._addresses.items():
                    self._ask(http, name, address)
                self._ended.wait(0.2)

    def _ask(self, http: httpx2.Client, name: str, address: str) -> None:
        began, body = time.monotonic(), {"prompt": PROMPT, "model": name, "size": "64x64", "num_inference_steps": 1}
        try:
            answer = http.post(f"{address}/v1/images/generations", json=body)
            wrong = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
        except httpx2.TransportError as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            self.lost.append(f"{time.strftime('%H:%M:%S')} {name}: {wrong}")
        else:
            self.answered[name] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)


@pytest.fixture(scope="module", params=UPGRADES_FROM)
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EarlierVersion:
    return EarlierVersion(tmp_path_factory.mktemp("earlier"), request.param)


@pytest.fixture(scope="module")
def release(rig: ClusterRig, earlier: EarlierVersion, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Install the version before with 20 deployments that serve, and provide both releases. Afterwards upgrade to this version."""
    built: EarlierImages = build_earlier(earlier, tmp_path_factory.mktemp("images"))
    with stage(NAMESPACE) as set_up:
        own = ClusterRig(set_up.kubectl, built.release.worker)
        found = Release(own, HelmRig(NAMESPACE, built.release), HelmRig(NAMESPACE, set_up.images), earlier)
        found.earlier.uninstall()
        try:
            found.earlier.upgrade(earlier.chart)
            found.before = begin(found, built.servers)
            yield found
        finally:
            found.this.upgrade()  # other tests need the kinds of this version


def begin(release: Release, servers: str) -> dict[str, Any]:
    """Create the deployments and the adapter, wait until all statuses are true, and return the state that must last."""
    own, small = release.rig, {"gpuResourceName": "none", "requests": {"cpu": "10m", "memory": "96Mi"}}
    for name in DIGITS:
        own.deploy(name)
    for name in SERVERS:
        policy = "Asleep" if name == ASLEEP else "AlwaysAwake"
        own.deploy(name, engine={"image": servers}, resources=small, sleep={"policy": policy})
    own.adapt(STYLE, DIGITS[0], f"/models/loras/{STYLE}")
    for name in DIGITS:
        own.wait(f"dd/{name}", SERVING, deadline_s=START_ALL_S)
    own.wait(f"lora/{STYLE}", ADAPTER_READY, deadline_s=START_ALL_S)
    release.settle(EARLIER_WORDS, START_ALL_S)
    sizes = [resident_mib(pod) for name in SERVERS for pod in own.pods(name)]
    print(f"{len(sizes)} servers take {min(sizes):.0f} to {max(sizes):.0f} MiB each")
    return release.lasting()


@pytest.fixture(scope="module")
def right(release: Release) -> dict[str, DemoImage]:
    """Return an image of each digits model by the deployment's name, as every later request must get it."""
    found = {}
    for name in DIGITS:
        with client_for(service_address(release.rig.kubectl, name)) as client:
            found[name] = ask(client, Request(PROMPT, 1, name, steps=STEPS))
    return found


def watched(release: Release, right: dict[str, DemoImage], states: str, change: Any) -> None:
    """Call `change` under requests, watch the release for a while, and check that nothing is replaced or lost.

    Every status must become true; `states` is the name of its field with the list of replicas.
    """
    addresses = {name: service_address(release.rig.kubectl, name) for name in (*DIGITS, *SERVERS)}
    with ExitStack() as stack:
        asking = [stack.enter_context(Clients(lambda at=addresses[n]: at, right[n], Request(PROMPT, 1, n, steps=STEPS))) for n in DIGITS]
        visitors = stack.enter_context(Visitors({name: addresses[name] for name in SERVERS if name != ASLEEP}))
        change()
        release.settle(states)
        end = time.monotonic() + WATCHED_S
        while time.monotonic() < end:
            assert release.lasting() == release.before
            threading.Event().wait(5.0)
        assert release.untrue(states) == []
    print(f"{sum(visitors.answered.values())} answers of servers, slowest {visitors.slowest_s:.1f} s;", *(one.told() for one in asking))
    assert visitors.lost == [] and len(visitors.answered) == len(SERVERS) - 1
    assert all(one.answered and not one.lost and not one.refused for one in asking), [one.told() for one in asking]


def test_an_upgrade_under_requests_replaces_nothing_and_loses_nothing(release: Release, right: dict[str, DemoImage]) -> None:
    """Upgrade under requests, and leave this version over workers of the version before."""
    watched(release, right, WORDS, release.this.upgrade)


def test_the_way_back_replaces_nothing_and_loses_nothing(release: Release, right: dict[str, DemoImage]) -> None:
    """Roll back under requests, and leave the version before."""
    back = ("rollback", RELEASE, "1", "--wait", "--timeout", f"{HELM_S}s")
    watched(release, right, EARLIER_WORDS, lambda: release.this(*back))
