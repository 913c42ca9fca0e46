# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: with `--no-skips` a test that is skipped has failed."""

from __future__ import annotations

from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--no-skips` to pytest."""
    parser.addoption("--no-skips", action="store_true", help="let a test that is skipped fail")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure with the skip's reason, if `--no-skips` is given."""
    report = yield
    if report.skipped and item.config.getoption("--no-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        report.outcome, report.longrepr = "failed", f"expected no skipped test, because of --no-skips; {reason}"
    return report
