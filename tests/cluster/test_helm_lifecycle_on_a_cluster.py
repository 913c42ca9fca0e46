# SPDX-License-Identifier: Apache-2.0
"""The release's whole life with a serving deployment, on a real cluster: upgrade, uninstall, and what people do to objects afterwards.

It has a namespace and a release of its own. Tests run in their order; each says what it leaves.
"""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.cluster.rig import ADAPTER_READY, OLDER_WORDS, SERVING, ClusterRig, HelmRig, older_chart, spec_schema
from support.release.registry import registry
from tools.demo.installation import RELEASE
from tools.demo.kubectl import Document
from tools.demo.stage import stage
from tools.release.chart import publish

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAMESPACE = "diffusion-lifecycle"
NAME, STYLE = "digits", "stripes"
DD, LORA = f"dd/{NAME}", f"lora/{STYLE}"
CRD = "crd/diffusiondeployments.diffusion-operator.dev"
# Time for an unwanted rollout to show: the operator looks at a deployment every few seconds.
QUIET_S = 8.0
GONE_S = 60.0


@pytest.fixture(scope="module")
def release(rig: ClusterRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ClusterRig, HelmRig]]:
    """Install an older release in which a deployment and an adapter serve."""
    with stage(NAMESPACE) as set_up:
        own, helm = ClusterRig(set_up.kubectl, set_up.images.worker), HelmRig(NAMESPACE, set_up.images)
        helm.upgrade(older_chart(tmp_path_factory.mktemp("chart")))
        own.adapt(STYLE, NAME, f"/models/loras/{STYLE}")
        own.serve(NAME)
        own.wait(LORA, ADAPTER_READY)
        yield own, helm


