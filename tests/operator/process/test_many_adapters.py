# SPDX-License-Identifier: Apache-2.0
"""A small sample of what `make soak SOAK="--part many-adapters"` does with 20,000 adapters."""

from pathlib import Path

import pytest

from support.apiserver.real_apiserver import own_apiserver
from support.soak.many_adapters import run_many

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]


async def test_many_adapters_are_mounted_ready_changed_and_there_after_the_worker_was_killed(tmp_path: Path) -> None:
    with own_apiserver() as kubeconfig:
        outcome = await run_many(tmp_path, kubeconfig, seed=1, count=120, limit_s=120)
    assert (outcome.wrong, outcome.done) == ([], 120)
