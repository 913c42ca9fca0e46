# SPDX-License-Identifier: Apache-2.0
"""Records of a user's own package, which it registers when its pipeline's module is imported, as the documentation shows it."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_worker.config import LoadFormat, WorkerConfig
from diffusion_worker.errors import ConfigError
from diffusion_worker.runner.families import model_record, registry, signature_of
from diffusion_worker.runner.loading.pipeline import load_pipeline
from diffusion_worker.runner.model_call.call import ModelCall, group_key
from diffusion_worker.runner.pipelines.conditioning import image_inputs
from support.worker.process import DIGITS_MODEL

PAGE = Path(__file__).parents[4] / "docs" / "custom-pipelines.md"
# A user's mistake: the name of a class that diffusers has.
TAKEN = """
from diffusion_worker.runner.families import ModelRecord, register
register(ModelRecord("FluxTransformer2DModel"))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a folder on Python's path with the module of the documentation's example, and `mytaken`.

    Records that they register are gone afterwards.
    """
    [example] = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "register(" in code]
    (tmp_path / "mypackage.py").write_text(example)
    (tmp_path / "mytaken.py").write_text(TAKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_found", {})
    yield tmp_path
    for name in ("mypackage", "mytaken"):
        sys.modules.pop(name, None)


def loaded(module: str) -> Any:
    config = WorkerConfig(model=str(DIGITS_MODEL), served_name="digits", load_format=LoadFormat.CUSTOM_PIPELINE, pipeline=module)
    return load_pipeline(config, torch.float32)


def forget(name: str) -> None:
    """Remove the record of this class name from the registry."""
    registry._by_name.pop(name)
    registry._found.clear()


def test_a_pipeline_of_a_users_package_has_the_record_that_the_package_registers_at_import(package: Path) -> None:
    inputs = image_inputs(loaded("mypackage:MyPipeline"))
    assert inputs is not None
    assert (inputs.most, inputs.fitted, inputs.required) == (4, False, False)


def test_calls_of_a_users_model_share_one_by_the_roles_of_its_record(package: Path) -> None:
    model = object.__new__(importlib.import_module("mypackage").GridTransformer)

    def key(grid: torch.Tensor) -> Any:
        return group_key(ModelCall("transformer", "forward", {"hidden_states": torch.ones(2, 4), "grid": grid}, module=model))

    assert key(torch.zeros(2, 3)) == key(torch.zeros(2, 3))
    assert key(torch.zeros(2, 3)) != key(torch.ones(2, 3)), "the record says that it belongs to the whole call"
    forget("GridTransformer")
    assert key(torch.zeros(2, 3)) == key(torch.ones(2, 3)), "without the record it looks like rows"


def test_the_signature_in_the_example_is_the_one_that_the_tool_writes(package: Path) -> None:
    kind = importlib.import_module("mypackage").GridTransformer
    assert model_record(kind).signatures == {"forward": signature_of(kind, "forward")}


def test_a_record_for_a_name_that_is_taken_is_one_clear_error_at_load(package: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--pipeline 'mytaken:Mine': module mytaken cannot be imported: .*a class named FluxTransformer2DModel"
    ):
        loaded("mytaken:Mine")
