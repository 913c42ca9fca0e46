# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "development" / "faults.md"
FINDINGS = {f"T{number}" for number in range(1, 31)} - {"T29"}
"""Numbers of the findings in the review of the operator. T29 was about a version that was never released."""
ROW = re.compile(r"^\| (\d+) \|.*`(tests/[\w/]+\.py)::(test_\w+)` \|$", re.MULTILINE)


def test_each_fault_has_a_number_of_its_own_and_a_test_that_is_there() -> None:
    page = PAGE.read_text()
    rows = ROW.findall(page)
    numbers = [int(number) for number, _, _ in rows]
    assert numbers == sorted(set(numbers))
    assert len(rows) == page.count("\n| ") - 1, "a row has no test"
    assert [test for _, file, test in rows if f"def {test}(" not in (ROOT / file).read_text()] == []


def test_each_finding_of_the_review_has_a_fault() -> None:
    faults = [line.split(" | ")[1] for line in PAGE.read_text().splitlines() if ROW.match(line)]
    tagged = {tag for fault in faults for tag in re.findall(r"\((T\d+)\)$", fault)}
    assert tagged == FINDINGS
