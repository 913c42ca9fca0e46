# SPDX-License-Identifier: Apache-2.0
"""A Prometheus that reads the release's metrics as the chart's PodMonitors say, and evaluates expressions.

Real: Prometheus, the PodMonitors and the pods' metrics. Not real: the Prometheus operator, in whose place this file translates a
PodMonitor, and the discovery of pods, which Debian's Prometheus lacks. Prometheus reads pods through `kubectl proxy`, which reaches them
from outside of every cluster.
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

from support.cluster.rig import ClusterRig
from support.operator.chart_rendering import CHART, KUBERNETES, Chart, Document, of_kind
from support.ports import unused_port
from tools.demo.installation import RELEASE
from tools.devcluster import programs

EVERY_S = 2
START_S = 30.0


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str, began: float) -> None:
        self._url, self._began = url, began

    def now(self, expression: str) -> list[Document]:
        """Return the present series of an expression, each with its labels and its value."""
        return self._series("query", query=expression)

    def ever(self, expression: str) -> list[Document]:
        """Return the series of an expression, sampled every two seconds since this Prometheus started, each with its labels and values."""
        return self._series("query_range", query=expression, start=self._began, end=time.time(), step=EVERY_S)

    def up(self) -> list[str]:
        """List the pods whose metrics Prometheus reads."""
        return [str(one["metric"]["pod"]) for one in self.now("up == 1")]

    def _series(self, what: str, **words: Any) -> list[Document]:
        with urllib.request.urlopen(f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(words)}", timeout=10) as answer:
            found: list[Document] = json.load(answer)["data"]["result"]
        return found


@contextmanager
def prometheus(rig: ClusterRig, folder: Path) -> Iterator[Prometheus]:
    """Run a Prometheus while the block lasts; its data are in `folder`.

    It reads the pods of the rig's namespace that the chart's PodMonitors select.
    """
    targets, began, url = folder / "targets.json", time.time(), f"http://127.0.0.1:{unused_port()}"
    scraped = {"job_name": "pods", "file_sd_configs": [{"files": [str(targets)]}]}
    every = {"scrape_interval": f"{EVERY_S}s", "scrape_timeout": f"{EVERY_S}s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"global": every, "scrape_configs": [scraped]}))
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={url[7:]}"]
    with _running([*rig.kubectl.command, "proxy", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as proxy:
        assert proxy.stdout is not None
        server = proxy.stdout.readline().split()[-1]
        with (
            _targets_kept(_monitors(rig.kubectl.namespace), server, rig.kubectl.namespace, targets),
            (folder / "log").open("w") as log,
            _running([str(programs.prometheus()), *words], stdout=log, stderr=log) as process,
        ):
            _wait_ready(url, process, folder / "log")
            yield Prometheus(url, began)


@contextmanager
def _running(command: list[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def _targets_kept(monitors: list[Document], server: str, namespace: str, file: Path) -> Iterator[None]:
    """Keep the file of targets up to date: each endpoint of each PodMonitor in each running pod that its selector matches."""
    ended = threading.Event()

    def keep() -> None:
        while True:
            with suppress(OSError):
                found: list[Document] = []
                for monitor in monitors:
                    words = urllib.parse.urlencode({"labelSelector": selector(monitor), "fieldSelector": "status.phase=Running"})
                    with urllib.request.urlopen(f"http://{server}/api/v1/namespaces/{namespace}/pods?{words}", timeout=10) as answer:
                        found += [target for pod in json.load(answer)["items"] for target in targets_in(pod, monitor, server)]
                draft = file.with_suffix(".new")
                draft.write_text(json.dumps(found))
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


def selector(monitor: Document) -> str:
    """Return a PodMonitor's selector as the API's text for label selectors, such as `a=b,c`; expressions other than `Exists` fail."""
    wanted = monitor["spec"]["selector"]
    rules = wanted.get("matchExpressions", [])
    assert all(rule["operator"] == "Exists" for rule in rules), rules
    return ",".join([*(f"{label}={value}" for label, value in wanted.get("matchLabels", {}).items()), *(rule["key"] for rule in rules)])


def targets_in(pod: Document, monitor: Document, server: str) -> Iterator[Document]:
    """Yield a Prometheus target for each endpoint of a PodMonitor whose port the pod has, with the labels that the monitor asks for.

    The target's address is `server`, a proxy of the API, and a label has the path to the pod's metrics there.
    """
    about, spec = pod["metadata"], monitor["spec"]
    labels = {"namespace": about["namespace"], "pod": about["name"]}
    labels |= {re.sub(r"\W", "_", label): about["labels"].get(label, "") for label in spec.get("podTargetLabels", [])}
    ports = {port.get("name"): port["containerPort"] for container in pod["spec"]["containers"] for port in container.get("ports", [])}
    for number, endpoint in enumerate(spec["podMetricsEndpoints"]):
        if endpoint["port"] in ports:
            way = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}:{ports[endpoint['port']]}/proxy"
            own = {"job": f"{monitor['metadata']['name']}/{number}", "__metrics_path__": way + endpoint.get("path", "/metrics")}
            yield {"targets": [server], "labels": labels | own}


def _monitors(namespace: str) -> list[Document]:
    words = f"--namespace {namespace} --kube-version {KUBERNETES} --show-only templates/podmonitor.yaml"
    values = ["--values", str(CHART / "ci" / "default-values.yaml"), "--set", "metrics.podMonitor=true,metrics.workerPodMonitor=true"]
    text = Chart(programs.helm()).run("template", RELEASE, str(CHART), *words.split(), *values)
    return of_kind([document for document in yaml.safe_load_all(text) if document], "PodMonitor")


def _wait_ready(url: str, process: "subprocess.Popen[str]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no Prometheus within {START_S:g} s: {log.read_text()[-2000:]}")
