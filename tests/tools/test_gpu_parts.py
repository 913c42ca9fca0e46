# SPDX-License-Identifier: Apache-2.0
"""The parts of `make gpu` that need no device: its items, the carried wheels, and the marked tests."""

import ast
import importlib.metadata
import tomllib
import zipfile
from itertools import groupby
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.gpu.machine import needed_by
from support.syntax import parse
from tools.gpu.items import ITEMS
from tools.gpu.wheels import CARRIED, LEFT_BEHIND, MACHINE, THERE, unpack, write_own_metadata
from tools.requirements import CONSTRAINTS, dependencies, versions

ROOT = Path(__file__).parents[2]


def test_every_item_is_a_function_that_takes_the_run_and_has_a_name_of_its_own() -> None:
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    for item in ITEMS:
        module, _, name = item.function.partition(":")
        tree = parse((ROOT / "tools" / "gpu" / f"{module}.py").read_text())
        found = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
        assert [argument.arg for argument in found[0].args.args] == ["run"], item


def test_items_of_a_process_follow_each_other_and_the_device_is_first() -> None:
    processes = [name for name, _ in groupby(item.process for item in ITEMS)]
    assert len(processes) == len(set(processes))
    assert ITEMS[0].name == "device"


def test_wheels_carry_everything_that_the_worker_imports_and_the_machine_has_not() -> None:
    names = {canonicalize_name(Requirement(line).name) for line in dependencies("worker")}
    there = needed_by(set(THERE), python=MACHINE)
    missing = needed_by(names, but_for=set(LEFT_BEHIND), python=MACHINE) - there - set(CARRIED)
    assert missing == set()
    assert set(LEFT_BEHIND) <= names | there


def test_every_carried_wheel_is_pinned_and_none_is_a_library_of_the_machine() -> None:
    assert set(CARRIED) <= set(versions(CONSTRAINTS.read_text()))
    assert not set(CARRIED) & {*THERE, "numpy", "tokenizers", "safetensors", "huggingface-hub", "accelerate", "triton"}


def test_wheels_are_unpacked_side_by_side(tmp_path: Path) -> None:
    wheels = [tmp_path / f"{name}-1-py3-none-any.whl" for name in ("one", "two")]
    for wheel in wheels:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{wheel.name.split('-')[0]}/__init__.py", "")
    unpack(wheels, tmp_path / "packages")
    assert {path.name for path in (tmp_path / "packages").iterdir()} == {"one", "two"}


def test_a_wheel_with_a_part_for_another_place_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "odd.whl", "w") as archive:
        archive.writestr("odd-1.data/purelib/odd.py", "")
    with pytest.raises(RuntimeError, match="no wheel with a part for another place"):
        unpack([tmp_path / "odd.whl"], tmp_path / "packages")


def test_the_worker_finds_its_version_although_it_is_not_installed(tmp_path: Path) -> None:
    write_own_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    version = tomllib.loads((ROOT / "worker" / "pyproject.toml").read_text())["project"]["version"]
    assert (found.name, found.version) == ("diffusion-worker", version)
