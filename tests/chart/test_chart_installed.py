# SPDX-License-Identifier: Apache-2.0
"""The chart's life in a real API server: first install, upgrade, uninstall while objects are there, and a new install."""

import base64
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffusion_operator.settings import read_operator_keys
from support.operator.chart_rendering import CHART, ROOT
from support.release.registry import registry
from tools.devcluster import programs
from tools.devcluster.apiserver import apiserver
from tools.release.chart import publish

pytestmark = pytest.mark.apiserver

Command = Callable[..., str]
VALUES = ("--values", str(CHART / "ci" / "default-values.yaml"))
KEY_SECRET = "secret/diffusion-operator-key"


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    with apiserver() as path:
        yield path


def command(program: Path, kubeconfig: Path) -> Command:
    def run(*arguments: str) -> str:
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60, check=False, env=environment)
        if done.returncode != 0:
            raise AssertionError(f"{program.name} {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    return run


@pytest.fixture(scope="module")
def kubectl(kubeconfig: Path) -> Command:
    return command(programs.kube() / "kubectl", kubeconfig)


@pytest.fixture(scope="module")
def helm(kubeconfig: Path) -> Command:
    return command(programs.helm(), kubeconfig)


def install(helm: Command, namespace: str, *settings: str) -> str:
    return helm(
        "upgrade", "--install", "diffusion-operator", str(CHART), "--namespace", namespace, "--create-namespace", *VALUES, *settings
    )


def read(kubectl: Command, namespace: str, what: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(kubectl("--namespace", namespace, "get", what, "--output", "json"))
    return document


def test_the_whole_life_of_a_release(helm: Command, kubectl: Command) -> None:
    notes = " ".join(install(helm, "one").split())
    for part in ("namespace one", "kubectl delete crd", "install the operator in a namespace of its own"):
        assert part in notes
    kubectl("wait", "--for", "condition=Established", "--timeout", "30s", "crd/diffusiondeployments.diffusion-operator.dev")
    key = read(kubectl, "one", KEY_SECRET)["data"]

    install(helm, "one", "--set", "crds.keep=true", "--set", "podAnnotations.changed=yes")
    assert read(kubectl, "one", KEY_SECRET)["data"] == key
    assert read(kubectl, "one", "deployment/diffusion-operator")["spec"]["template"]["metadata"]["annotations"]["changed"] == "yes"

    kubectl("--namespace", "one", "apply", "--filename", str(ROOT / "examples" / "quickstart"))
    helm("uninstall", "diffusion-operator", "--namespace", "one")
    assert read(kubectl, "one", "dd/digits")["spec"]["replicas"] == 1
    assert read(kubectl, "one", KEY_SECRET)["data"] == key

    install(helm, "one")
    assert read(kubectl, "one", KEY_SECRET)["data"] == key


def test_a_second_release_leaves_the_crds_to_the_first(helm: Command, kubectl: Command) -> None:
    install(helm, "one")
    with pytest.raises(AssertionError, match=r"invalid ownership metadata"):
        install(helm, "two")
    install(helm, "two", "--set", "crds.enabled=false")
    assert read(kubectl, "two", "role/diffusion-operator-two")["rules"] == read(kubectl, "one", "role/diffusion-operator-one")["rules"]


def test_a_released_chart_is_installed_by_the_line_of_the_page(helm: Command, kubectl: Command, tmp_path: Path) -> None:
    (line,) = re.findall(r"^helm (upgrade .* oci://.*)$", (ROOT / "docs" / "install.md").read_text(), flags=re.MULTILINE)
    operator, worker = (f"registry.example/{name}@sha256:{'0123456789abcdef' * 4}" for name in ("operator", "worker"))
    with registry(tmp_path) as address:
        name, digest = publish(address, "1.2.3", operator=operator, worker=worker)
        words = line.replace("REGISTRY", address).replace("sha256:DIGEST", digest).split()
        assert f"oci://{name}@{digest}" in words
        # The CRDs are those of the release before, in the same API server.
        helm(*words, "--plain-http", "--set", "crds.enabled=false")
    (container,) = read(kubectl, "diffusion", "deployment/diffusion-operator")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == operator and worker in container["args"]
    assert json.loads(helm("list", "--namespace", "diffusion", "--output", "json"))[0]["chart"] == "diffusion-operator-1.2.3"


def test_the_key_is_rotated_by_the_steps_of_the_page(helm: Command, kubectl: Command, kubeconfig: Path, tmp_path: Path) -> None:
    install(helm, "one")
    own = tmp_path / "kubeconfig"
    own.write_text(kubeconfig.read_text())
    environment = {**os.environ, "KUBECONFIG": str(own), "PATH": f"{programs.kube()}:{os.environ['PATH']}"}
    first, second = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "security.md").read_text(), flags=re.DOTALL)

    def keys(document: dict[str, Any]) -> tuple[bytes, ...]:
        path = tmp_path / "key"
        path.write_bytes(base64.b64decode(document["data"]["key"]))
        return read_operator_keys(path)

    (old,) = keys(read(kubectl, "one", KEY_SECRET))
    between = f"kubectl get {KEY_SECRET} --output json > {tmp_path}/between"
    pause = "sleep 1.1"  # kubectl refuses a second restart within a second; people wait longer, as the page says
    script = "\n".join(("set -eu", "kubectl config set-context --current --namespace one", first, between, pause, second))
    subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=60)
    (new,) = keys(read(kubectl, "one", KEY_SECRET))
    assert keys(json.loads((tmp_path / "between").read_text())) == (new, old)
    assert new != old
    install(helm, "one")
    assert keys(read(kubectl, "one", KEY_SECRET)) == (new,)


# verb, resource, subresource, namespace, allowed?
RIGHTS = [
    ("list", "diffusiondeployments.diffusion-operator.dev", "", "one", True),
    ("patch", "diffusiondeployments.diffusion-operator.dev", "", "one", False),
    ("patch", "diffusiondeployments.diffusion-operator.dev", "status", "one", True),
    ("create", "pods", "", "one", True),
    ("create", "pods", "exec", "one", False),
    ("get", "pods", "log", "one", False),
    ("patch", "secrets", "", "one", True),
    ("get", "secrets", "", "one", False),
    ("list", "secrets", "", "one", False),
    ("create", "deployments.apps", "", "one", False),
    ("list", "pods", "", "default", False),
]


def test_the_operators_account_may_do_what_it_does_and_no_more(helm: Command, kubectl: Command) -> None:
    install(helm, "one")

    def may(verb: str, resource: str, subresource: str, namespace: str) -> bool:
        arguments = ("auth", "can-i", verb, resource, "--subresource", subresource, "--namespace", namespace)
        try:
            return kubectl(*arguments, "--as=system:serviceaccount:one:diffusion-operator").strip() == "yes"
        except AssertionError:
            return False

    found = [(*question, may(*question)) for *question, _ in RIGHTS]
    assert found == RIGHTS
