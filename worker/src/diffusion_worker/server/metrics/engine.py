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
        yield by_state("state", "1 for the state the worker is in.", EngineState, {document.state: 1})
        yield gauge("state_age_seconds", "Time since the worker entered its state.", document.state_age_seconds)
        yield by_state("sleep_policy", "1 for the sleep policy in force.", SleepPolicy, {document.policy: 1}, label="policy")
        yield gauge("paused", "1 while requests are accepted but no step is made.", document.paused)
        yield gauge("requests_in_flight", "Images that are being made.", document.in_flight)
        yield gauge("requests_queued", "Images that wait for a place in the batch.", document.queued)
        yield from self._held(document)
        yield from self._queue()
        yield gauge("load_bytes", "Bytes of weights loaded so far, all ranks.", document.load.bytes_done)
        yield gauge("load_bytes_expected", "Bytes of weights to load, all ranks.", document.load.bytes_total)
        yield from _rank_memory(document.ranks)
        yield from self._steps()
        yield from self._prompt_cache(self._engine.stats.prompt_cache or PromptCacheStats())
        yield from self._adapters(document)
        yield from self._operations()
        yield from self._group(document)

    def _held(self, document: StateDocument) -> Iterator[Metric]:
        held = self._engine.held
        outcomes = {outcome.value: held.outcomes[outcome] for outcome in HeldOutcome}
        yield gauge("requests_held", "Requests that wait until the model serves.", document.held.current)
        yield gauge("held_oldest_seconds", "Waiting time of the oldest held request.", document.held.oldest_age_seconds or 0.0)
        yield labelled("held_requests", "Requests that came while the model did not serve, by outcome.", "outcome", outcomes)
        yield histogram("held_seconds", "Time that requests were held, with and without success.", {"": held.waited})

    def _queue(self) -> Iterator[Metric]:
        queue, limits = self._engine.queue, self._engine.config.queue
        refusals = {bound.value: queue.refusals[bound] for bound in Bound}
        yield labelled("queue_refusals", "Requests refused because the queue was full, by bound.", "bound", refusals)
        yield gauge("queue_requests", "Requests that wait for their first step, held ones among them.", queue.bounds.waiting)
        yield gauge("queue_requests_max", "Most requests that may wait for their first step.", limits.max_queued)
        yield gauge("queue_work_seconds", "Expected device time of all requests.", queue.bounds.left_s)
        yield gauge("queue_work_seconds_max", "Bound on the expected device time of all requests.", limits.max_queued_seconds)
        yield gauge("queue_image_bytes", "Bytes of the decoded images of all requests.", queue.bounds.size_bytes)
        yield gauge("queue_image_bytes_max", "Bound on the bytes of the decoded images of all requests.", limits.max_queued_bytes)
        yield gauge(
            "queue_promises", "Refused requests for which a place in the queue is kept until they come back.", queue.bounds.promised
        )

    def _steps(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield counter("images", "Images made.", stats.images)
        yield counter("pixels", "Pixels of the images made.", stats.pixels)
        yield counter("images_replayed", "Images begun again after the rank group was lost.", stats.replayed)
        yield counter("steps", "Steps of the batch.", stats.ticks)
        yield histogram("step_seconds", "Time the ranks spent in a step of the batch.", {"": stats.step_durations})
        yield counter("model_calls", "Merged model calls.", stats.model_calls)
        yield counter("model_rows", "Rows of all merged model calls.", stats.rows)
        yield counter("model_rows_skipped", "Rows of model calls that a step cache skipped for the most part.", stats.skipped_rows)

    def _prompt_cache(self, cache: PromptCacheStats) -> Iterator[Metric]:
        results = {"hit": cache.hits, "miss": cache.misses, "bypassed": cache.bypassed}
        yield labelled("prompt_cache_lookups", "Calls of text encoders, by result of the prompt cache.", "result", results)
        yield gauge("prompt_cache_entries", "Encoded prompts in the prompt cache.", cache.size)
        yield gauge("prompt_cache_entries_max", "Most encoded prompts in the prompt cache.", cache.max_size)

    def _adapters(self, document: StateDocument) -> Iterator[Metric]:
        adapters, loads = document.adapters, self._engine.adapter_loads
        kept = {each.digest: each.size_bytes or 0 for each in adapters if each.state in (AdapterState.LOADED, AdapterState.DRAINING)}
        yield by_state("adapters", "Adapters by state.", AdapterState, Tally[str](adapter.state for adapter in adapters))
        yield gauge("adapters_registered", "Adapters that the ranks have in host memory.", self._engine.registered_adapters)
        yield gauge("adapters_registered_max", "Most adapters in the ranks' host memory.", self._engine.config.max_cached_loras)
        yield gauge("adapters_active", "Adapters that images in the batch use.", self._engine.active_adapters)
        yield gauge("adapter_slots", "Most adapters that images in the batch can use at once.", self._engine.config.max_loras)
        yield counter("adapter_evictions", "Adapters evicted from memory for others.", loads.evictions)
        yield gauge("adapters_in_use", "Adapters that a request uses now.", sum(adapter.refs > 0 for adapter in adapters))
        yield gauge("adapter_bytes", "Size of the files of all adapters that are loaded.", sum(kept.values()))
        yield labelled("adapter_loads", "Loads of adapters, by error code or OK.", "code", {code: loads.codes[code] for code in LOAD_CODES})
        yield histogram("adapter_load_seconds", "Time of the loads of adapters that succeeded.", {"": loads.durations})
        yield histogram("adapter_fetch_seconds", "Time of the fetches of adapters from their sources.", {"": loads.fetch_durations})
        yield counter("adapter_fetched_bytes", "Bytes of adapters that were fetched from their sources.", loads.fetched_bytes)

    def _operations(self) -> Iterator[Metric]:
        done = self._engine.operations_done
        failures = {kind: done.failures[kind] for kind in OPERATION_KINDS}
        yield histogram("operation_seconds", "Time of the sleeps and wakes that succeeded.", done.durations, label="kind")
        yield counter("sleep_freed_bytes", "Memory freed by sleeps, all ranks.", done.freed_bytes)
        yield labelled("operation_failures", "Sleeps and wakes that failed.", "kind", failures)

    def _group(self, document: StateDocument) -> Iterator[Metric]:
        by_fault = self._engine.life.losses.by_fault
        losses = {fault.value: by_fault.get(fault, 0) for fault in GROUP_FAULTS}
        dropped = dict(zip(("server", "ranks"), self._engine.dropped_frames, strict=True))
        yield counter("rank_group_restarts", "Times the rank group was started again.", document.restarts)
        yield gauge("standby_ranks", "Processes that are ready to become ranks when the group is lost.", document.standby_ranks)
        yield labelled("rank_group_losses", "Losses of the rank group by kind of fault.", "fault", losses)
        yield labelled(
            "frames_dropped", "Invalid messages between server process and ranks, by the receiver that dropped them.", "end", dropped
        )


def _rank_memory(ranks: list[RankDocument]) -> Iterator[Metric]:
    def by_field(name: str) -> dict[int, float]:
        return {one.rank: getattr(one.memory, name) for one in ranks}

    yield by_rank("rank_weights_bytes", "Size of a rank's weights.", by_field("weights_bytes"))
    yield by_rank("rank_weights_resident_bytes", "Part of a rank's weights that is in memory.", by_field("weights_resident_bytes"))
    yield by_rank("rank_mirror_memory_bytes", "Memory from which a rank's weights come back at wake.", by_field("mirror_memory_bytes"))
    yield by_rank(
        "rank_mirror_shared_bytes", "Such memory that ranks of the pod share, which the pod has once.", by_field("mirror_shared_bytes")
    )
    yield by_rank(
        "rank_adapter_slots_resident_bytes",
        "Part of a rank's slots for adapters that is in memory.",
        by_field("adapter_slots_resident_bytes"),
    )
    yield by_rank("rank_adapter_host_bytes", "Adapters that a rank has in host memory.", by_field("adapter_host_bytes"))
    yield by_rank("rank_cache_bytes", "Bytes in a rank's prompt cache.", by_field("cache_bytes"))
