# SPDX-License-Identifier: Apache-2.0
"""The metrics that Prometheus reads in every state of a worker, with labels from closed lists, as their page describes them."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from diffusion_worker.engine.state.request_events import Timings
from diffusion_worker.engine.state.state_document import EngineState
from diffusion_worker.errors import ErrorCode, Fault
from diffusion_worker.messages import ErrorReport, MemoryReport
from support.worker.fake_rank import FakeRank
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.server_edge import Edge, serving_edge

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([a-z_]+)` \| (counter|gauge|histogram) \|([^|]*)\| [^|]+ \|[^|]*\|$", re.MULTILINE)
TYPES = {"counter", "gauge", "histogram"}


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(ranks=2) as edge:
        yield edge


async def families(edge: Edge) -> list[Metric]:
    answer = await edge.data.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return list(text_string_to_metric_families(answer.text))


async def metrics(edge: Edge) -> dict[tuple[str, ...], float]:
    """Return every sample by its name without the prefix, and by its labels' values."""
    return {
        (sample.name.removeprefix("diffusion_worker_"), *sample.labels.values()): sample.value
        for family in await families(edge)
        for sample in family.samples
    }


async def traffic(edge: Edge) -> None:
    """Cause images, refusals, an adapter that loads and a broken one, a sleep and a wake, and a restart; return when the model is ready."""
    await edge.put_adapter("stripes", "/loras/stripes")
    edge.ranks.adapter_errors["/loras/broken"] = ErrorReport(ErrorCode.INVALID_ADAPTER, "no config")
    await edge.put_adapter("broken", "/loras/broken")
    await edge.request_images(prompt="p kumquatfen", n=2, num_inference_steps=3)
    await edge.request_images(prompt="p kumquatfen", model="stripes")
    await edge.request_images(prompt="p kumquatfen", n=0)
    await edge.request_images(prompt="p kumquatfen", model="nobody")
    await edge.data.post("/v1/images/edits", json={})
    await edge.operate("sleep")
    await edge.wait_state(state="asleep")
    await edge.operate("wake")
    await edge.wait_state(state="ready")
    edge.ranks.lose("rank 0 was ended by SIGKILL", Fault.DIED)
    await edge.wait_state(restarts=1, state="ready")


async def test_requests_are_counted_by_route_and_reason(edge: Edge) -> None:
    await traffic(edge)
    found = await metrics(edge)
    counted = {key[1:]: value for key, value in found.items() if key[0] == "requests_total" and value}
    assert counted == {
        ("OK", "generations"): 2,
        ("InvalidRequest", "generations"): 1,
        ("model_not_found", "generations"): 1,
        ("InvalidRequest", "edits"): 1,
    }
    assert found["request_seconds_count", "generations"] == 2
    assert found["request_seconds_count", "edits"] == 0


async def test_every_phase_of_an_image_is_a_histogram_and_its_memory_too(edge: Edge) -> None:
    await edge.request_images(prompt="p kumquatfen", n=2, num_inference_steps=3)
    found = await metrics(edge)
    for phase in ("queue", "encode", "denoise", "decode", "post"):
        assert found["phase_seconds_count", phase] == 2
    assert found["phase_seconds_sum", "denoise"] > 0
    assert set(Timings.__struct_fields__) == {key[1] for key in found if key[0] == "phase_seconds_count"} | {"total"}
    first_step = found["phase_seconds_sum", "queue"] + found["phase_seconds_sum", "encode"]
    assert (found["first_step_seconds_count",], found["first_step_seconds_sum",]) == (2, pytest.approx(first_step))
    assert found["image_peak_bytes_count",] == 2 and found["image_peak_bytes_sum",] > 0
    assert found["encoding_seconds_count",] >= 2


