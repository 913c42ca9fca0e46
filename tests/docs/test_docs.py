# SPDX-License-Identifier: Apache-2.0
"""The documentation says what there is: every reason and code it should name, and no link that leads nowhere."""

import re
from pathlib import Path

import pytest

from diffusion_operator.plan.groups import Problem
from diffusion_worker.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "charts").glob("*/README.md"), *(ROOT / "examples").rglob("README.md")]
)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`[^`\n]*`")
# These are reasons of Degraded and Awake, not of Ready.
OTHER_CONDITIONS = {"WakeFailed", "SleepFailed"}


def test_every_problem_of_a_replica_has_advice() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [problem for problem in Problem if problem not in OTHER_CONDITIONS and f"| `{problem}` |" not in page] == []


def test_every_code_of_a_worker_is_explained() -> None:
    section = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## A request")[2].partition("## The local cluster")[0]
    assert [code for code in ErrorCode if f"`{code}`" not in section] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(CODE.sub("", page.read_text())) if "//" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
