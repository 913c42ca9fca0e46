# SPDX-License-Identifier: Apache-2.0
"""A Prometheus that reads the release's metrics as the chart's PodMonitors say, and answers expressions.

Real: Prometheus, the PodMonitors and what the pods show. Not real: the Prometheus operator, whose translation of a PodMonitor is made
here. It reads pods by way of the API server, which leads to them from outside of every cluster.
"""

import base64
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from support.cluster.rig import ClusterRig
from support.operator.chart_rendering import CHART, Chart, Document, of_kind
from tools.demo.installation import RELEASE
from tools.devcluster import cluster, programs
from tools.devcluster.apiserver import free_ports

EVERY = "2s"
START_S = 30.0


class Prometheus:
    """The HTTP API of one that runs."""

    def __init__(self, url: str, began: float) -> None:
        self._url, self._began = url, began

    def now(self, expression: str) -> list[Document]:
        """Return the series of an expression, each with its labels and its value at this moment."""
        found: list[Document] = self._ask("query", query=expression)["result"]
        return found

    def ever(self, expression: str) -> list[Document]:
        """Return the series of an expression at any moment since this Prometheus began."""
        found: list[Document] = self._ask("query_range", query=expression, start=self._began, end=time.time(), step=2)["result"]
        return found

    def up(self) -> list[str]:
        """List the pods whose metrics it gets."""
        return [str(one["metric"]["pod"]) for one in self.now("up == 1")]

    def _ask(self, what: str, **words: Any) -> Document:
        with urllib.request.urlopen(f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(words)}", timeout=10) as answer:
            data: Document = json.load(answer)["data"]
        return data


@contextmanager
def prometheus(rig: ClusterRig, folder: Path) -> Iterator[Prometheus]:
    """Run one for as long as the block lasts; its data are in the folder."""
    monitors = of_kind(_rendered(rig.kubectl.namespace), "PodMonitor")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(monitors, _access(folder))))
    [port] = free_ports(1)
    words = [
        *(programs.prometheus(), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    began, url = time.time(), f"http://127.0.0.1:{port}"
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            _wait_ready(url, process, folder / "log")
            yield Prometheus(url, began)
        finally:
            process.terminate()


def configuration(monitors: list[Document], access: Document) -> Document:
    """Translate PodMonitors into the configuration of a Prometheus that has this access to the API server."""
    jobs = [
        {
            "job_name": f"{monitor['metadata']['name']}/{number}",
            "scheme": "https",
            "tls_config": access["tls"],
            "kubernetes_sd_configs": [{"role": "pod", "kubeconfig_file": access["kubeconfig"], **_namespaces(monitor)}],
            "relabel_configs": [*_chosen(monitor["spec"]["selector"]), *_read(monitor["spec"], endpoint, access["server"])],
        }
        for monitor in monitors
        for number, endpoint in enumerate(monitor["spec"]["podMetricsEndpoints"])
    ]
    return {"global": {"scrape_interval": EVERY, "scrape_timeout": EVERY}, "scrape_configs": jobs}


def _namespaces(monitor: Document) -> Document:
    selector = monitor["spec"].get("namespaceSelector", {"matchNames": [monitor["metadata"]["namespace"]]})
    return {} if selector.get("any") else {"namespaces": {"names": selector["matchNames"]}}


def _chosen(selector: Document) -> Iterator[Document]:
    for label, value in selector.get("matchLabels", {}).items():
        yield {"action": "keep", "source_labels": [f"__meta_kubernetes_pod_label_{_name(label)}"], "regex": re.escape(value)}
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "Exists", rule
        yield {"action": "keep", "source_labels": [f"__meta_kubernetes_pod_labelpresent_{_name(rule['key'])}"], "regex": "true"}


def _read(spec: Document, endpoint: Document, server: str) -> Iterator[Document]:
    pod = ["__meta_kubernetes_namespace", "__meta_kubernetes_pod_name", "__meta_kubernetes_pod_container_port_number"]
    path = f"/api/v1/namespaces/$1/pods/$2:$3/proxy{endpoint.get('path', '/metrics')}"
    yield {"action": "keep", "source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"]}
    yield {"source_labels": pod, "separator": ";", "regex": "(.+);(.+);(.+)", "target_label": "__metrics_path__", "replacement": path}
    yield {"target_label": "__address__", "replacement": server}
    yield {"source_labels": pod[:1], "target_label": "namespace"}
    yield {"source_labels": pod[1:2], "target_label": "pod"}
    for label in spec.get("podTargetLabels", []):
        yield {"source_labels": [f"__meta_kubernetes_pod_label_{_name(label)}"], "target_label": _name(label)}


def _name(label: str) -> str:
    return re.sub(r"\W", "_", label)


def _rendered(namespace: str) -> list[Document]:
    chosen = [word for name in ("podMonitor", "workerPodMonitor") for word in ("--set", f"metrics.{name}=true")]
    text = Chart(programs.helm()).run("template", RELEASE, str(CHART), "--namespace", namespace, *chosen)
    return [document for document in yaml.safe_load_all(text) if document]


def _access(folder: Path) -> Document:
    """Find the way to the API server and the keys, which go into files of the folder."""
    provider = cluster.provider()
    shown = subprocess.run(
        [provider.kubectl(), "--kubeconfig", provider.kubeconfig(), "config", "view", "--raw", "--flatten", "--minify", "--output", "json"],
        capture_output=True,
        check=True,
        timeout=30,
    )
    document = json.loads(shown.stdout)
    server, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    held = {"ca": server["certificate-authority-data"], "cert": user["client-certificate-data"], "key": user["client-key-data"]}
    for name, content in held.items():
        (folder / name).write_bytes(base64.b64decode(content))
    tls = {f"{name}_file": str(folder / name) for name in held}
    return {"kubeconfig": str(provider.kubeconfig()), "server": urllib.parse.urlsplit(server["server"]).netloc, "tls": tls}


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no Prometheus within {START_S:g} s: {log.read_text()[-2000:]}")
