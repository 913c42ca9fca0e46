# SPDX-License-Identifier: Apache-2.0
"""A model and adapters from a claim, a bucket and a hub on a real cluster. Secrets come late, or may not be used.

Bucket and hub are a fake in a pod, with a certificate of its own authority; the claim lies in the node's /tmp.
"""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.cluster.rig import ADAPTER_READY, ANY_USER, SERVING, ClusterRig
from support.cluster.store import (
    ACCESS_KEY,
    STORE,
    TRUST,
    apply,
    claim_on_the_node,
    host_of,
    remove_store,
    secret,
    start_store,
    worker_environment,
)
from support.runner import digit_judge
from support.sources import servers
from tools.demo.kubectl import Wanted

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME, KEYS, CLAIM = "styled", "store-keys", "styles"
DD = f"dd/{NAME}"
ON_CLAIM = "diffusion-operator-tests"
FOLDER = f"/claim/{ON_CLAIM}"
WEIGHTS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "loras" / "stripes" / "adapter_model.safetensors"


@pytest.fixture(scope="module")
def rig_with_sources(rig: ClusterRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRig]:
    """Serve a model from a claim on the node, beside a pod with a bucket and a hub; all is removed in the end.

    Adapters may name the Secrets KEYS and TRUST, but KEYS has yet to be made. The worker has a user id that its container image does not
    know.
    """
    apply(rig, *claim_on_the_node(rig.kubectl.namespace, CLAIM))
    fill = f"rm -rf {FOLDER} && mkdir {FOLDER} && cp -r /models/digits /models/loras/frame {FOLDER}"
    start_store(rig, tmp_path_factory.mktemp("store"), served="/models/loras", claim=CLAIM, first=fill)
    rig.deploy(
        NAME,
        model={
            "source": {"pvc": {"claimName": CLAIM, "path": f"{ON_CLAIM}/digits"}},
            "cache": {"emptyDir": {"sizeLimit": "1Gi"}},
        },
        engine={"env": worker_environment(rig)},
        lora={"secrets": [KEYS, TRUST], "claims": [CLAIM]},
        securityContext={"runAsUser": ANY_USER, "runAsGroup": ANY_USER, "fsGroup": ANY_USER},
    )
    rig.wait(DD, SERVING)
    yield rig
    rig.kubectl.text("delete", DD, "--ignore-not-found", deadline_s=60)
    rig.kubectl.text("delete", "lora", "--all", deadline_s=60)
    rig.kubectl.text("exec", STORE, "--", "rm", "-rf", FOLDER)
    remove_store(rig)
    rig.kubectl.text("delete", f"secret/{KEYS}", "--ignore-not-found", deadline_s=30)
    rig.eventually("no pod has the claim", lambda: not rig.pods(NAME))
    rig.kubectl.text("delete", f"pvc/{CLAIM}", f"pv/{CLAIM}", deadline_s=60)


def from_bucket(rig: ClusterRig, name: str, key: str, secret_name: str) -> None:
    source = {
        "uri": f"s3://styles/{key}",
        "endpoint": f"https://{host_of(rig)}",
        "credentialsSecretRef": {"name": secret_name},
    }
    rig.apply("LoRAAdapter", name, {"deploymentRef": {"name": NAME}, "source": {"s3": source}})


def resolved(rig: ClusterRig, resource: str) -> dict[str, Any]:
    return dict(rig.kubectl.get(resource)["status"]["resolved"])


def style_of(rig: ClusterRig, model: str) -> Image.Image:
    return Image.open(io.BytesIO(rig.image(NAME, model).png)).convert("RGB")


def test_a_secret_that_is_not_in_the_deployments_list_is_not_used(rig_with_sources: ClusterRig) -> None:
    rig = rig_with_sources
    from_bucket(rig, "stranger", "stripes/adapter_model.safetensors", "hub-token")
    rig.wait("lora/stranger", Wanted("Accepted", "False", ["SecretNotMounted"]), deadline_s=30)
    message = rig.condition("lora/stranger", "Accepted")["message"]
    assert "hub-token" in message and "spec.lora.secrets" in message
    assert rig.condition(DD, "Ready")["status"] == "True"
    rig.kubectl.text("delete", "lora/stranger", deadline_s=60)


