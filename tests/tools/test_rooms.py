# SPDX-License-Identifier: Apache-2.0
"""The size of folders: each stays small enough to be read at a glance."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 24


@pytest.mark.parametrize("top", ["operator/src", "worker/src", "tests", "tools", "benchmarks"])
def test_no_folder_has_more_than_24_python_files(top: str) -> None:
    folders = [folder for folder in [ROOT / top, *(ROOT / top).rglob("*")] if folder.is_dir()]
    counts = {folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MOST} == {}
