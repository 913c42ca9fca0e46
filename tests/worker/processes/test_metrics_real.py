# SPDX-License-Identifier: Apache-2.0
"""The metrics of a real worker with real ranks, before and after it has made images."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.worker.process import WorkerProcess

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
# For one rank on 2 cores, after other tests' images.
MOST_RESIDENT_BYTES = 120_000_000


def metrics(worker: WorkerProcess) -> dict[tuple[str, ...], float]:
    """Read the worker's metrics and return the value of each sample.

    A key is a tuple of the name, less `diffusion_worker_`, and the label values in order.
    """
    families = text_string_to_metric_families(worker.get("/metrics").text)
    return {
        (sample.name.removeprefix("diffusion_worker_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_real_worker_shows_what_its_images_took(worker: WorkerProcess) -> None:
    before = metrics(worker)
    for prompt in ("a red digit seven that is counted", "a red digit seven that is counted"):
        assert worker.request_images(prompt=prompt, n=2, num_inference_steps=3, size="64x64", model="stripes").status_code == 200
    after = metrics(worker)
    rise = {key: value - before.get(key, 0.0) for key, value in after.items()}
    assert (rise["images_total",], rise["pixels_total",], rise["adapter_images_total",]) == (4, 4 * 64 * 64, 4)
    assert rise["requests_total", "OK", "generations"] == rise["request_seconds_count", "generations"] == 2
    for phase in ("queue", "encode", "denoise", "decode", "post"):
        assert rise["phase_seconds_count", phase] == 4
    # A phase is counted for each image, and two images of a request share the request's time.
    assert 0 < rise["phase_seconds_sum", "denoise"] < 2 * rise["request_seconds_sum", "generations"]
    assert rise["phase_seconds_sum", "decode"] > 0
    assert 0 < rise["step_seconds_sum",] < rise["request_seconds_sum", "generations"]
    assert rise["steps_total",] == rise["step_seconds_count",] >= 6
    assert rise["model_rows_total",] > rise["model_calls_total",] > 0
    assert rise["prompt_cache_lookups_total", "hit"] >= 1 and rise["prompt_cache_lookups_total", "miss"] >= 1
    assert rise["encoding_seconds_count",] >= 4
    assert after["rank_weights_resident_bytes", "0"] > 0
    assert 0 < after["process_resident_memory_bytes",] < MOST_RESIDENT_BYTES


def test_a_real_worker_has_the_metrics_of_the_page_and_no_other(worker: WorkerProcess) -> None:
    documented = set(re.findall(r"^\| `([a-z_]+)` \| (?:counter|gauge|histogram) \|", PAGE.read_text(), re.MULTILINE))
    families = text_string_to_metric_families(worker.get("/metrics").text)
    live = {family.name.removeprefix("diffusion_worker_") + "_total" * (family.type == "counter") for family in families}
    assert live == documented
