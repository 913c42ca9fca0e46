# SPDX-License-Identifier: Apache-2.0
"""New weights for a loaded model, and another pipeline for a worker, without a restart."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffusion_worker.errors import RequestError
from diffusion_worker.lora.layers import LoRALinear
from diffusion_worker.lora.request import LoRARequest
from diffusion_worker.memory.weights import ModelWeights
from diffusion_worker.messages import LoRAUse, Tick
from diffusion_worker.runner.diffusion_worker import DiffusionWorker
from support.runner.rig import RunnerRig, request
from support.worker.process import DIGITS

pytestmark = pytest.mark.slow

STRIPES = LoRARequest(lora_name="stripes", lora_int_id=1, lora_path=str(DIGITS / "loras" / "stripes"))


def forget(rig: RunnerRig) -> None:
    """Free everything that a rig's runner holds, at once, so that the rig cannot be used any more.

    Otherwise the next runner's memory could join a leftover slab, and the kernel would report one mapping.
    """
    rig.runner.drop_all()
    rig.runner.weights = ModelWeights(torch.device("cpu"))
    rig.runner.pipeline = None
    rig.parallel.calls.clear()
    gc.collect()


@pytest.fixture
def rig() -> Iterator[RunnerRig]:
    """Provide a runner for one test, which may change it."""
    rig = RunnerRig()
    yield rig
    forget(rig)


@pytest.fixture(scope="module")
def steady() -> Iterator[RunnerRig]:
    """Provide a runner that tests leave unchanged."""
    rig = RunnerRig()
    yield rig
    forget(rig)


def halved(rig: RunnerRig) -> dict[str, torch.Tensor]:
    """Return new values for some weights, by full name: the transformer's output layer times 0.5, the VAE's last convolution times 0.9.

    The rig's own weights stay as they are.
    """
    own = rig.runner.pipeline.transformer.state_dict()
    names = ["proj_out.weight", "proj_out.bias"]
    vae = rig.runner.pipeline.vae.state_dict()["decoder.conv_out.weight"]
    return {f"transformer.{name}": own[name] * 0.5 for name in names} | {"vae.decoder.conv_out.weight": vae * 0.9}


def test_named_tensors_replace_parameters_and_the_loaded_names_are_returned(rig: RunnerRig) -> None:
    before, _ = rig.run(request("one"))
    new = halved(rig)
    assert rig.runner.load_weights(iter(new.items())) == new.keys()
    assert torch.equal(rig.runner.pipeline.transformer.proj_out.weight, new["transformer.proj_out.weight"])
    after, _ = rig.run(request("one"))
    assert not np.array_equal(before["one"], after["one"])


def test_new_weights_stay_over_sleep_and_wake(rig: RunnerRig) -> None:
    rig.runner.load_weights(halved(rig).items())
    before, _ = rig.run(request("one"))
    rig.runner.release()
    rig.runner.restore()
    after, _ = rig.run(request("one"))
    np.testing.assert_array_equal(before["one"], after["one"])


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("transformer.no_such.weight", (1,), r"1 of 2 tensors do not fit, so none was written: transformer\.no_such\.weight \(the model"),
        ("transfomer.proj_out.bias", (8,), r"transfomer\.proj_out\.bias \(the model has no such tensor\)"),
        ("transformer.proj_out.bias", (3,), r"transformer\.proj_out\.bias \(expected the shape \(\d+,\), found \(3,\)\)"),
    ],
)
def test_weights_of_unknown_names_or_other_shapes_are_refused_and_nothing_is_changed(
    steady: RunnerRig, name: str, shape: tuple[int, ...], says: str
) -> None:
    before = steady.runner.pipeline.transformer.proj_out.weight.clone()
    with pytest.raises(RequestError, match=says) as refused:
        steady.runner.load_weights([("transformer.proj_out.weight", before * 0), (name, torch.zeros(shape))])
    assert refused.value.code == "InvalidRequest"
    assert torch.equal(steady.runner.pipeline.transformer.proj_out.weight, before)


def worker_of(rig: RunnerRig) -> DiffusionWorker:
    """Return a rank's worker around the rig's runner; it has no device, no process group and no other state."""
    worker = object.__new__(DiffusionWorker)
    worker.model_runner = rig.runner
    return worker


def test_a_worker_reads_new_weights_from_a_file_or_a_folder(rig: RunnerRig, tmp_path: Path) -> None:
    new = halved(rig)
    save_file(new, tmp_path / "one.safetensors")
    assert worker_of(rig).load_weights(path=str(tmp_path)) == sorted(new)
    assert torch.equal(rig.runner.pipeline.transformer.proj_out.weight, new["transformer.proj_out.weight"])
    assert worker_of(rig).load_weights(path=str(tmp_path / "one.safetensors")) == sorted(new)


@pytest.mark.parametrize(
    ("name", "says"), [("empty", "found none in it"), ("missing.safetensors", "No such file"), ("bad.safetensors", "Error")]
)
def test_files_that_are_no_weights_are_refused_by_their_path(steady: RunnerRig, tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(RequestError, match=f"{name}.*{says}|{says}.*{name}") as refused:
        worker_of(steady).load_weights(path=str(tmp_path / name))
    assert refused.value.code == "InvalidRequest"


def test_weights_are_not_replaced_under_a_request_that_runs(rig: RunnerRig) -> None:
    rig.runner.execute_stepwise(Tick(1, [request("runs", steps=5)]))
    with pytest.raises(RequestError, match="while requests run, found 1") as refused:
        rig.runner.load_weights(halved(rig).items())
    assert refused.value.code == "Busy"


def test_new_weights_of_a_text_encoder_are_not_hidden_by_the_prompt_cache(rig: RunnerRig) -> None:
    before, _ = rig.run(request("one"))
    own = rig.runner.pipeline.text_encoder.state_dict()
    rig.runner.load_weights((f"text_encoder.{name}", tensor * 0.5) for name, tensor in own.items() if tensor.is_floating_point())
    stats = rig.runner.get_prompt_embed_cache_stats()
    assert stats is not None and stats["size"] == 0
    after, _ = rig.run(request("one"))
    assert not np.array_equal(before["one"], after["one"])


def test_a_layer_that_an_adapter_wraps_keeps_its_name_for_weights(rig: RunnerRig) -> None:
    assert rig.runner.loras is not None
    rig.runner.loras.add_adapter(STRIPES)
    name, layer = next((name, part) for name, part in rig.runner.pipeline.transformer.named_modules() if isinstance(part, LoRALinear))
    zeros = torch.zeros_like(layer.base.weight)
    rig.runner.load_weights({f"transformer.{name}.weight": zeros}.items())
    assert not layer.base.weight.any()


OTHER = """
from diffusers import StableDiffusion3Pipeline

