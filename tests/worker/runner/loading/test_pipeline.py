# SPDX-License-Identifier: Apache-2.0
"""From a model folder to a pipeline: as it is, by a user's class, or with random weights; faults are errors at start."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModularPipeline

from diffusion_worker.config import Dtype, LoadFormat, WorkerConfig, read_model_index
from diffusion_worker.errors import ConfigError, RequestError
from diffusion_worker.options import check
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.pipelines.description import describe
from diffusion_worker.runner.pipelines.view import modules_of
from support.families.rig.all import FAMILIES
from support.runner.rig import RunnerRig, image_of_diffusers, request
from support.worker.process import DIGITS_MODEL

CUSTOM = """
from diffusers import StableDiffusion3Pipeline

class Loud(StableDiffusion3Pipeline):
    def encode_prompt(self, prompt, *args, **kwargs):
        return super().encode_prompt("a blue digit two", *args, **kwargs)

class NoPipeline:
    pass
"""


def config_of(**change: Any) -> WorkerConfig:
    return WorkerConfig(**{"model": str(DIGITS_MODEL), "served_name": "digits"} | change)


@pytest.fixture
def custom_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put two modules of a user's on the import path: `loud_pipelines` has a pipeline class, and `broken_pipelines` fails to import.

    Return the name of the first.
    """
    (tmp_path / "loud_pipelines.py").write_text(CUSTOM)
    (tmp_path / "broken_pipelines.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "loud_pipelines"


@pytest.mark.parametrize("separator", [":", "."])
def test_a_custom_pipeline_class_given_by_its_import_path_is_used(custom_module: str, separator: str) -> None:
    rig = RunnerRig(load_format=LoadFormat.CUSTOM_PIPELINE, pipeline=f"{custom_module}{separator}Loud")
    assert rig.model.pipeline == "Loud"
    spec = request("one", prompt="a red digit seven")
    images, _ = rig.run(spec)
    plain = load_pipeline(config_of(), torch.float32)
    np.testing.assert_array_equal(images["one"], image_of_diffusers(plain, request("same", prompt="a blue digit two")))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("loud_pipelines:Missing", "--pipeline 'loud_pipelines:Missing': module loud_pipelines has no Missing"),
        ("loud_pipelines:NoPipeline", "expected a DiffusionPipeline or ModularPipeline class"),
        ("loud_pipelines.no_such:Loud", "module loud_pipelines.no_such cannot be imported: ModuleNotFoundError"),
        ("broken_pipelines:Loud", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    ],
)
def test_a_custom_pipeline_that_is_not_there_is_one_clear_error_at_load(custom_module: str, path: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_pipeline(config_of(load_format=LoadFormat.CUSTOM_PIPELINE, pipeline=path), torch.float32)
    assert says in str(error.value)
    assert str(error.value).startswith("--pipeline")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"load_format": LoadFormat.CUSTOM_PIPELINE}, "--load-format custom-pipeline: expected --pipeline"),
        ({"load_format": LoadFormat.CUSTOM_PIPELINE, "pipeline": "JustAName"}, "--pipeline 'JustAName': expected an import path"),
        ({"load_format": LoadFormat.CUSTOM_PIPELINE, "pipeline": "a b:C"}, "--pipeline 'a b:C': expected an import path"),
        ({"load_format": LoadFormat.CUSTOM_PIPELINE, "pipeline": "no_such_pkg:C"}, "there is no module 'no_such_pkg'"),
        ({"pipeline": "some.module:Class"}, "an import path needs --load-format custom-pipeline"),
        ({"load_format": LoadFormat.DUMMY, "pipeline": "some.module:Class"}, "an import path needs --load-format custom-pipeline"),
    ],
)
def test_options_of_loading_that_cannot_work_are_refused_at_start_without_torch(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(config_of(**change))
    assert says in str(error.value)


def test_a_class_that_needs_a_library_that_is_not_there_names_the_library() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline: OnnxStableDiffusionPipeline needs .* does not have: onnx"):
        load_pipeline(config_of(pipeline="OnnxStableDiffusionPipeline"), torch.float32)


@pytest.fixture
def without_weights(tmp_path: Path) -> Path:
    """Provide the folder of a copy of the digits model without its weights files."""
    return Path(shutil.copytree(DIGITS_MODEL, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.mark.slow
def test_dummy_weights_need_no_weights_file_and_every_later_step_runs(without_weights: Path) -> None:
    rig = RunnerRig(model=str(without_weights), load_format=LoadFormat.DUMMY, served_name="bare")
    real = RunnerRig()
    assert rig.model.weights_bytes == real.model.weights_bytes
    images, errors = rig.run(request("one", seed=1), request("two", seed=2))
    assert not errors
    assert images["one"].shape == (32, 32, 3)
    assert not np.array_equal(images["one"], images["two"])


def test_dummy_weights_are_the_same_at_every_start_and_wake_up_as_they_were(without_weights: Path) -> None:
    config = config_of(model=str(without_weights), load_format=LoadFormat.DUMMY)
    one, other = (load_pipeline(config, torch.float32) for _ in range(2))
    for name, module in modules_of(one).items():
        for (key, tensor), same in zip(module.state_dict().items(), modules_of(other)[name].state_dict().values(), strict=True):
            assert torch.equal(tensor, same), f"{name}.{key}"
    rig = RunnerRig(model=str(without_weights), load_format=LoadFormat.DUMMY)
    before, _ = rig.run(request("same"))
    rig.runner.weights.release()
    rig.runner.weights.restore()
    after, _ = rig.run(request("same"))
    np.testing.assert_array_equal(before["same"], after["same"])


def test_another_pipeline_for_a_worker_with_dummy_weights_has_dummy_weights_too(without_weights: Path) -> None:
    rig = RunnerRig(model=str(without_weights), load_format=LoadFormat.DUMMY)
    with pytest.raises(RequestError, match=r"expected the name of a class in diffusers.*found the import path 'some.module:Class'"):
        rig.runner.re_init_pipeline("some.module:Class")
    assert rig.runner.re_init_pipeline("StableDiffusion3Img2ImgPipeline").pipeline == "StableDiffusion3Img2ImgPipeline"


def test_dummy_weights_leave_the_random_numbers_of_the_process_alone(without_weights: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_pipeline(config_of(model=str(without_weights), load_format=LoadFormat.DUMMY), torch.float32)
    assert torch.equal(torch.rand(3), expected)


def test_dummy_weights_without_a_config_name_the_component(without_weights: Path) -> None:
    (without_weights / "vae" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"component vae: expected a file config\.json in .*vae, found none"):
        load_pipeline(config_of(model=str(without_weights), load_format=LoadFormat.DUMMY), torch.float32)


def test_a_folder_without_weights_is_not_loaded_as_if_it_had_some(without_weights: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_pipeline(config_of(model=str(without_weights)), torch.float32)


@pytest.fixture(scope="module")
def modular_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the folder of a copy of the digits model with the index of a modular pipeline in place of the classic one."""
    folder = Path(shutil.copytree(DIGITS_MODEL, tmp_path_factory.mktemp("modular") / "model"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").unlink()
    parts = {name: value for name, value in index.items() if isinstance(value, list) and value[0]}
    modular: dict[str, Any] = {"_class_name": "StableDiffusion3ModularPipeline", "_blocks_class_name": "StableDiffusion3AutoBlocks"}
    for name, (library, kind) in parts.items():
        spec = {"pretrained_model_name_or_path": "somebody/elsewhere", "subfolder": name, "type_hint": [library, kind]}
        modular[name] = [library, kind, spec]
    (folder / "modular_model_index.json").write_text(json.dumps(modular))
    return folder


def test_a_folder_with_a_modular_index_alone_is_a_model_folder(modular_folder: Path) -> None:
    assert read_model_index(str(modular_folder))["_class_name"] == "StableDiffusion3ModularPipeline"
    check(config_of(model=str(modular_folder)))


def test_a_modular_pipeline_is_loaded_from_its_folder_whatever_its_index_points_to(modular_folder: Path) -> None:
    pipeline = load_pipeline(config_of(model=str(modular_folder)), torch.bfloat16)
    assert {"transformer", "vae", "text_encoder", "text_encoder_2"} == set(modules_of(pipeline))
    assert {module.dtype for module in modules_of(pipeline).values()} == {torch.bfloat16}


def test_a_modular_pipeline_with_dummy_weights_has_the_same_modules(modular_folder: Path) -> None:
    real, dummy = (
        load_pipeline(config_of(model=str(modular_folder), load_format=kind), torch.float32)
        for kind in LoadFormat
        if kind != "custom-pipeline"
    )
    assert {name: type(part) for name, part in modules_of(real).items()} == {name: type(part) for name, part in modules_of(dummy).items()}
    assert not torch.equal(real.transformer.proj_out.weight, dummy.transformer.proj_out.weight)


def test_a_modular_component_that_cannot_be_loaded_is_named(modular_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(modular_folder, tmp_path / "broken")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="StableDiffusion3ModularPipeline cannot be loaded: Unable to load vae"):
        load_pipeline(config_of(model=str(folder)), torch.float32)


def test_a_dtype_keeps_in_float32_what_the_class_keeps_there(without_weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import SD3Transformer2DModel
    from diffusers.models import modeling_utils

    warnings: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning", warnings.append)
    monkeypatch.setattr(SD3Transformer2DModel, "_keep_in_fp32_modules", ["norm_out"], raising=False)
    pipeline = load_pipeline(config_of(model=str(without_weights), load_format=LoadFormat.DUMMY, dtype=Dtype.BFLOAT16), torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in pipeline.transformer.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if name.startswith("norm_out")} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if not name.startswith("norm_out")} == {torch.bfloat16}
    assert warnings == []


BUILDERS = {family.name: family.build for family in FAMILIES}


@pytest.mark.parametrize(
    "name",
    [
        "StableDiffusionPipeline",
        "FluxPipeline",
        "QwenImagePipeline",
        "WanPipeline (two experts)",
        "AnimaModularPipeline",
        "Flux3ModularPipeline",
    ],
)
def test_a_saved_pipeline_of_any_family_is_loaded_and_built_again_from_its_configs(name: str, tmp_path: Path) -> None:
    built = BUILDERS[name]()
    modular = isinstance(built, ModularPipeline)
    built.save_pretrained(str(tmp_path), **({"overwrite_modular_index": True} if modular else {}))
    loaded, dummy = (
        load_pipeline(config_of(model=str(tmp_path), load_format=kind), torch.float32) for kind in (LoadFormat.DEFAULT, LoadFormat.DUMMY)
    )
    assert type(loaded) is type(dummy) is type(built)
    for component, module in modules_of(built).items():
        own, made = modules_of(loaded)[component].state_dict(), modules_of(dummy)[component].state_dict()
        assert {key: tensor.shape for key, tensor in made.items()} == {key: tensor.shape for key, tensor in own.items()}
        assert all(torch.equal(own[key], tensor) for key, tensor in module.state_dict().items())
        assert not all(torch.equal(made[key], tensor) for key, tensor in own.items())
    assert type(loaded.scheduler) is type(built.scheduler)
    assert describe(loaded, torch.float32, 0) == describe(dummy, torch.float32, 0)