def lives(rig: ClusterRig) -> list[tuple[str, int]]:
    return sorted((pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in rig.pods(NAME))


def replicas_schema(rig: ClusterRig) -> Document:
    found: Document = spec_schema(rig.kubectl.get(CRD))
    return found


def delete_at_once(rig: ClusterRig, *resources: str) -> None:
    """Delete objects with kubectl within ten seconds, and check that they are gone when it returns: no finalizer holds them."""
    rig.kubectl.text("delete", *resources, deadline_s=60)
    assert not any(rig.exists(resource) for resource in resources)


def begin(rig: ClusterRig, **spec: Document) -> None:
    """Create a deployment and an adapter unless they exist, and wait for the pod. The tests that follow need neither to serve."""
    rig.deploy(NAME, **spec)
    rig.adapt(STYLE, NAME, f"/models/loras/{STYLE}")
    rig.eventually("its pod", lambda: rig.pods(NAME))


def by_digest(rig: ClusterRig, image: str) -> str | None:
    """Look up `name@sha256:…` of a container image in the list that each node reports. None until a list has both names."""
    names = (node_image["names"] for node in rig.kubectl.get("nodes")["items"] for node_image in node["status"]["images"])
    return next((name for known in names if image in known for name in known if "@sha256:" in name), None)


def running_images(rig: ClusterRig, deployment: str) -> list[str]:
    pods = [pod for pod in rig.pods(deployment) if pod["status"].get("phase") == "Running"]
    return [container["image"] for pod in pods for container in pod["spec"]["containers"]]


def no_child_is_left(rig: ClusterRig) -> bool:
    return not rig.kubectl.get("pods,services,configmaps,secrets", "-l", f"diffusion-operator.dev/deployment={NAME}")["items"]


def no_operator_runs(rig: ClusterRig) -> bool:
    return not rig.kubectl.get("pods", "-l", "app.kubernetes.io/component=operator")["items"]


def test_an_upgrade_with_a_changed_crd_and_another_default_image_restarts_nothing(release: tuple[ClusterRig, HelmRig]) -> None:
    """Upgrade to a default container image that no registry has: a restarted pod would not come back.

    In the end the release is upgraded once more, to the usual values.
    """
    rig, helm = release
    assert replicas_schema(rig)["replicas"]["description"] == OLDER_WORDS and "podDisruptionBudget" not in replicas_schema(rig)
    before, image = lives(rig), rig.image(NAME, STYLE)
    helm.upgrade(engine_image="registry.invalid/newer:1")
    assert replicas_schema(rig)["replicas"]["description"] != OLDER_WORDS and "podDisruptionBudget" in replicas_schema(rig)
    rig.wait(DD, SERVING, deadline_s=30)
    threading.Event().wait(QUIET_S)
    assert lives(rig) == before
    assert rig.image(NAME, STYLE).png == image.png
    rig.eventually("the newer default is told", lambda: rig.condition(DD, "DefaultImage")["reason"] == "NewerExists")
    helm.upgrade()
    assert "Succeeded" in helm("test", RELEASE)


def test_after_the_uninstall_pods_serve_on_and_what_is_deleted_is_gone(release: tuple[ClusterRig, HelmRig]) -> None:
    """Uninstall the release. Later tests find the deployment with its pod, but neither an operator nor the adapter."""
    rig, helm = release
    before, image = lives(rig), rig.image(NAME, STYLE)
    helm.uninstall()
    rig.eventually("the operator is gone", lambda: no_operator_runs(rig))
    assert rig.image(NAME, STYLE).png == image.png
    rig.deploy("unborn")
    delete_at_once(rig, "dd/unborn", LORA)
    assert rig.image(NAME).png and lives(rig) == before


def test_a_later_install_takes_over_without_a_restart(release: tuple[ClusterRig, HelmRig]) -> None:
    """Install the operator again, and leave it installed. The adapter that was deleted meanwhile is removed from the worker."""
    rig, helm = release
    before = lives(rig)
    helm.upgrade()
    rig.wait(DD, SERVING, deadline_s=60)
    rig.eventually("the worker forgot the adapter", lambda: not rig.state(NAME)["adapters"])
    threading.Event().wait(QUIET_S)
    assert lives(rig) == before
    rig.image(NAME)


def test_a_released_chart_brings_its_images_by_digest(release: tuple[ClusterRig, HelmRig], tmp_path: Path) -> None:
    """Upgrade to a published chart whose images come from a registry by its own digests; no value names them. Leave the operator of that
    chart."""
    rig, helm = release
    before = lives(rig)
    operator, worker = (
        rig.eventually("its digest", partial(by_digest, rig, image)) for image in (helm.images.operator, helm.images.worker)
    )
    with registry(tmp_path) as address:
        name, digest = publish(address, "1.2.3", operator=operator, worker=worker)
        helm("upgrade", RELEASE, f"oci://{name}@{digest}", "--plain-http", "--reset-values", "--wait", "--timeout", "60s")
    (container,) = rig.kubectl.get(f"deployment/{RELEASE}")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == operator and worker in container["args"]
    rig.deploy("released")
    rig.eventually("a pod of its image runs", lambda: worker in running_images(rig, "released"))
    delete_at_once(rig, "dd/released")
    assert lives(rig) == before


@pytest.mark.parametrize("operator", ["up", "uninstalled"])
def test_a_deletion_never_waits_for_the_operator(release: tuple[ClusterRig, HelmRig], operator: str) -> None:
    """Delete the objects while the operator runs, or is uninstalled. They are gone at once, and the garbage collector deletes the rest."""
    rig, helm = release
    begin(rig)
    if operator == "uninstalled":
        helm.uninstall()
        rig.eventually("the operator is gone", lambda: no_operator_runs(rig))
    delete_at_once(rig, DD, LORA)
    rig.eventually("nothing that they owned is left", lambda: no_child_is_left(rig), deadline_s=GONE_S)


def test_a_namespace_is_gone_with_all_that_was_in_it(release: tuple[ClusterRig, HelmRig]) -> None:
    """Delete the namespace while the operator works on its deployment and its adapter, and wait until it is gone."""
    rig, helm = release
    helm.upgrade()
    # While pods are left, Kubernetes looks at the namespace again after half of their longest grace period: 158 s by default.
    begin(rig, drain={"timeoutSeconds": 20})
    rig.kubectl.text("delete", "namespace", NAMESPACE, "--wait=false")
    rig.eventually("it is gone", lambda: not rig.exists(f"namespace/{NAMESPACE}"), deadline_s=2 * GONE_S)