class Other(StableDiffusion3Pipeline):
    def encode_prompt(self, prompt, *args, **kwargs):
        return super().encode_prompt("a blue digit two", *args, **kwargs)

class NeedsMore(StableDiffusion3Pipeline):
    def __init__(self, transformer, scheduler, vae, text_encoder, no_such_part):
        raise AssertionError("is never made")

class Sounds(StableDiffusion3Pipeline):
    worker_makes = "audio"

    def __call__(self, prompt):
        return AudioPipelineOutput(audios=[])
"""


@pytest.fixture
def other_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "other_pipelines.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "other_pipelines"


def test_another_pipeline_is_loaded_after_the_old_one_was_freed_and_adapters_start_anew(rig: RunnerRig, other_pipelines: str) -> None:
    assert rig.runner.loras is not None
    rig.runner.loras.add_adapter(STRIPES)
    expected, _ = rig.run(request("two", prompt="a blue digit two"))
    gone = [weakref.ref(rig.runner.pipeline.transformer), weakref.ref(rig.runner.loras), weakref.ref(rig.runner.weights)]
    weights_bytes = rig.runner.weights.report().weights_bytes
    rig.parallel.calls.clear()  # the rig's records name the modules that they were made on
    told = rig.runner.re_init_pipeline(f"{other_pipelines}:Other")
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]
    assert told.pipeline == "Other"
    assert rig.runner.weights.report().weights_bytes == weights_bytes
    assert rig.runner.loras.list_adapters() == []
    images, _ = rig.run(request("two", prompt="a red digit seven"))
    np.testing.assert_array_equal(images["two"], expected["two"])
    rig.runner.loras.add_adapter(STRIPES)
    styled, _ = rig.run(request("two", loras=[LoRAUse(1, 1.0)]))
    assert not np.array_equal(styled["two"], expected["two"])


def test_pipelines_that_cannot_be_loaded_leave_the_old_one_serving(rig: RunnerRig, other_pipelines: str) -> None:
    before, _ = rig.run(request("one"))
    refused = {
        "NoSuch": "module other_pipelines has no NoSuch",
        "NeedsMore": "NeedsMore cannot be loaded",
        "Sounds": "Sounds makes neither",
    }
    for name, says in refused.items():
        with pytest.raises(RequestError, match=says):
            rig.runner.re_init_pipeline(f"{other_pipelines}:{name}")
        after, errors = rig.run(request("one"))
        assert not errors
        np.testing.assert_array_equal(before["one"], after["one"])
