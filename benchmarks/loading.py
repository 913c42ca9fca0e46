# SPDX-License-Identifier: Apache-2.0
"""P6: from the files of a model to weights that are in place, against a plain parallel read and against `from_pretrained`.

The digits pipeline with a transformer of about two gigabytes of random float16 in four shards, written by the run itself. Ours
is the whole load of a rank, from the model's folder to a runner that can take requests.

The plain read takes the same files into a fresh mapping of the kind for weights, because bytes dropped at once are not loaded.
`from_pretrained` loads the whole pipeline into float32, a CPU's default, where it has to convert all of it. With the file's dtype it maps
the files and reads nothing. For the record that is timed too, with every page touched. So is `from_pretrained` with its weights then
copied into slabs, which is the state that our load ends in. Both ratios are medians of adjacent pairs; a figure for the record is the
faster of two runs.

Pages of cold files are dropped before each reading, and those of warm ones are read. Before each run the memory that it will need
is touched and given back. A virtual machine's host takes time to hand out memory that was not used lately.
"""

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import torch
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import save_file
from torch._C._distributed_c10d import HashStore

from benchmarks.pairs import TINY_PLAN, Pairs, Plan, Times, take_pairs, timed
from benchmarks.result import Measured
from diffusion_worker.config import Dtype, WorkerConfig, usable_cores
from diffusion_worker.memory.slabs import HostSlab
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.parallel.rows import Parallel

DIGITS = Path(__file__).parents[1] / "examples" / "digits" / "model"
# 64 heads of 32 and eight joint blocks: a width of 2,048, over a billion parameters.
LARGER = {"num_attention_heads": 64, "caption_projection_dim": 2048, "num_layers": 8}
SHARD_BYTES = 550_000_000
READERS = 4
PIECE_BYTES = 8 << 20
TARGETS = {"load_vs_raw_read": ">= 0.9", "speedup_vs_from_pretrained": ">= 2", "peak_over_file_bytes": "<= 1.1"}


class Size(msgspec.Struct, frozen=True):
    """The size of a run: settings of the larger transformer, the plan for the pairs, and runs of each way that is only recorded."""

    larger: Mapping[str, int] = msgspec.field(default_factory=lambda: LARGER)
    # A disk and every core are asked for seconds: on a shared machine the halves are seldom nearer. The median of several pairs is.
    plan: Plan = Plan(wanted=7, at_most=30, noise=0.20, within_s=150)
    record: int = 2


TINY = Size(larger={"num_layers": 1}, plan=TINY_PLAN, record=1)


def measure(*, tiny: bool = False) -> Measured:
    """Write a model, and measure our load of it against a plain read and against `from_pretrained`.

    Ratios are speeds: above 1 ours is faster. Sets the number of torch threads for the process.
    """
    size = TINY if tiny else Size()
    torch.set_num_threads(usable_cores())
    with tempfile.TemporaryDirectory() as place:
        files = _Files(make_model(Path(place) / "model", size.larger))
        cold = take_pairs(
            "the cold plain read",
            lambda: files.time(drop_pages, lambda: plain_read(files.all, files.size), 1),
            lambda: files.time(drop_pages, lambda: _load(files.folder, Dtype.FLOAT16), 1),
            plan=size.plan,
        )
        warm = take_pairs(
            "the warm from_pretrained",
            lambda: files.time(_read, lambda: _from_pretrained(files.folder, torch.float32), 2),
            lambda: files.time(_read, lambda: _load(files.folder, Dtype.FLOAT32), 2),
            plan=size.plan,
        )
        record = _record(files, size.record)
        peak = max(_peak_of(lambda: _load(files.folder, Dtype.FLOAT16)) for _ in range(size.record))
    figures = _figures(cold, warm, record, files.size) | {"peak_over_file_bytes": peak / files.size}
    samples = [*cold.samples(), *warm.samples(), record]
    return Measured({name: round(value, 3) for name, value in figures.items()}, TARGETS, samples, [cold, warm])


