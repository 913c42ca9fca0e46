# SPDX-License-Identifier: Apache-2.0
"""Search for the metrics that the chart's expressions read, and for those metrics and labels that do not exist.

Real: the operator's registry and the page of the worker's metrics, which other tests compare with the worker.
"""

import re
from types import SimpleNamespace
from typing import Any, NamedTuple

from diffusion_operator import metrics
from diffusion_operator.election.leadership import Leadership
from support.operator.chart_rendering import ROOT

# Labels that the PodMonitors' scrape configuration adds to every series.
TARGET_LABELS = {"namespace", "pod", "diffusion_operator_dev_deployment"}


class Selector(NamedTuple):
    """A metric and the values of its labels that an expression selects."""

    metric: str
    labels: dict[str, str]
    without: dict[str, str]
    """Values that it leaves out."""


def selectors(expression: str) -> list[Selector]:
    """Return the metrics and labels that a PromQL expression selects. Promtool checks its syntax."""
    found = re.findall(r"\b(diffusion_\w+_\w+)\b(?:\{([^}]*)\})?", re.sub(r"by \([^)]*\)", "", expression))
    wanted, left_out = (r'(\w+)\s*=~?\s*"([^"]*)"', r'(\w+)\s*!=\s*"([^"]*)"')
    return [Selector(metric, dict(re.findall(wanted, labels)), dict(re.findall(left_out, labels))) for metric, labels in found]


def grouped(expression: str) -> set[str]:
    """Return the labels that an expression's aggregations keep."""
    return {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in re.findall(r"\w+", labels)}


def series(name: str, kind: str) -> list[str]:
    """Return the names of a metric's time series in Prometheus: three with suffixes for a histogram, otherwise the metric's own."""
    return [f"{name}_{end}" for end in ("bucket", "sum", "count")] if kind == "histogram" else [name]


def of_workers() -> dict[str, set[str]]:
    """Return the labels of each series of workers, from the page that tests of the worker compare with its metrics."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (counter|gauge|histogram) \|([^|]*)\|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return {
        f"diffusion_worker_{one}": set(re.findall(r"`(\w+)`", labels)) | ({"le"} if kind == "histogram" else set())
        for name, kind, labels in rows
        for one in series(name, kind)
    }


def of_the_operator() -> dict[str, set[str]]:
    """Return the labels of each series of the operator, from its registry and from what its process registers at the start."""
    found: dict[str, set[str]] = {}
    runtime: Any = SimpleNamespace(ready_reasons={}, degraded_reasons={}, statuses={}, memories={})
    queue: Any = SimpleNamespace(waiting=0, oldest_s=0.0)
    registered = metrics.register(runtime, lambda: queue, [], Leadership.for_ever())
    collectors = list(metrics.REGISTRY._collector_to_names)
    for one in registered:
        metrics.REGISTRY.unregister(one)
    for collector in collectors:
        for family in collector.collect():
            labels = set(getattr(collector, "_labelnames", ())) | set(getattr(family, "_labelnames", ()))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found |= {one: labels | ({"le"} if family.type == "histogram" else set()) for one in series(name, family.type)}
    return found


KNOWN = of_workers() | of_the_operator()


def wrong_names(expression: str) -> list[str]:
    """Return the names that an alert or panel reads in vain; AssertionError if it reads no metric.

    These are unknown metrics, labels that a selector's metric lacks, and labels in `by` that none of its metrics has.
    """
    looked_at = selectors(expression)
    assert looked_at, expression
    unknown = [one.metric for one in looked_at if one.metric not in KNOWN]
    labels = {one.metric: KNOWN.get(one.metric, set()) | TARGET_LABELS for one in looked_at}
    wrong = [f"{one.metric}{{{label}}}" for one in looked_at for label in one.labels if label not in labels[one.metric]]
    return unknown + wrong + sorted(grouped(expression) - set.union(*labels.values()))
