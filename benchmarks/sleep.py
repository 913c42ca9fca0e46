# SPDX-License-Identifier: Apache-2.0
"""P4: how long sleep takes and how much memory it gives back, for three sizes of random weights.

A process of its own holds the weights as a rank does, and sleeps on a command. The process times its sleep itself. The kernel's count in
`/proc/PID/smaps_rollup` gives the memory, read from outside. `sleep_cpu_ms` is the processor time within it.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lines import end, next_line
from benchmarks.result import Measured
from benchmarks.stand_ins.linear_stack import CPU, place_stack, require_memory, write_stack
from diffusion_worker.lora.diffusion_manager import DiffusionLoRAManager
from diffusion_worker.memory.heap import freeze_gc
from diffusion_worker.messages import MemoryTag, SleepLevel
from diffusion_worker.runner.rank_memory import RankMemory

# Sizes of weights, and the number of sleeps of each.
SIZES_GB, ROUNDS = (0.5, 2.0, 8.0), 3
TINY_SIZES_GB, TINY_ROUNDS = (0.05,), 1
# Until the weights are in place, or given back, or read again.
ANSWER_S = 180.0
# Memory that a process needs beside its weights, and that must stay free for others.
SPARE_BYTES = 2_000_000_000


def measure(*, tiny: bool = False) -> Measured:
    """Measure sleep for each size of weights: the largest time, and the smallest part of the memory that was given back.

    The time of waking is beside them, for the record.

    Raises:
        RuntimeError: there is too little free memory, or the process with the weights fails or is late.
    """
    sizes_gb, rounds = (TINY_SIZES_GB, TINY_ROUNDS) if tiny else (SIZES_GB, ROUNDS)
    samples = [sample for size_gb in sizes_gb for sample in _samples(size_gb, rounds)]
    return Measured(
        figures={
            "sleep_ms": round(max(sample["sleep_ms"] for sample in samples), 3),
            "freed_fraction": round(min(sample["freed_fraction"] for sample in samples), 4),
            "sleep_cpu_ms": round(max(sample["sleep_cpu_ms"] for sample in samples), 3),
            **{f"sleep_ms_{size_gb:g}_gb": _largest(samples, "sleep_ms", size_gb) for size_gb in sizes_gb},
            **{f"wake_s_{size_gb:g}_gb": _largest(samples, "wake_s", size_gb) for size_gb in sizes_gb},
        },
        targets={"sleep_ms": "<= 50", "freed_fraction": ">= 0.98"},
        samples=samples,
    )


def _largest(samples: list[dict[str, float]], name: str, size_gb: float) -> float:
    return round(max(sample[name] for sample in samples if sample["size_gb"] == size_gb), 3)


def _samples(size_gb: float, rounds: int) -> list[dict[str, float]]:
    size = int(size_gb * 1e9)
    require_memory(size + SPARE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        write_stack(Path(folder), size)
        command = [sys.executable, "-m", "benchmarks.sleep", folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sleeper:
            try:
                weights_bytes = int(next_line(sleeper, within_s=ANSWER_S))
                return [{"size_gb": size_gb} | _round(sleeper, weights_bytes) for _ in range(rounds)]
            finally:
                end(sleeper, within_s=10)


def _round(sleeper: subprocess.Popen[str], weights_bytes: int) -> dict[str, float]:
    awake = _rss(sleeper.pid)
    sleep_s, sleep_cpu_s = _ask(sleeper, "sleep")
    asleep = _rss(sleeper.pid)
    wake_s, _ = _ask(sleeper, "wake")
    return {
        "weights_bytes": weights_bytes,
        "rss_awake": awake,
        "rss_asleep": asleep,
        "sleep_ms": sleep_s * 1000,
        "sleep_cpu_ms": sleep_cpu_s * 1000,
        "wake_s": wake_s,
        "freed_fraction": (awake - asleep) / weights_bytes,
    }


def _ask(sleeper: subprocess.Popen[str], word: str) -> tuple[float, float]:
    """Have the process sleep or wake, as `word` says; return the seconds that it took and its seconds of processor time."""
    print(word, file=sleeper.stdin, flush=True)
    seconds, computed = next_line(sleeper, within_s=ANSWER_S).split()
    return float(seconds), float(computed)


def _rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


def _sleep_and_wake_when_told(folder: Path) -> None:
    """Hold the weights of a folder as a rank does, and print their bytes. Then sleep at each input line `sleep`, and wake at any other.

    After each it prints its seconds and CPU seconds. Returns at the end of the input.

    Raises:
        RuntimeError: the first rows of the last tensor changed over sleep and wake.
    """
    module, weights = place_stack(folder)
    memory = RankMemory(CPU, ranks=1, prompts=None)
    loras = DiffusionLoRAManager({"transformer": module}, denoiser="transformer", slots=1, cached=1, max_rank=16, device=CPU)
    memory.serve(weights, loras)
    freeze_gc()
    before = weights.tensors()[-1][:4].clone()
    print(weights.report().weights_bytes, flush=True)
    for line in sys.stdin:
        began, computed = time.perf_counter(), time.process_time()
        if line.strip() == "sleep":
            memory.release(SleepLevel.HOST_MEMORY)
        else:
            memory.restore(tuple(MemoryTag))
        print(time.perf_counter() - began, time.process_time() - computed, flush=True)
        if not memory.asleep and not before.equal(weights.tensors()[-1][:4]):
            raise RuntimeError("the first rows of the last tensor changed over sleep and wake")


if __name__ == "__main__":
    _sleep_and_wake_when_told(Path(sys.argv[1]))
