# SPDX-License-Identifier: Apache-2.0
"""The folder `operator` shares its name with a module of the standard library: it must stay a folder that Python never imports."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "path", ["operator/__init__.py", "operator/conftest.py", "operator/tests", "tests/operator/__init__.py", "tests/__init__.py"]
)
def test_a_path_that_would_shadow_the_standard_library_does_not_exist(path: str) -> None:
    assert not (ROOT / path).exists()