async def test_what_runs_and_what_waits_for_a_place_is_told() -> None:
    async with serving_edge(max_batch_size=1) as edge:
        edge.ranks.stepping.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(edge.request_images(prompt="p kumquatfen"))

            async def full() -> bool:
                found = await metrics(edge)
                return (found["requests_in_flight",], found["requests_queued",]) == (1, 2)

            await edge.wait_for(full)
            edge.ranks.stepping.set()
        found = await metrics(edge)
    assert (found["requests_in_flight",], found["requests_queued",]) == (0, 0)


async def test_a_pause_the_version_and_the_age_of_the_state_are_told(edge: Edge) -> None:
    found = await metrics(edge)
    assert (found["paused",], found["info", edge.engine.version], found["state_age_seconds",] > 0) == (0, 1, True)
    await edge.operate("pause")
    assert (await metrics(edge))["paused",] == 1
    await edge.operate("resume")
    assert (await metrics(edge))["paused",] == 0


async def test_the_threads_that_encode_are_told_with_what_waits_for_them(edge: Edge) -> None:
    await edge.request_images(prompt="p kumquatfen")
    found = await metrics(edge)
    assert found["encoding_threads",] >= 1
    assert (found["encoding_pending",], found["encoding_wait_seconds_count",]) == (0, found["encoding_seconds_count",])


async def test_the_memory_of_every_rank_is_told_by_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    report = MemoryReport(
        weights_bytes=11,
        weights_resident_bytes=12,
        mirror_memory_bytes=13,
        mirror_shared_bytes=17,
        adapter_slots_resident_bytes=14,
        adapter_host_bytes=15,
        cache_bytes=16,
    )
    monkeypatch.setattr(FakeRank, "memory", lambda self: report)
    async with serving_edge(ranks=2) as edge:
        found = await metrics(edge)
    names = ("weights", "weights_resident", "mirror_memory", "mirror_shared", "adapter_slots_resident", "adapter_host", "cache")
    assert [[found[f"rank_{name}_bytes", rank] for name in names] for rank in "01"] == [[11, 12, 13, 17, 14, 15, 16]] * 2


async def test_the_standbys_that_are_ready_are_counted(edge: Edge) -> None:
    edge.ranks.standbys = 2
    assert (await metrics(edge))["standby_ranks",] == 2


async def test_frames_that_are_no_message_are_counted_by_the_end_that_dropped_them(edge: Edge) -> None:
    edge.ranks.dropped_frames = (2, 3)
    found = await metrics(edge)
    assert (found["frames_dropped_total", "server"], found["frames_dropped_total", "ranks"]) == (2, 3)


async def test_buckets_of_a_histogram_never_fall_and_end_with_all(edge: Edge) -> None:
    await traffic(edge)
    for family in await families(edge):
        rising: dict[str, list[float]] = {}
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            if sample.name.endswith("_bucket"):
                rising.setdefault(str(labels), []).append(sample.value)
            elif sample.name.endswith("_count") and family.type == "histogram":
                assert rising[str(labels)][-1] == sample.value
        assert all(values == sorted(values) for values in rising.values()), family.name


async def test_adapters_are_counted_by_state_use_and_the_codes_of_their_loads(edge: Edge) -> None:
    await traffic(edge)
    found = await metrics(edge)
    assert (found["adapters", "Loaded"], found["adapters", "Failed"]) == (1, 1)
    # The first load is by the call, the second after the restart.
    assert (found["adapter_loads_total", "OK"], found["adapter_loads_total", "InvalidAdapter"]) == (2, 1)
    assert found["adapter_load_seconds_count",] == 2
    assert found["adapter_images_total",] == 1
    assert found["adapter_bytes",] > 0
    assert found["adapters_in_use",] == 0


