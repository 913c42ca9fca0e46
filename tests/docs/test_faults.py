# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \|.*`(tests/[\w/]+\.py)::(test_\w+)` \|$", re.MULTILINE)


def test_each_fault_has_a_number_of_its_own_and_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "development" / "faults.md").read_text()
    rows = ROW.findall(page)
    numbers = [int(number) for number, _, _ in rows]
    assert numbers == sorted(set(numbers))
    assert len(rows) == page.count("\n| ") - 1, "a row has no test"
    assert [test for _, file, test in rows if f"def {test}(" not in (ROOT / file).read_text()] == []