class _Files:
    """The model's folder, the files of its weights, and `size`, the bytes of all these files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all = sorted(folder.glob("*/*.safetensors"))
        self.size = sum(file.stat().st_size for file in self.all)

    def time(self, prepare: Callable[[list[Path]], None], run: Callable[[], Any], sizes: int) -> Times:
        """Time `run` after two preparations: `prepare` makes the files cold or warm, and memory of `sizes` times their bytes is touched."""
        prepare(self.all)
        _touch_memory(sizes * self.size)
        times = timed(run)
        gc.collect()
        return times


def _record(files: _Files, rounds: int) -> dict[str, float]:
    """Return the seconds of loads that no target is set for, by name; each is the fastest of `rounds` runs."""
    folder = files.folder
    ways: dict[str, tuple[Callable[[list[Path]], None], Callable[[], Any], int]] = {
        "cold_from_pretrained": (drop_pages, lambda: _from_pretrained(folder, torch.float32), 2),
        "cold_load_float32": (drop_pages, lambda: _load(folder, Dtype.FLOAT32), 2),
        "warm_from_pretrained_placed": (_read, lambda: _placed(_from_pretrained(folder, torch.float32), folder), 4),
        "warm_from_pretrained_float16": (_read, lambda: _touched(_from_pretrained(folder, torch.float16)), 1),
        "warm_load": (_read, lambda: _load(folder, Dtype.FLOAT16), 1),
    }
    return {name: min(files.time(*way)["s"] for _ in range(rounds)) for name, way in ways.items()}


def _figures(cold: Pairs, warm: Pairs, record: dict[str, float], size: int) -> dict[str, float]:
    return {
        "load_vs_raw_read": 1 / cold.ratio(),
        "speedup_vs_from_pretrained": 1 / warm.ratio(),
        "speedup_vs_from_pretrained_cold": record["cold_from_pretrained"] / record["cold_load_float32"],
        "speedup_vs_from_pretrained_placed": record["warm_from_pretrained_placed"] / warm.ours("s"),
        "speedup_same_dtype_touched": record["warm_from_pretrained_float16"] / record["warm_load"],
        "cold_load_gb_per_s": size / cold.ours("s") / 1e9,
        "cold_raw_gb_per_s": size / cold.baseline("s") / 1e9,
        "warm_load_gb_per_s": size / record["warm_load"] / 1e9,
        "file_gb": size / 1e9,
    }


def make_model(folder: Path, larger: Mapping[str, int] = LARGER) -> Path:
    """Write the digits model to a new folder and return it; its transformer is larger, random, in float16 and in shards.

    All other components are copied as they are. Returns when the files are on the disk.
    """
    shutil.copytree(DIGITS, folder, ignore=lambda path, names: [name for name in names if Path(path).name == "transformer"])
    config = json.loads((DIGITS / "transformer" / "config.json").read_text()) | larger
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    with init_empty_weights():
        shapes = {name: tensor.shape for name, tensor in SD3Transformer2DModel.from_config(config).state_dict().items()}
    values = torch.randn(max(shape.numel() for shape in shapes.values()), dtype=torch.float16)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = values[: shape.numel()].view(shape).clone()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"diffusion_pytorch_model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / "transformer" / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(2 * shape.numel() for shape in shapes.values())}, "weight_map": weight_map}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()  # pages that are not written yet cannot be dropped
    return folder


def drop_pages(files: list[Path]) -> None:
    """Ask the system to drop the pages of these files from its cache, so that the next reading is cold.

    Pages that are not yet written to the disk stay.
    """
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            while opened.read(PIECE_BYTES):
                pass


def _touch_memory(size: int) -> None:
    HostSlab(size).bytes.fill_(1)


def plain_read(files: list[Path], size: int) -> HostSlab:
    """Read files, of `size` bytes together, one after the other into a fresh mapping, by four threads; return the mapping.

    Raises:
        RuntimeError: fewer or more bytes were read.
    """
    slab = HostSlab(size)
    content: Any = slab.bytes.numpy()
    target, start, jobs = memoryview(content), 0, []
    for file in files:
        descriptor, length = os.open(file, os.O_RDONLY), file.stat().st_size
        jobs += [
            (descriptor, offset, target[start + offset : start + min(offset + PIECE_BYTES, length)])
            for offset in range(0, length, PIECE_BYTES)
        ]
        start += length
    with ThreadPoolExecutor(READERS) as pool:
        read = sum(pool.map(lambda job: os.preadv(job[0], [job[2]], job[1]), jobs))
    for descriptor in {job[0] for job in jobs}:
        os.close(descriptor)
    if read != size:
        raise RuntimeError(f"expected to read {size} bytes, read {read}")
    return slab


def _load(folder: Path, dtype: Dtype) -> DiffusionModelRunner:
    parallel = Parallel(rank=0, world=1, device=torch.device("cpu"), store=HashStore(), timeout_s=60)
    try:
        runner = DiffusionModelRunner(WorkerConfig(model=str(folder), served_name="big", dtype=dtype), torch.device("cpu"), parallel)
        runner.load_model(lambda done, total: None)
    finally:
        parallel.close()
    return runner


def _from_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    diffusers.logging.disable_progress_bar()
    absent = dict.fromkeys(("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"))
    return StableDiffusion3Pipeline.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True, **absent)


def _placed(pipeline: Any, folder: Path) -> ModelWeights:
    """Place the weights of a loaded pipeline as a rank holds them: in slabs, with their mirror in the folder's files."""
    weights = ModelWeights(torch.device("cpu"))
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            weights.place(part, folder / name)
    return weights


def _touched(pipeline: Any) -> Any:
    """Read a byte of each page of all weights, so that mapped files are really read; return the pipeline."""
    for part in pipeline.components.values():
        for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
            parameter.view(-1).view(torch.uint8)[:: os.sysconf("SC_PAGE_SIZE")].sum()
    return pipeline


def _peak_of(run: Callable[[], Any]) -> int:
    """Run something, and return by how many bytes the resident memory of this process grew at most. The call's result is dropped."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status_bytes("VmRSS")
    made = run()
    peak = _status_bytes("VmHWM")
    del made
    return peak - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