async def test_where_adapters_are_is_told_with_what_there_is_room_for() -> None:
    async with serving_edge(max_cached_loras=2, max_loras=1, max_loras_per_request=1) as edge:
        for name in ("a", "b", "c"):
            await edge.put_adapter(name, f"/loras/{name}")
        found = await metrics(edge)
        assert (found["adapters_registered",], found["adapters_registered_max",]) == (2, 2)
        assert (found["adapter_evictions_total",], found["adapters", "Cached"], found["adapters", "Loaded"]) == (1, 1, 2)
        assert (found["adapters_active",], found["adapter_slots",]) == (0, 1)
        assert found["adapter_bytes",] == 2 * 4096
        await edge.put_adapter("c-again", "/loras/c")
        found = await metrics(edge)
        assert (found["adapters_registered",], found["adapter_bytes",]) == (2, 2 * 4096)
        edge.ranks.stepping.clear()
        running = asyncio.create_task(edge.request_images(prompt="p kumquatfen", model="c"))
        await edge.wait_state(inFlight=1)
        assert (await metrics(edge))["adapters_active",] == 1
        edge.ranks.stepping.set()
        assert (await running).status_code == 200


async def test_fetches_are_counted_by_time_and_bytes_and_only_where_there_was_one(edge: Edge) -> None:
    await edge.put_adapter("here", "/loras/here")
    found = await metrics(edge)
    assert (found["adapter_fetch_seconds_count",], found["adapter_fetched_bytes_total",]) == (0, 0)
    await edge.put_adapter("far", "", source={"huggingFace": {"repo": "org/far"}})
    found = await metrics(edge)
    assert (found["adapter_fetch_seconds_count",], found["adapter_fetched_bytes_total",]) == (1, 4096)
    assert found["adapter_load_seconds_count",] == 2


async def test_requests_are_counted_by_how_many_adapters_they_had(edge: Edge) -> None:
    for name in ("a", "b"):
        await edge.put_adapter(name, f"/loras/{name}")
    for body in ({}, {"model": "a"}, {"lora": [{"name": "a"}, {"name": "b"}]}, {"model": "a", "lora": {"name": "b"}, "n": 3}):
        assert (await edge.request_images(prompt="p kumquatfen", **body)).status_code == 200
    found = await metrics(edge)
    assert [found["requests_with_adapters_total", str(count)] for count in range(5)] == [1, 1, 2, 0, 0]
    assert found["adapter_images_total",] == 1 + 1 + 3


async def test_loads_are_counted_by_every_code_that_a_source_or_a_file_can_have(edge: Edge) -> None:
    codes = (ErrorCode.NO_MATCHING_MODULES, ErrorCode.RANK_TOO_LARGE, ErrorCode.NETWORK_ERROR)
    for code in codes:
        edge.ranks.adapter_errors[f"/loras/{code}"] = ErrorReport(code, "no")
        await edge.put_adapter("a", f"/loras/{code}")
    found = await metrics(edge)
    assert [found["adapter_loads_total", code] for code in codes] == [1, 1, 1]


async def test_an_adapter_is_in_use_while_a_request_needs_it(edge: Edge) -> None:
    await edge.put_adapter("stripes", "/loras/stripes")
    edge.ranks.stepping.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(edge.request_images(prompt="p kumquatfen", model="stripes"))

        async def in_use() -> bool:
            found = await metrics(edge)
            return found["adapters_in_use",] == 1 and found["requests_in_flight",] == 1

        await edge.wait_for(in_use)
        edge.ranks.stepping.set()


async def test_sleeps_wakes_and_restarts_are_counted(edge: Edge) -> None:
    await traffic(edge)
    found = await metrics(edge)
    assert (found["operation_seconds_count", "sleep"], found["operation_seconds_count", "wake"]) == (1, 1)
    assert found["operation_failures_total", "sleep"] == 0
    assert found["sleep_freed_bytes_total",] == 2 * 1_000_000
    assert found["rank_group_restarts_total",] == 1
    assert (found["rank_group_losses_total", "Died"], found["rank_group_losses_total", "Device"]) == (1, 0)


async def test_a_sleep_that_fails_is_counted(edge: Edge) -> None:
    edge.ranks.method_errors["handle_sleep_task"] = ErrorReport(ErrorCode.RANK_FAILED, "no")
    await edge.operate("sleep")

    async def failed() -> bool:
        return (await metrics(edge))["operation_failures_total", "sleep"] == 1

    await edge.wait_for(failed)


