# SPDX-License-Identifier: Apache-2.0
"""Metrics from values that are counted elsewhere, for collectors; every name has the worker's prefix."""

import math
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from diffusion_worker.engine.state.histogram import Durations

PREFIX = "diffusion_worker_"


def gauge(name: str, text: str, value: float) -> Metric:
    """Wrap a momentary value under a name with the worker's prefix; `text` becomes the help line."""
    return GaugeMetricFamily(PREFIX + name, text, value)


def counter(name: str, text: str, value: float) -> Metric:
    """Wrap a total that never falls; the metric's name gets the worker's prefix, and in the exposition the ending `_total`."""
    return CounterMetricFamily(PREFIX + name, text, value)


def labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Build one counter family with a sample for each entry of `values`, whose key is the label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([str(value)], count)
    return family


def histogram(name: str, text: str, durations: Mapping[str, Durations], *, label: str | None = None) -> Metric:
    """Return a histogram family with a series for each key of `durations`, a value of `label`; without a label, the only key is ignored."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for value, each in durations.items():
        buckets = [("+Inf" if math.isinf(bound) else str(bound), float(count)) for bound, count in each.cumulative()]
        family.add_metric([value] if label else [], buckets, each.total_s)
    return family


def by_state(name: str, text: str, states: Iterable[str], counts: Mapping[str, int], *, label: str = "state") -> Metric:
    """Return one gauge family with a sample for each of `states`, labelled by `label`: its value in `counts`, else 0."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for state in states:
        family.add_metric([str(state)], counts.get(state, 0))
    return family


def by_rank(name: str, text: str, values: Mapping[int, float]) -> Metric:
    """Return a gauge family with a sample for each rank, labelled by the rank's number."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=["rank"])
    for rank, value in values.items():
        family.add_metric([str(rank)], value)
    return family
