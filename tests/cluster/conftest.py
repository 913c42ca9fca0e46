# SPDX-License-Identifier: Apache-2.0
"""A cluster with our container images and our chart in it, once a session; ended afterwards if it was not running before.

At the end the audit log must show that the operator was refused nothing. After all of the tests here it must also show that no right was
unused.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.cluster.audit import all_selected, check_rights
from support.cluster.rig import ClusterRig
from tools.demo.stage import stage
from tools.devcluster.errors import NotOfThisMachine

NAMESPACE = "diffusion-tests"


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Iterator[ClusterRig]:
    """Install the operator once for all tests, in a namespace that enforces the restricted Pod Security level.

    Afterwards the audit log must show no refusal, and after the whole suite no unused right.
    """
    began = datetime.now(UTC)
    with stage(NAMESPACE) as set_up:
        set_up.kubectl.text("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
        yield ClusterRig(set_up.kubectl, set_up.images.worker)
        check_rights(set_up.kubectl, since=began, whole=all_selected(request.session, Path(__file__).parent))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Skip the test if a fixture raises `NotOfThisMachine`: the cluster in use runs elsewhere, so its nodes cannot be reached."""
    with skipped_elsewhere():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip the test if its body raises `NotOfThisMachine`: the cluster in use runs elsewhere, so its nodes cannot be reached."""
    with skipped_elsewhere():
        return (yield)


@contextmanager
def skipped_elsewhere() -> Iterator[None]:
    try:
        yield
    except NotOfThisMachine as error:
        pytest.skip(str(error))