async def test_held_requests_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    path.write_text('{"sleep": {"policy": "OnIdle"}, "coldRequests": {"maxHeld": 2}}')
    async with serving_edge(desired_path=str(path)) as edge:
        await edge.operate("sleep")
        await edge.wait_state(state="asleep", operation=None)
        edge.ranks.calling.clear()
        held = [asyncio.create_task(edge.request_images(prompt="p kumquatfen")) for _ in range(2)]
        await edge.wait_held(2)
        await edge.request_images(prompt="p kumquatfen")
        found = await metrics(edge)
        assert (found["requests_held",], found["sleep_policy", "OnIdle"], found["sleep_policy", "Asleep"]) == (2, 1, 0)
        assert found["held_oldest_seconds",] > 0
        held[0].cancel()
        await edge.wait_held(1)
        edge.ranks.calling.set()
        assert (await held[1]).status_code == 200
        found = await metrics(edge)
        outcomes = {key[1]: value for key, value in found.items() if key[0] == "held_requests_total"}
        assert outcomes == {"served": 1, "timed_out": 0, "overloaded": 1, "gone": 1, "refused": 0}
        assert (found["requests_held",], found["held_oldest_seconds",], found["held_seconds_count",]) == (0, 0, 2)
        assert found["held_seconds_sum",] > 0 and found["phase_seconds_sum", "queue"] > 0
        assert (found["requests_total", "Overloaded", "generations"], found["paused",]) == (1, 0)


async def states(edge: Edge) -> set[str]:
    """Read the gauge of every `EngineState` from the metrics, where none may be missing, and return those that are 1."""
    found = {key[1]: value for key, value in (await metrics(edge)).items() if key[0] == "state"}
    assert set(found) == set(EngineState)
    return {state for state, value in found.items() if value == 1}


async def answers(edge: Edge) -> tuple[int, int, int]:
    """Return the HTTP statuses of `/healthz`, `/readyz` and `/v1/models`."""
    return tuple([(await edge.data.get(path)).status_code for path in ("/healthz", "/readyz", "/v1/models")])


async def test_probes_models_and_metrics_are_right_while_the_worker_starts() -> None:
    edge = Edge(FakeRankGroup(), ranks=1)
    edge.ranks.loading.clear()
    starting = asyncio.create_task(edge.engine.start())
    assert await answers(edge) == (200, 503, 200)
    assert await states(edge) == {"starting"}
    found = await metrics(edge)
    assert found["load_bytes",] < found["load_bytes_expected",]
    edge.ranks.loading.set()
    await starting
    found = await metrics(edge)
    assert found["load_bytes",] == found["load_bytes_expected",] > 0
    await edge.engine.terminate()


async def test_no_label_comes_from_a_client(edge: Edge) -> None:
    await edge.put_adapter("a-made-up-name", "/loras/x")
    body: dict[str, Any] = {"prompt": "a-made-up-name kumquatfen", "model": "a-made-up-name"}
    before = set(await metrics(edge))
    await edge.data.post("/v1/images/generations", json=body, headers={"x-request-id": "a-made-up-name"})
    await edge.data.get("/a-made-up-name")
    assert "a-made-up-name" not in (await edge.data.get("/metrics")).text
    # All series exist from the start: no traffic adds any.
    await traffic(edge)
    assert set(await metrics(edge)) == before


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return the type and the labels of every metric on the documentation's page, by its name."""
    rows = {name: (kind, set(re.findall(r"`([a-z]+)`", labels))) for name, kind, labels in ROW.findall(PAGE.read_text())}
    assert rows, "the page has no rows of metrics"
    return rows


async def test_the_page_of_metrics_has_every_metric_and_no_other(edge: Edge) -> None:
    for _ in range(2):
        live = {}
        for family in await families(edge):
            assert family.type in TYPES, family
            name = family.name.removeprefix("diffusion_worker_") + "_total" * (family.type == "counter")
            live[name] = (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        assert documented() == live
        # The second round comes after traffic.
        await traffic(edge)
