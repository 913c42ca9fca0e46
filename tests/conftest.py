# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures of every test session."""

import gc
import logging
from collections.abc import Iterator

# Hypothesis' plugin imports this after the last test in any case. pytest would then compile it deep in its stack. If the garbage collector
# reports an event loop there that looptime left open, CPython 3.11 fails with "AST constructor recursion depth mismatch" (gh-106905).
# No loop is left open yet here.
import hypothesis.internal.observability  # noqa: F401
import pytest
from hypothesis import HealthCheck, settings

from support.apiserver.real_apiserver import kubeconfig_of_apiserver

__all__ = ["kubeconfig_of_apiserver"]

# The duration of an example depends on the machine, so it is not checked.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Modules and test items live to the end: collecting garbage among them took a quarter of the imports' time.
gc.disable()

pytest_plugins = ("tools.suite.canary", "tools.suite.order")


def pytest_collection_finish() -> None:
    """Exempt the objects that exist after the collection of tests from garbage collection, and enable it again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def log_records_as_before() -> Iterator[None]:
    """Remove after each test the filter of log messages that the worker's command line installs in this process too."""
    factory = logging.getLogRecordFactory()
    yield
    if logging.getLogRecordFactory() is not factory:
        logging.setLogRecordFactory(factory)
        logging.captureWarnings(False)
