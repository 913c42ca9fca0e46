# SPDX-License-Identifier: Apache-2.0
"""A tiny run of `make gpu` on the CPU, by a Python that has torch, transformers, peft and pytest, with the carried packages.

`make soak` runs all items, `make test` those of one model.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.gpu.machine import make_machine
from support.sample import WHOLE
from tools.devcluster.paths import cache_dir
from tools.gpu.items import ITEMS
from tools.gpu.report import PASSED, SKIPPED
from tools.gpu.wheels import JUDGE

ROOT = Path(__file__).parents[2]
# For these the item itself says why it does not apply to a CPU.
NOT_ON_A_CPU = {"flux-fp8"}
# `make test` has the device and a model of random weights. Compilation for a CPU takes as long as everything else together,
# and has tests of its own.
RUN = tuple(item for item in ITEMS if (WHOLE or item.process in ("device", "wan")) and item.name != "flux-compile")
SECONDS = 1700


@pytest.mark.slow
def test_the_machine_has_nothing_of_our_environment_but_what_is_carried(tmp_path: Path) -> None:
    python, carried = make_machine(tmp_path)
    names = ("torch", "pytest", "diffusers", "msgspec", "hypothesis", "sklearn", "kopf", "diffusion_worker", "torchao", "bitsandbytes")
    source = f"import importlib.util as u; print(*[n for n in {names!r} if u.find_spec(n)])"

    def found(**environment: str) -> set[str]:
        ended = subprocess.run([python, "-c", source], capture_output=True, text=True, env=environment, check=True, timeout=60)
        return set(ended.stdout.split())

    assert found() == {"torch", "pytest"}
    assert found(PYTHONPATH=str(carried)) == {"torch", "pytest", "diffusers", "msgspec"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_items_run_tiny_on_a_cpu_with_the_carried_packages_alone(tmp_path: Path) -> None:
    import numpy as np

    from support.runner.digit_judge import classifier
    from tools.gpu.judge import parts_of

    # The same folder in each run, so that the bytecode of a run before is found: to compile the libraries takes longer than the items.
    folder = cache_dir() / "gpu-machine" / ROOT.name
    shutil.rmtree(folder, ignore_errors=True)
    python, carried = make_machine(folder)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PYTHONPYCACHEPREFIX"] = str(cache_dir() / "compiled")
    np.savez_compressed(tmp_path / JUDGE, **parts_of(classifier()))
    words = ["--device", "cpu", "--tiny", "--packages", carried, "--wheels", tmp_path, "--output", tmp_path / "output"]
    ended = subprocess.run(
        [python, "-m", "tools.gpu", *words, "--patience", "15", "--seconds", str(SECONDS), *(item.name for item in RUN)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS + 40,
    )  # fmt: skip
    found = json.loads(ended.stdout.splitlines()[-1])
    statuses = {item["name"]: item["status"] for item in found["items"]}
    assert statuses == {item.name: SKIPPED if item.name in NOT_ON_A_CPU else PASSED for item in RUN}, ended.stdout[-4000:]
    assert ended.returncode == 0
    figures = {f"{item['name']}.{name}": value for item in found["items"] for name, value in item["figures"].items()}
    assert figures["wan-alone.levels_apart"] <= 2
    if WHOLE:
        assert figures["adapters.styles_right_of_8"] == 8
        assert figures["start.levels_apart"] <= 2 and figures["flux-alone.levels_apart"] <= 2
        assert figures["tests.tests_passed"] > 0
        assert {"sleep.wake_s", "flux-batch.batch_s", "flux-profile.step_vs_gemm", "benchmarks.P2.throughput_vs_no_lora"} <= set(figures)
