# SPDX-License-Identifier: Apache-2.0
"""A rank loads its model: nothing before the call, every byte in its place at the end, and its progress meanwhile."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.memory import filling
from diffusion_worker.memory.host_memory import machine_bytes
from diffusion_worker.memory.placeholders import Placeholders
from diffusion_worker.messages import Tick
from diffusion_worker.runner.diffusion_worker import DiffusionWorker, Rendezvous
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.loading.progress import LoadingProgress
from diffusion_worker.runner.model_runner import DiffusionModelRunner
from diffusion_worker.runner.pipelines.view import modules_of
from support.families.rig.all import FAMILIES
from support.families.rig.family_rig import Asked, FamilyRig
from support.runner.rig import OneRank, RunnerRig, image_of_diffusers, request
from support.worker.process import DIGITS_MODEL

INDEX = "model_index.json"


def runner_of(model: Path = DIGITS_MODEL, **config: Any) -> DiffusionModelRunner:
    given = WorkerConfig(**{"model": str(model), "served_name": "digits"} | config)
    return DiffusionModelRunner(given, torch.device("cpu"), OneRank())  # type: ignore[arg-type]


def test_a_runner_is_made_of_config_and_device_and_has_loaded_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was read")

    monkeypatch.setattr("diffusion_worker.runner.model_runner.load_pipeline", refuse)
    runner = runner_of(Path("no such folder"))
    report = runner.weights.report()
    assert (runner.pipeline, runner.loras) == (None, None)
    assert (report.weights_bytes, report.weights_resident_bytes, report.mappings) == (0, 0, [])
    stats = runner.get_prompt_embed_cache_stats()
    assert stats is not None and stats["size"] == 0


@pytest.mark.slow
def test_the_worker_owns_device_groups_and_memory_and_builds_the_runner_that_loads_and_executes() -> None:
    config = WorkerConfig(model=str(DIGITS_MODEL), served_name="digits")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        threads = torch.get_num_threads()
        worker = DiffusionWorker(config, rank=0, rendezvous=Rendezvous(host, port, generation=1), listener=listener)
    try:
        assert isinstance(worker.model_runner, DiffusionModelRunner)
        assert (worker.device, worker.parallel.world) == (torch.device("cpu"), 1)
        assert (worker.model_runner.pipeline, worker.memory().weights_bytes) == (None, 0)
        model = worker.load_model(lambda done, total: None)
        assert worker.memory().weights_bytes == model.weights_bytes
        assert 0 < model.free_bytes < machine_bytes()
        # The first tick is the step, the second the decoding.
        outputs = [worker.execute_stepwise(tick) for tick in (Tick(1, [request("one", steps=1)]), Tick(2))]
        assert not any(output.errors for output in outputs)
        assert [list(output.images) for output in outputs] == [[], ["one"]]
    finally:
        worker.shutdown()
        torch.set_num_threads(threads)


def test_a_loaded_model_makes_the_image_that_diffusers_makes_and_has_no_copy_of_its_files_in_memory() -> None:
    rig = RunnerRig()
    expected = image_of_diffusers(load_pipeline(rig.config, torch.float32), request("same"))
    for _ in range(2):
        images, errors = rig.run(request("one"))
        assert not errors
        np.testing.assert_array_equal(images["one"], expected)
        rig.runner.release()
        assert rig.runner.weights.report().weights_resident_bytes <= 0.02 * rig.model.weights_bytes
        rig.runner.restore()
    report = rig.runner.weights.report()
    assert report.mirror_memory_bytes < 10_000 < report.mirror_file_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["StableDiffusionXLPipeline", "FluxPipeline", "WanPipeline (two experts)", "ZImageControlNetPipeline"])
def test_a_family_that_was_saved_and_read_to_its_place_makes_the_result_of_diffusers(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    rig = FamilyRig(family)
    rig.pipeline.save_pretrained(tmp_path)
    config, unread = WorkerConfig(model=str(tmp_path), served_name="saved"), Placeholders()
    rig.pipeline = load_pipeline(config, torch.float32, unread=unread)
    rig.runner = runner_of(tmp_path)
    rig.runner.adopt(rig.pipeline, torch.float32, lambda done, total: None, unread=unread)
    (served,) = rig.together(Asked(seed=1, steps=2))
    assert torch.equal(served, rig.alone(Asked(seed=1, steps=2)))


def test_nothing_is_read_of_weights_until_they_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("diffusion_worker.memory.weight_files.WeightFile.read_exactly", refuse)
    unread = Placeholders()
    pipeline = load_pipeline(WorkerConfig(model=str(DIGITS_MODEL), served_name="digits"), torch.float32, unread=unread)
    parameters = [parameter for module in modules_of(pipeline).values() for parameter in module.parameters()]
    assert len(parameters) > 200 and all(unread.stored_of(parameter) for parameter in parameters)


def test_progress_is_told_at_every_twentieth_of_the_bytes_while_a_component_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", 64 << 10)
    rig = RunnerRig()
    done = [done for done, _ in rig.progress]
    steps = [after - before for before, after in zip([0, *done], done, strict=False)]
    assert {total for _, total in rig.progress} == {rig.model.weights_bytes}
    assert done[-1] == rig.model.weights_bytes and min(steps) >= 0
    assert max(steps) <= 0.05 * rig.model.weights_bytes


def test_progress_is_told_a_hundred_times_and_never_beyond_the_whole() -> None:
    told: list[tuple[int, int]] = []
    progress = LoadingProgress(100_000, lambda done, total: told.append((done, total)))
    for _ in range(10_500):
        progress.add(10)
    progress.finish()
    assert told[0] == (1000, 100_000) and told[-1] == (100_000, 100_000) and len(told) == 101


def change_index(folder: Path, **entries: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | entries))


def shard_of_other_size(folder: Path) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


FOLDERS = {
    "an absent component": (lambda folder: shutil.rmtree(folder / "vae"), "component vae: expected a folder .*vae, found nothing there"),
    "a class that is not there": (
        lambda folder: change_index(folder, vae=["diffusers", "NoSuchModel"]),
        r"component vae: diffusers\.NoSuchModel cannot be found",
    ),
    "a library that is not there": (
        lambda folder: change_index(folder, vae=["no_such_library", "Model"]),
        r"component vae: no_such_library\.Model cannot be found: No module named",
    ),
    "half-written weights": (
        shard_of_other_size,
        "component transformer: .*model.safetensors: expected a complete safetensors file, found .*: its last tensor, .*, ends at byte",
    ),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_model_folder_that_cannot_be_loaded_names_the_component(tmp_path: Path, fault: str) -> None:
    breaks, says = FOLDERS[fault]
    folder = Path(shutil.copytree(DIGITS_MODEL, tmp_path / "model"))
    breaks(folder)
    with pytest.raises(ConfigError, match=says):
        runner_of(folder).load_model(lambda done, total: None)


def test_a_folder_that_changes_while_it_is_read_is_an_error_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", 64 << 10)
    folder = Path(shutil.copytree(DIGITS_MODEL, tmp_path / "model"))
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"

    def write(done: int, total: int) -> None:
        path.write_bytes(path.read_bytes())

    with pytest.raises(
        ConfigError, match=r"transformer/diffusion_pytorch_model\.safetensors: was written to since it was opened|found the file's end"
    ):
        runner_of(folder).load_model(write)