def test_a_model_on_a_claim_is_served_from_there(rig_with_sources: ClusterRig) -> None:
    rig = rig_with_sources
    assert rig.kubectl.get(DD)["status"]["model"]["source"] == f"pvc://{CLAIM}/{ON_CLAIM}/digits"
    assert rig.state(NAME)["model"]["path"] == f"/var/run/diffusion-operator/claims/{CLAIM}/{ON_CLAIM}/digits"
    seen = digit_judge.judge(Image.open(io.BytesIO(rig.image(NAME).png)).convert("RGB"))
    assert (seen.digit, seen.colour) == (7, "red")


def test_an_adapter_on_a_claim_is_read_where_it_lies(rig_with_sources: ClusterRig) -> None:
    rig = rig_with_sources
    rig.apply(
        "LoRAAdapter", "frame", {"deploymentRef": {"name": NAME}, "source": {"pvc": {"claimName": CLAIM, "path": f"{ON_CLAIM}/frame"}}}
    )
    rig.wait("lora/frame", ADAPTER_READY, deadline_s=60)
    assert resolved(rig, "lora/frame")["source"] == f"pvc://{CLAIM}/{ON_CLAIM}/frame"
    assert digit_judge.has_style(style_of(rig, "frame"), "frame")


def test_an_adapter_in_a_bucket_waits_for_its_secret_and_is_served_when_it_is_there(rig_with_sources: ClusterRig) -> None:
    rig = rig_with_sources
    from_bucket(rig, "stripes", "stripes/adapter_model.safetensors", KEYS)
    rig.wait("lora/stripes", Wanted("SourceResolved", "False", ["SecretMissing"]), deadline_s=60)
    assert KEYS in rig.condition("lora/stripes", "SourceResolved")["message"]
    assert rig.refusal(NAME, "stripes").code == "AdapterNotLoaded"
    apply(rig, secret(KEYS, accessKeyId=ACCESS_KEY.encode(), secretAccessKey=b"not looked at", token=ACCESS_KEY.encode()))
    # The kubelet looks at a pod's volumes once a minute, and at once where the pod itself changes.
    rig.kubectl.text("annotate", "pod", rig.pod(NAME), "diffusion-tests/look-again=now")
    rig.wait("lora/stripes", ADAPTER_READY, deadline_s=120)
    found = resolved(rig, "lora/stripes")
    assert found["digest"] == f"sha256:{hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()}"
    assert (found["source"], found["rank"]) == (
        f"s3://styles/stripes/adapter_model.safetensors at https://{host_of(rig)}", 8,
    )  # fmt: skip
    assert digit_judge.has_style(style_of(rig, "stripes"), "stripes")
    everything = rig.kubectl.text("get", "lora,dd,configmaps,events", "-o", "yaml") + rig.kubectl.text("logs", rig.pod(NAME))
    assert ACCESS_KEY not in everything and "not looked at" not in everything


def test_an_adapter_from_a_hub_says_which_commit_it_was(rig_with_sources: ClusterRig) -> None:
    """Load an adapter from a hub, with the token in the Secret KEYS that the previous test created."""
    rig = rig_with_sources
    source = {"repo": "styles/paper", "file": "adapter_model.safetensors", "tokenSecretRef": {"name": KEYS}}
    rig.apply("LoRAAdapter", "paper", {"deploymentRef": {"name": NAME}, "source": {"huggingFace": source}})
    rig.wait("lora/paper", ADAPTER_READY, deadline_s=60)
    found = resolved(rig, "lora/paper")
    assert (found["revision"], found["source"]) == (servers.COMMIT, "hf://styles/paper@main/adapter_model.safetensors")
    assert found["components"] == ["Transformer"]
    assert digit_judge.has_style(style_of(rig, "paper"), "paper")
