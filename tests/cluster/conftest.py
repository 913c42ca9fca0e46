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
    """Install the operator in a namespace of its own, and check its rights in the audit log at the end."""
    began = datetime.now(UTC)
    with stage(NAMESPACE) as set_up:
        set_up.kubectl.text("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
        yield ClusterRig(set_up.kubectl, set_up.images.worker)
        check_rights(set_up.kubectl, since=began, whole=all_selected(request.session, Path(__file__).parent))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Skip a test whose fixtures need nodes on this machine, if the provider has none here."""
    with skipped_elsewhere():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip a test that needs nodes on this machine, if the provider has none here."""
    with skipped_elsewhere():
        return (yield)


@contextmanager
def skipped_elsewhere() -> Iterator[None]:
    try:
        yield
    except NotOfThisMachine as error:
        pytest.skip(str(error))
