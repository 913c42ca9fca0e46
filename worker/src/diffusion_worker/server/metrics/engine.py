# SPDX-License-Identifier: Apache-2.0
"""The engine's counters as metrics, read at scrape time, in every state, also during the start and after a failure."""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.holding import HeldOutcome
from diffusion_worker.engine.scheduling.queue_bounds import Bound
from diffusion_worker.engine.state.operations import OPERATION_KINDS
from diffusion_worker.engine.state.state_document import AdapterState, EngineState, RankDocument, SleepPolicy, StateDocument
from diffusion_worker.errors import ErrorCode, Fault
from diffusion_worker.messages import PromptCacheStats
from diffusion_worker.server.metrics.families import by_rank, by_state, counter, gauge, histogram, labelled

OK = "OK"
# Faults that lose the group. A request's own faults do not, and the codes of `requests` count them.
GROUP_FAULTS = [fault for fault in Fault if fault is not Fault.REQUEST]
# Results of an adapter's load. Errors of its source, its file and the ranks have codes of their own.
LOAD_CODES = (OK, *ErrorCode)


class EngineCollector(Collector):
    """The engine's counters and state document as metrics, read when they are scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Read the engine's counters and state at the time of a scrape, and yield them family by family."""
        document = self._engine.state_document()
        yield by_state("state", "1 for the state that the worker is in, 0 for the others.", EngineState, {document.state: 1})
        yield gauge("state_age_seconds", "Time since the worker entered its present state.", document.state_age_seconds)
        yield by_state(
            "sleep_policy", "1 for the sleep policy in force, 0 for the others.", SleepPolicy, {document.policy: 1}, label="policy"
        )
        yield gauge("paused", "1 while the worker is paused, so that it accepts requests and makes no step; else 0.", document.paused)
        yield gauge("requests_in_flight", "Images in the batch, which are being made.", document.in_flight)
        yield gauge("requests_queued", "Images that wait for a place in the batch.", document.queued)
        yield from self._held(document)
        yield from self._queue()
        yield gauge("load_bytes", "Bytes of weights loaded so far, all ranks.", document.load.bytes_done)
        yield gauge("load_bytes_expected", "Bytes of weights to load, all ranks.", document.load.bytes_total)
        yield from _rank_memory(document.ranks)
        merged = {f"{item.component}.{item.method}": int(item.merged) for item in document.model.merging}
        yield by_state(
            "model_calls_merged",
            "1 for a method of a component whose calls are merged with those of other requests, 0 for one whose calls run alone.",
            merged,
            merged,
            label="method",
        )
        yield from self._steps()
        yield from self._prompt_cache(self._engine.stats.prompt_cache or PromptCacheStats())
        yield from self._adapters(document)
        yield from self._operations()
        yield from self._group(document)

    def _held(self, document: StateDocument) -> Iterator[Metric]:
        held = self._engine.held
        outcomes = {outcome.value: held.outcomes[outcome] for outcome in HeldOutcome}
        yield gauge(
            "requests_held", "Requests that wait until the model serves, while it loads, restarts, sleeps or wakes.", document.held.current
        )
        yield gauge(
            "held_oldest_seconds",
            "Time that the oldest held request has waited so far; 0 without any.",
            document.held.oldest_age_seconds or 0.0,
        )
        yield labelled(
            "held_requests", "Requests that came while the model did not serve, counted when they ended, by outcome.", "outcome", outcomes
        )
        yield histogram("held_seconds", "Time that a request was held until the model served, or until it was given up.", {"": held.waited})

    def _queue(self) -> Iterator[Metric]:
        queue, limits = self._engine.queue, self._engine.config.queue
        refusals = {bound.value: queue.refusals[bound] for bound in Bound}
        yield labelled(
            "queue_refusals", "Requests refused with 429 because the queue was full, by the bound that they met.", "bound", refusals
        )
        yield gauge("queue_requests", "Requests that wait for their first step, held ones among them.", queue.bounds.waiting)
        yield gauge("queue_requests_max", "Bound on the requests that wait for their first step, --max-queued.", limits.max_queued)
        yield gauge(
            "queue_work_seconds",
            "Time that the device is expected to need for what is left of all requests, queued and running.",
            queue.bounds.left_s,
        )
        yield gauge(
            "queue_work_seconds_max", "Bound on that expected time of all requests, --max-queued-seconds.", limits.max_queued_seconds
        )
        yield gauge("queue_image_bytes", "Bytes of the decoded input images of all requests, queued and running.", queue.bounds.size_bytes)
        yield gauge(
            "queue_image_bytes_max",
            "Bound on the bytes of the decoded input images of all requests, --max-queued-bytes.",
            limits.max_queued_bytes,
        )

    def _steps(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield counter("images", "Images that the ranks made.", stats.images)
        yield counter("pixels", "Pixels of the images that the ranks made.", stats.pixels)
        yield counter(
            "images_replayed",
            "Images begun again: after the rank group was lost, after a lack of memory, or to run without others.",
            stats.replayed,
        )
        yield counter("steps", "Steps of the batch; each step advances all images in it.", stats.ticks)
        yield histogram("step_seconds", "Time that the ranks took for a step of the batch.", {"": stats.step_durations})
        yield counter("model_calls", "Calls of the denoiser, each for one or more requests.", stats.model_calls)
        yield counter("model_rows", "Rows of all calls of the denoiser; a request has one row or more in a call.", stats.rows)
        yield counter(
            "model_rows_skipped", "Rows of calls of the denoiser for which a step cache skipped most of its blocks.", stats.skipped_rows
        )

    def _prompt_cache(self, cache: PromptCacheStats) -> Iterator[Metric]:
        results = {"hit": cache.hits, "miss": cache.misses, "bypassed": cache.bypassed}
        yield labelled(
            "prompt_cache_lookups",
            "Calls of text encoders, by result: hit (taken from the prompt cache), miss (made and kept) or bypassed (made and not kept).",
            "result",
            results,
        )
        yield gauge("prompt_cache_entries", "Encoded prompts in the prompt cache.", cache.size)
        yield gauge("prompt_cache_entries_max", "Bound on the encoded prompts in the prompt cache.", cache.max_size)

    def _adapters(self, document: StateDocument) -> Iterator[Metric]:
        adapters, loads = document.adapters, self._engine.adapter_loads
        kept = {each.digest: each.size_bytes or 0 for each in adapters if each.state in (AdapterState.LOADED, AdapterState.DRAINING)}
        yield by_state(
            "adapters", "Adapters that the worker knows, by state.", AdapterState, Tally[str](adapter.state for adapter in adapters)
        )
        yield gauge(
            "adapters_registered",
            "Adapters that the ranks have in host memory; names with the same content count once.",
            self._engine.registered_adapters,
        )
        yield gauge(
            "adapters_registered_max",
            "Bound on the adapters in the ranks' host memory, --max-cached-loras.",
            self._engine.config.max_cached_loras,
        )
        yield gauge("adapters_active", "Different adapters that images in the batch use now.", self._engine.active_adapters)
        yield gauge(
            "adapter_slots",
            "Bound on the different adapters that images in the batch use at once, --max-loras.",
            self._engine.config.max_loras,
        )
        yield counter("adapter_evictions", "Adapters evicted from the ranks' memory to make room for others.", loads.evictions)
        yield gauge("adapters_in_use", "Adapters that a queued or running request uses now.", sum(adapter.refs > 0 for adapter in adapters))
        yield gauge("adapter_bytes", "Size of the files of all loaded adapters; a file of several names counts once.", sum(kept.values()))
        yield labelled(
            "adapter_loads",
            "Loads of adapters that ended, by code: OK or an error's code.",
            "code",
            {code: loads.codes[code] for code in LOAD_CODES},
        )
        yield histogram(
            "adapter_load_seconds", "Time of each load of an adapter that succeeded, its fetch included.", {"": loads.durations}
        )
        yield histogram("adapter_fetch_seconds", "Time of each fetch of an adapter from a source elsewhere.", {"": loads.fetch_durations})
        yield counter("adapter_fetched_bytes", "Bytes of adapters that were fetched from sources elsewhere.", loads.fetched_bytes)

    def _operations(self) -> Iterator[Metric]:
        done = self._engine.operations_done
        failures = {kind: done.failures[kind] for kind in OPERATION_KINDS}
        yield histogram(
            "operation_seconds",
            "Time of each sleep and each wake that succeeded, the drain before a sleep included.",
            done.durations,
            label="kind",
        )
        yield counter("sleep_freed_bytes", "Memory that sleeps freed, summed over all sleeps and ranks.", done.freed_bytes)
        yield labelled("operation_failures", "Sleeps and wakes that failed, by kind.", "kind", failures)

    def _group(self, document: StateDocument) -> Iterator[Metric]:
        by_fault = self._engine.life.losses.by_fault
        losses = {fault.value: by_fault.get(fault, 0) for fault in GROUP_FAULTS}
        dropped = dict(zip(("server", "ranks"), self._engine.dropped_frames, strict=True))
        yield counter("rank_group_restarts", "Times the rank group was started again.", document.restarts)
        yield gauge("standby_ranks", "Processes that are ready to become ranks when the rank group is lost.", document.standby_ranks)
        yield labelled("rank_group_losses", "Losses of the rank group, by kind of fault.", "fault", losses)
        yield labelled(
            "frames_dropped",
            "Invalid messages between the server process and its ranks, by the end that received and dropped them.",
            "end",
            dropped,
        )


def _rank_memory(ranks: list[RankDocument]) -> Iterator[Metric]:
    def by_field(name: str) -> dict[int, float]:
        return {one.rank: getattr(one.memory, name) for one in ranks}

    yield by_rank("rank_weights_bytes", "Size of a rank's weights.", by_field("weights_bytes"))
    yield by_rank(
        "rank_weights_resident_bytes",
        "Part of a rank's weights that is in memory now: on a GPU in its memory, else in host memory.",
        by_field("weights_resident_bytes"),
    )
    yield by_rank(
        "rank_mirror_memory_bytes",
        "Host memory that a rank keeps so that its weights come back from it at a wake.",
        by_field("mirror_memory_bytes"),
    )
    yield by_rank(
        "rank_mirror_shared_bytes",
        "Host memory for the same use that ranks of the pod share; each reports it, and the pod has it once.",
        by_field("mirror_shared_bytes"),
    )
    yield by_rank(
        "rank_adapter_slots_resident_bytes",
        "Memory that a rank holds now for the adapters in use, its slots; 0 asleep.",
        by_field("adapter_slots_resident_bytes"),
    )
    yield by_rank("rank_adapter_host_bytes", "Size of the adapters in a rank's host memory.", by_field("adapter_host_bytes"))
    yield by_rank("rank_cache_bytes", "Size of the encoded prompts in a rank's prompt cache.", by_field("cache_bytes"))
