# SPDX-License-Identifier: Apache-2.0
"""A Prometheus that reads the release's metrics as the chart's PodMonitors say, and answers expressions.

Real: Prometheus, the PodMonitors and what the pods show. Not real: the Prometheus operator, whose translation of a PodMonitor is made
here, and the search for pods, since Debian's Prometheus is built without it. It reads pods by way of `kubectl proxy`, which leads to
them from outside of every cluster.
"""

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from aiohttp.test_utils import unused_port

from support.cluster.rig import ClusterRig
from support.operator.chart_rendering import CHART, KUBERNETES, Chart, Document, of_kind
from tools.demo.installation import RELEASE
from tools.devcluster import programs

EVERY_S = 2
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
        found: list[Document] = self._ask("query_range", query=expression, start=self._began, end=time.time(), step=EVERY_S)["result"]
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
    with subprocess.Popen(
        [*rig.kubectl.command, "proxy", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as proxy:
        try:
            assert proxy.stdout is not None
            server = proxy.stdout.readline().split()[-1]
            (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(monitors, folder / "pods.json", server)))
            with (
                _pods_found(f"http://{server}/api/v1/namespaces/{rig.kubectl.namespace}/pods", folder / "pods.json"),
                _running(folder) as found,
            ):
                yield found
        finally:
            proxy.terminate()


@contextmanager
def _running(folder: Path) -> Iterator[Prometheus]:
    port = unused_port()
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    began, url = time.time(), f"http://127.0.0.1:{port}"
    with (folder / "log").open("w") as log, subprocess.Popen([programs.prometheus(), *words], stdout=log, stderr=log) as process:
        try:
            _wait_ready(url, process, folder / "log")
            yield Prometheus(url, began)
        finally:
            process.terminate()


@contextmanager
def _pods_found(url: str, file: Path) -> Iterator[None]:
    """Keep the file of targets: each port of each running pod, with the labels that Prometheus' own search gives it."""
    ended = threading.Event()

    def keep() -> None:
        while True:
            with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
                running = [pod for pod in json.load(answer)["items"] if pod["status"]["phase"] == "Running"]
                draft = file.with_suffix(".new")
                draft.write_text(json.dumps([target for pod in running for target in _targets(pod)]))
                draft.rename(file)
            if ended.wait(EVERY_S / 2):
                return

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _targets(pod: Document) -> Iterator[Document]:
    about = pod["metadata"]
    labels = {"namespace": about["namespace"], "pod_name": about["name"]}
    for label, value in about.get("labels", {}).items():
        labels |= {f"pod_label_{_name(label)}": value, f"pod_labelpresent_{_name(label)}": "true"}
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            number = str(port["containerPort"])
            own = labels | {"pod_container_port_name": port.get("name", ""), "pod_container_port_number": number}
            yield {
                "targets": [f"{pod['status'].get('podIP')}:{number}"],
                "labels": {f"__meta_kubernetes_{key}": value for key, value in own.items()},
            }


def configuration(monitors: list[Document], pods: Path, server: str) -> Document:
    """Translate PodMonitors into the configuration of a Prometheus that finds pods in a file and reads them through a server."""
    jobs = [
        {
            "job_name": f"{monitor['metadata']['name']}/{number}",
            "file_sd_configs": [{"files": [str(pods)]}],
            "relabel_configs": [*_chosen(monitor["spec"]["selector"]), *_read(monitor["spec"], endpoint, server)],
        }
        for monitor in monitors
        for number, endpoint in enumerate(monitor["spec"]["podMetricsEndpoints"])
    ]
    return {"global": {"scrape_interval": f"{EVERY_S}s", "scrape_timeout": f"{EVERY_S}s"}, "scrape_configs": jobs}


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
    words = [
        "--namespace",
        namespace,
        "--values",
        str(CHART / "ci" / "default-values.yaml"),
        "--kube-version",
        KUBERNETES,
        "--show-only",
        "templates/podmonitor.yaml",
    ]
    text = Chart(programs.helm()).run("template", RELEASE, str(CHART), *words, *chosen)
    return [document for document in yaml.safe_load_all(text) if document]


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no Prometheus within {START_S:g} s: {log.read_text()[-2000:]}")
