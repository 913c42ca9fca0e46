# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` shows: counters of the HTTP edge, and a collector that reads the engine when it is asked.

Labels are bounded: codes and states come from closed lists, ranks from the configuration. No adapter's name, no request's id.
"""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from diffusion_worker.engine.documents import AdapterState, EngineState, RankDocument
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.results import Generation
from diffusion_worker.errors import Fault

PREFIX = "diffusion_worker_"
# From a small model on a GPU to a large picture on a CPU.
# One request's own faults leave the group as it is: the codes of `requests` tell of those.
GROUP_FAULTS = [fault for fault in Fault if fault is not Fault.REQUEST]
SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
# Of `Timings`. From the post-processing of a thumbnail to the denoising of a film.
PHASES = ("queue", "encode", "denoise", "decode", "post")
PHASE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Metrics:
    """The registry of one server process."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(PREFIX + "requests", "Image requests answered, by error code or OK.", ["code"], registry=self._registry)
        self._seconds = Histogram(
            PREFIX + "request_seconds", "Time from an image request to its answer.", buckets=SECONDS_BUCKETS, registry=self._registry
        )
        self._phase_seconds = Histogram(
            PREFIX + "phase_seconds", "Phases of a picture.", ["phase"], buckets=PHASE_BUCKETS, registry=self._registry
        )
        self._registry.register(EngineCollector(engine))

    def observe_request(self, code: str, seconds: float) -> None:
        """Count one answered image request; only pictures go into the histogram, refusals would hide them."""
        self._requests.labels(code=code).inc()
        if code == "OK":
            self._seconds.observe(seconds)

    def observe_generation(self, made: Generation) -> None:
        """The phases of every picture of an answered request."""
        for picture in made.pictures:
            for phase in PHASES:
                self._phase_seconds.labels(phase=phase).observe(getattr(picture.timings, phase))

    def exposition(self) -> tuple[bytes, str]:
        """The text of all metrics and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    """Turns the engine's counters and its state document into metrics when they are scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """All families; called by the registry."""
        document = self._engine.state_document()
        yield from self._counters()
        yield _gauge("requests_in_flight", "Image requests that are being worked on.", document.in_flight)
        yield _gauge("requests_queued", "Image requests that wait for a place in the batch.", document.queued)
        yield _gauge("load_bytes", "Bytes of weights loaded so far, all ranks.", document.load.bytes_done)
        yield _gauge("load_bytes_expected", "Bytes of weights to load, all ranks.", document.load.bytes_total)
        yield _by_state("state", "1 for the state the worker is in.", EngineState, {document.state: 1})
        yield _by_state("adapters", "Adapters by state.", AdapterState, Tally[str](adapter.state for adapter in document.adapters))
        yield from _rank_memory(document.ranks)
        yield from self._group(document.restarts)

    def _group(self, restarts: int) -> Iterator[Metric]:
        yield CounterMetricFamily(PREFIX + "rank_group_restarts", "Times the rank group was started again.", restarts)
        losses = CounterMetricFamily(PREFIX + "rank_group_losses", "Losses of the rank group by kind of fault.", labels=["fault"])
        by_fault = self._engine.life.losses.by_fault
        for fault in GROUP_FAULTS:
            losses.add_metric([fault.value], by_fault.get(fault, 0))
        yield losses
        dropped = CounterMetricFamily(PREFIX + "frames_dropped", "Frames between server and ranks that were no message.", labels=["end"])
        for end, count in zip(("server", "ranks"), self._engine.dropped_frames, strict=True):
            dropped.add_metric([end], count)
        yield dropped

    def _counters(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield CounterMetricFamily(PREFIX + "images", "Pictures made.", stats.pictures)
        yield CounterMetricFamily(PREFIX + "steps", "Steps of the batch.", stats.ticks)
        yield CounterMetricFamily(PREFIX + "step_seconds", "Time the ranks spent in steps.", stats.step_seconds)
        yield CounterMetricFamily(PREFIX + "model_calls", "Merged model calls.", stats.model_calls)
        yield CounterMetricFamily(PREFIX + "pictures_replayed", "Pictures begun again after the rank group was lost.", stats.replayed)
        yield CounterMetricFamily(PREFIX + "model_rows", "Rows of all merged model calls.", stats.rows)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _by_state(name: str, text: str, states: Iterable[str], counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=["state"])
    for state in states:
        family.add_metric([str(state)], counts.get(state, 0))
    return family


def _rank_memory(ranks: list[RankDocument]) -> Iterator[Metric]:
    figures = {
        "rank_weights_bytes": ("Size of a rank's weights.", "weights_bytes"),
        "rank_weights_resident_bytes": ("Part of a rank's weights that is in memory.", "weights_resident_bytes"),
        "rank_mirror_memory_bytes": ("Memory from which a rank's weights come back at wake.", "mirror_memory_bytes"),
    }
    for name, (text, field) in figures.items():
        family = GaugeMetricFamily(PREFIX + name, text, labels=["rank"])
        for rank in ranks:
            family.add_metric([str(rank.rank)], getattr(rank.memory, field))
        yield family
