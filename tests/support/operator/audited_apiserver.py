# SPDX-License-Identifier: Apache-2.0
"""A real API server that notes what accounts ask for, with the chart's accounts and roles, and the operator's program under one of them.

Namespaces enforce the restricted profile of Pod Security. Owner references are checked as OpenShift does it.

Real: the API server, its audit log, the accounts and the program. Not real: there is no kubelet, so no pod runs.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp.test_utils import unused_port
from kubernetes import client, config

from diffusion_operator.api.names import GROUP
from support.operator.chart_rendering import NAMESPACE, Chart, Document, the_only
from support.operator.real_apiserver import install_crds, kubectl
from tools.devcluster.apiserver import apiserver

DEADLINE_S = 40.0
STOP_TIMEOUT_S = 30.0
RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class Right(NamedTuple):
    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


class OperatorProgram(NamedTuple):
    process: subprocess.Popen[bytes]
    output: Path

    def eventually(self, look: Callable[[], Any]) -> Any:
        """The first truthy answer; fails at once when the program ends."""
        ends = time.monotonic() + DEADLINE_S
        while not (found := look()):
            assert time.monotonic() < ends and self.process.poll() is None, self.output.read_text()[-4000:]
            time.sleep(0.2)
        return found


class AuditedApiserver:
    """Written to as its administrator."""

    def __init__(self, kubeconfig: Path, chart: Chart) -> None:
        self.kubeconfig = kubeconfig
        self._chart = chart
        install_crds(kubeconfig)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return kubectl(self.kubeconfig, *words, stdin=stdin)

    def apply(self, *documents: Document) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)}))

    def namespace(self, name: str) -> None:
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})

    def rendered(self, values: str, **overrides: object) -> list[Document]:
        return self._chart.documents(values, overrides=overrides)

    def give_rights(self, documents: Sequence[Document]) -> None:
        """What the chart says about accounts, and nothing else of it."""
        self.apply(*(document for document in documents if document["kind"] in RIGHTS))

    def kubeconfig_of(self, account: str) -> Path:
        token = self.kubectl("create", "token", account, "--namespace", NAMESPACE).strip()
        content = json.loads(self.kubeconfig.read_text())
        content["users"][0]["user"] = {"token": token}
        path = self.kubeconfig.with_name(f"{account}-kubeconfig")
        path.write_text(json.dumps(content))
        return path

    @contextmanager
    def operator(self, documents: Sequence[Document], keys: Sequence[str]) -> Iterator["OperatorProgram"]:
        """The program as the chart starts it, with these keys."""
        spec = the_only(list(documents), "Deployment")["spec"]["template"]["spec"]
        with tempfile.TemporaryDirectory(prefix="operator-") as folder:
            key_file, output = Path(folder) / "key", Path(folder) / "output.txt"
            key_file.write_text("\n".join(keys))
            arguments = [str(key_file) if "/key/" in one else one for one in spec["containers"][0]["args"]]
            ports = ["--liveness-port", str(unused_port()), "--metrics-port", "0"]
            environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig_of(spec["serviceAccountName"])), "PYTHONUNBUFFERED": "1"}
            with output.open("wb") as written:
                command = [sys.executable, "-m", "diffusion_operator", *arguments, *ports]
                process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=environment)
            try:
                yield OperatorProgram(process, output)
                process.terminate()
                process.wait(STOP_TIMEOUT_S)
            finally:
                process.kill()

    def try_pod(self, pod: Document) -> None:
        """Whether admission lets it in; nothing is made. Raises with the refusal."""
        self.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))

    def may(self, user: str, verb: str, resource: str, *, namespace: str) -> bool:
        """What `kubectl auth can-i --as` asks; of our group."""
        resource, _, subresource = resource.partition("/")
        about = {"group": GROUP, "resource": resource, "subresource": subresource, "verb": verb, "namespace": namespace}
        review = {"spec": {"user": user, "resourceAttributes": about}}
        with config.new_client_from_config(config_file=str(self.kubeconfig)) as connection:
            return bool(client.AuthorizationV1Api(connection).create_subject_access_review(review).status.allowed)

    def allowed(self, account: str) -> set[Right]:
        """What it asked for and got."""
        return {right for entry in self._asked(account) if not _is_refused(entry) for right in right_of(entry)}

    def refused(self, account: str) -> set[str]:
        return {f"{right} in {entry['objectRef']}" for entry in self._asked(account) if _is_refused(entry) for right in right_of(entry)}

    def _asked(self, account: str) -> Iterator[dict[str, Any]]:
        """Each request of the account that was about a resource."""
        user = f"system:serviceaccount:{NAMESPACE}:{account}"
        for entry in map(json.loads, (self.kubeconfig.parent / "audit.log").read_text().splitlines()):
            if entry["user"]["username"] == user and "resource" in entry.get("objectRef", {}):
                yield entry


def _is_refused(entry: dict[str, Any]) -> bool:
    return entry.get("responseStatus", {}).get("code") in (401, 403)


def right_of(entry: dict[str, Any]) -> Iterator[Right]:
    """An apply that makes an object takes the right to create it as well."""
    about = entry["objectRef"]
    resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    yield Right(about.get("apiGroup", ""), resource, entry["verb"])
    if entry["verb"] == "patch" and entry.get("responseStatus", {}).get("code") == 201:
        yield Right(about.get("apiGroup", ""), resource, "create")


def granted(role: Document) -> set[Right]:
    rules = [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in role["rules"]]
    return {Right(*one) for rule in rules for one in itertools.product(*rule)}


@contextmanager
def audited_apiserver(chart: Chart) -> Iterator[AuditedApiserver]:
    with apiserver(audited=True, admission=["OwnerReferencesPermissionEnforcement"]) as kubeconfig:
        yield AuditedApiserver(kubeconfig, chart)
