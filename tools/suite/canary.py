# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that searches what each test lets its product write for texts of requests, and fails the test that has one.

A prompt of a test carries the word below, or asks the digits model for a digit by its name. `tests/tools/test_canary.py` holds
that. Searched are the captured output and log of every test, and by `search` what a support class collects of other processes.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

WORD = "kumquatfen"
PROMPT = re.compile(rf"{WORD}|\bdigits? (zero|one|two|three|four|five|six|seven|eight|nine)\b", re.IGNORECASE)
# A failed test shows its own source too, which has prompts; so only these are read.
CAPTURED = ("Captured stdout", "Captured stderr", "Captured log")


def search(text: str, where: str) -> None:
    """Raise AssertionError if a text has a prompt's words; `where` says in the message what the text is."""
    if found := places(text):
        raise AssertionError(f"{where}: expected no text of a request, found one in {found}")


def places(text: str) -> str:
    """Return up to three lines that have a prompt's words, by number and with the text before the words; "" if there are none."""
    lines = enumerate(text.splitlines(), 1)
    found = [f"line {number} after {line[: match.start()][-60:]!r}" for number, line in lines if (match := PROMPT.search(line))]
    return ", ".join(found[:3])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a passed phase of a test into a failed one if the output or log captured in it has a prompt's words."""
    report = yield
    captured = [(name, text) for name, text in report.sections if name.startswith(CAPTURED) and name.endswith(report.when)]
    found = [f"{name}: {places(text)}" for name, text in captured if places(text)]
    if found and report.outcome == "passed":
        report.outcome = "failed"
        report.longrepr = "expected no text of a request in the output, found some in " + "; ".join(found)
    return report
