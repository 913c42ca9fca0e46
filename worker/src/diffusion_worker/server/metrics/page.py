# SPDX-License-Identifier: Apache-2.0
"""The content of `/metrics`: counters of the HTTP edge, the engine, and the server process.

Labels are bounded: codes, routes, states and phases come from closed lists, ranks from the configuration. No label holds an adapter's
name or a request's id. `docs/metrics.md` lists all metrics, and a test compares it.
"""

import asyncio
from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.state.histogram import BOUNDS_S
from diffusion_worker.engine.state.request_events import Generation, Timings
from diffusion_worker.errors import ErrorCode
from diffusion_worker.server.encoding.decoders import Decoders
from diffusion_worker.server.encoding.threads import EncodingThreads
from diffusion_worker.server.metrics.engine import OK, EngineCollector
from diffusion_worker.server.metrics.families import PREFIX, gauge, histogram

# The routes that make images, by path.
ROUTES = {"/v1/images/generations": "generations", "/v1/images/edits": "edits"}
CLIENT_GONE = "ClientGone"
CODES = (OK, CLIENT_GONE, *ErrorCode)
# The fields of `Timings` that follow one another; `total` includes the time between them as well.
PHASES = tuple(name for name in Timings.__struct_fields__ if name != "total")
# Buckets from a small model on a GPU to a large image on a CPU.
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
# Buckets from 16 MiB to 256 GiB.
MEMORY_BUCKETS = tuple(float(2**power) for power in range(24, 39, 2))


class Metrics:
    """Prometheus metrics of the server: its requests, its engine, image encoding and the process itself, in a registry of their own."""

    def __init__(self, engine: Engine, encoding: EncodingThreads, decoders: Decoders) -> None:
        # No second series with the creation time of each counter: all counters are created here, at the start of the process.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        counters, histograms = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        requests = counters(
            PREFIX + "requests", "Requests for images that ended, by code (OK, ClientGone or an error's code) and route.", ["code", "route"]
        )
        seconds = histograms(
            PREFIX + "request_seconds",
            "Time from the arrival of a request to the end of its answer, for requests answered with images.",
            ["route"],
            buckets=REQUEST_BUCKETS,
        )
        phases = histograms(
            PREFIX + "phase_seconds",
            "Time of each phase of an answered image: queue, encode, denoise, decode or post.",
            ["phase"],
            buckets=BOUNDS_S,
        )
        # Created here, so that they are 0 before the first event, and need no lookup in every request.
        self._requests = {(code, path): requests.labels(code, route) for code in CODES for path, route in ROUTES.items()}
        self._seconds = {path: seconds.labels(route) for path, route in ROUTES.items()}
        self._phases = {phase: phases.labels(phase) for phase in PHASES}
        self._first_step = histograms(
            PREFIX + "first_step_seconds", "Time from an image's request to its first step, for answered images.", buckets=BOUNDS_S
        )
        self._peak_bytes = histograms(
            PREFIX + "image_peak_bytes",
            "Most memory that the steps of an answered image needed beside the weights; only where the device reports it.",
            buckets=MEMORY_BUCKETS,
        )
        self._with_adapter = counters(PREFIX + "adapter_images", "Images that were made with at least one adapter and answered.")
        by_adapters = counters(
            PREFIX + "requests_with_adapters", "Requests answered with images, by the number of adapters that they used.", ["adapters"]
        )
        self._by_adapters = [by_adapters.labels(str(count)) for count in range(engine.config.max_loras_per_request + 1)]
        info = Gauge(PREFIX + "info", "Always 1; the label version is the worker's version.", ["version"], registry=self.registry)
        info.labels(engine.version).set(1)
        self.registry.register(EncodingCollector(encoding, decoders))
        self.registry.register(EngineCollector(engine))
        # Memory, CPU time and open files of the server process, read from /proc.
        ProcessCollector(registry=self.registry)

    def observe_request(self, path: str, code: str, seconds: float) -> None:
        """Count an answer by its code and its path, a key of `ROUTES`.

        If the code is OK, the time goes into the histogram, which fast refusals would distort.
        """
        self._requests[code, path].inc()
        if code == OK:
            self._seconds[path].observe(seconds)

    def observe_generation(self, made: Generation) -> None:
        """Observe phases and, if known, peak memory of every image of an answered request. Count the request by its number of adapters."""
        self._by_adapters[len(made.provenance.adapters)].inc()
        for image in made.images:
            for phase, seconds in self._phases.items():
                seconds.observe(getattr(image.timings, phase))
            self._first_step.observe(image.timings.queue + image.timings.encode)
            if image.peak_bytes:
                self._peak_bytes.observe(image.peak_bytes)
        if made.provenance.adapters:
            self._with_adapter.inc(len(made.images))

    async def exposition(self) -> tuple[bytes, str]:
        """Return the text of all metrics and its media type.

        Values are read on the event loop, which owns them. Formatting takes longer, so a thread does it. The encoding threads are not used,
        so that no scrape waits behind images.
        """
        return await asyncio.to_thread(generate_latest, Collected(list(self.registry.collect()))), CONTENT_TYPE_LATEST


class Collected(Collector):
    """A snapshot of metrics, taken on the event loop, that prometheus_client can format in a thread."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """Return the metrics that were read."""
        return self._metrics


class EncodingCollector(Collector):
    """Counts of the encoding threads and of the decoding processes."""

    def __init__(self, encoding: EncodingThreads, decoders: Decoders) -> None:
        self._encoding, self._decoders = encoding, decoders

    def collect(self) -> Iterator[Metric]:
        """Yield the number of encoding threads and their pending work, then the waiting and working times of encoding and of decoding."""
        encoding = self._encoding
        yield gauge("encoding_threads", "Threads that encode images for answers; their number is fixed at the start.", encoding.threads)
        yield gauge(
            "encoding_pending",
            "Pieces of work of the encoding threads, waiting and in progress; a piece is one file or one answer's body.",
            encoding.pending,
        )
        yield histogram("encoding_wait_seconds", "Time that a piece of work waited for an encoding thread.", {"": encoding.waited})
        yield histogram("encoding_seconds", "Time that an encoding thread took for a piece of work.", {"": encoding.worked})
        decoders = self._decoders
        yield histogram(
            "decoding_wait_seconds", "Time that an image file of a client waited until its decoding began.", {"": decoders.waited}
        )
        yield histogram("decoding_seconds", "Time that the decoding of an image file of a client took.", {"": decoders.worked})
