# SPDX-License-Identifier: Apache-2.0
"""Deployments that cannot work, on a real cluster: each reports its error, and what runs beside it goes on."""

from functools import partial

import pytest

from support.cluster.rig import ClusterRig
from tools.demo.kubectl import Wanted
from tools.devcluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

FAKE_GPU = "example.com/fake-gpu"


def test_an_image_that_cannot_be_pulled_is_named(rig: ClusterRig) -> None:
    rig.deploy("no-image", engine={"image": "registry.invalid/none:1"})
    found = rig.wait("dd/no-image", Wanted("Ready", "False", ["ImagePullError"]), deadline_s=60)
    rig.eventually("the image's name in a condition", lambda: "registry.invalid/none:1" in rig.kubectl.text("describe", "dd/no-image"))
    assert found["status"]["readyReplicas"] == 0
    rig.kubectl.text("delete", "dd/no-image", deadline_s=60)


def test_a_model_path_that_does_not_exist_is_told_in_the_workers_own_words(rig: ClusterRig) -> None:
    rig.deploy("no-model", model="/models/none")
    rig.wait("dd/no-model", Wanted("Ready", "False", ["ModelError"]), deadline_s=120)
    message = rig.condition("dd/no-model", "Ready")["message"]
    assert "/models/none" in message
    assert "expected a diffusers folder" in message
    rig.kubectl.text("delete", "dd/no-model", deadline_s=60)


def test_a_replica_waits_for_gpus_that_nobody_has_and_starts_when_they_appear(rig: ClusterRig) -> None:
    resources = {"gpuResourceName": FAKE_GPU, "requests": {"cpu": "100m", "memory": "512Mi"}, "sharedMemory": "128Mi"}
    rig.deploy("wants-gpus", ranks=2, resources=resources)
    rig.wait("dd/wants-gpus", Wanted("Scheduled", "False", ["InsufficientGPU"]), deadline_s=60)
    assert FAKE_GPU in rig.condition("dd/wants-gpus", "Scheduled")["message"]
    cluster.patch_node_resource(FAKE_GPU, 2)
    try:
        rig.wait("dd/wants-gpus", Wanted("Scheduled", "True"), deadline_s=120)
        (pod,) = rig.pods("wants-gpus")
        assert pod["spec"]["containers"][0]["resources"]["limits"][FAKE_GPU] == "2"
        # No device backs that resource, and a pod with a GPU never serves on the CPU instead.
        rig.wait("dd/wants-gpus", Wanted("Ready", "False", ["GPUUnavailable"]), deadline_s=120)
        assert "--device cuda: expected a GPU that torch can use" in rig.condition("dd/wants-gpus", "Ready")["message"]
    finally:
        rig.kubectl.text("delete", "dd/wants-gpus", deadline_s=60)
        cluster.patch_node_resource(FAKE_GPU, 0)


MISSING = {
    "no-config": ({"configMap": {"name": "nothing"}}, 'configmap "nothing" not found'),
    "no-secret": ({"secret": {"secretName": "nothing"}}, 'secret "nothing" not found'),
    "no-claim": ({"persistentVolumeClaim": {"claimName": "nothing"}}, 'persistentvolumeclaim "nothing" not found'),
}


def test_a_pod_that_waits_says_what_for(rig: ClusterRig) -> None:
    words = {name: text for name, (_, text) in MISSING.items()} | {"no-memory": "FailedCreatePodSandBox"}
    for name, (source, _) in MISSING.items():
        mounts = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
        rig.deploy(name, volumes=[{"name": "v", **source}], engine=mounts)
    tiny = {"gpuResourceName": "none", "requests": {"cpu": "100m", "memory": "1Mi"}, "limits": {"memory": "1Mi"}, "sharedMemory": "128Mi"}
    rig.deploy("no-memory", resources=tiny)
    for name, text in words.items():
        message = partial(lambda name: rig.condition(f"dd/{name}", "Ready")["message"], name)
        rig.eventually(f"{name} says {text}", lambda message=message, text=text: text in message(), deadline_s=180)
    rig.kubectl.text("delete", *(f"dd/{name}" for name in words), deadline_s=60)
