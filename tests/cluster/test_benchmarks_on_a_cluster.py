# SPDX-License-Identifier: Apache-2.0
"""Tiny runs of the benchmarks that need a cluster, beside the operator that runs there."""

from collections.abc import Iterator

import pytest

from benchmarks import cold_request
from benchmarks.registry import GOALS, Needs
from support.cluster.rig import ClusterRig
from support.real_benchmarks import assert_whole

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture
def emptied(rig: ClusterRig) -> Iterator[ClusterRig]:
    """Provide the rig unchanged. After the test, delete the benchmark's deployment and wait until its pods are gone."""
    yield rig
    rig.kubectl.text("delete", cold_request.DEPLOYMENT, "--ignore-not-found", deadline_s=60)
    rig.eventually("the pods are gone", lambda: not rig.pods(cold_request.NAME))


def test_the_benchmark_of_a_request_at_a_sleeping_deployment_runs_tiny(emptied: ClusterRig) -> None:
    assert_whole(cold_request.measure_on(emptied.kubectl, rounds=cold_request.TINY_ROUNDS))


def test_no_other_benchmark_needs_a_cluster() -> None:
    assert {goal.module for goal in GOALS.values() if goal.needs is Needs.CLUSTER} == {"cold_request"}
