# SPDX-License-Identifier: Apache-2.0
"""The documentation: it names every reason and code that it should, and no link is broken."""

import re
from pathlib import Path

import pytest

from diffusion_operator.plan.observed.replica_state import Problem
from diffusion_worker.errors import ErrorCode
from tools.demo.walkthrough import STEPS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").glob("*/README.md"), *(ROOT / "examples").rglob("README.md")]
)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:\s]*)#([^)]*)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
# Reasons of Degraded and Awake, not of Ready.
OTHER_CONDITIONS = {"WakeFailed", "SleepFailed"}


def test_every_problem_of_a_replica_has_advice() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [problem for problem in Problem if problem not in OTHER_CONDITIONS and f"| `{problem}` |" not in page] == []


def test_every_code_of_a_worker_is_explained() -> None:
    section = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## A request")[2].partition("## The local cluster")[0]
    assert [code for code in ErrorCode if f"`{code}`" not in section] == []


def test_the_oldest_driver_is_named_for_the_cuda_that_torch_is_built_for() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    version, cuda = pins["torch"], pins["nvidia-cuda-runtime"].rpartition(".")[0]
    assert f"torch {version} is built for CUDA {cuda}" in (ROOT / "docs" / "install.md").read_text()


def test_the_quickstart_shows_the_steps_that_the_demo_takes() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    table = page.partition("\nwhat ")[2].partition("\nin all")[0]
    listed = re.findall(r"^(\S.*?) {2,}\d+\.\d\b", table, re.MULTILINE)
    assert listed[-len(STEPS) :] == [title for title, _ in STEPS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(CODE.sub("", page.read_text())) if "//" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return the link targets of a page's headings as GitHub makes them: lower case, hyphens for spaces, no other punctuation.

    Code blocks have no headings.
    """
    headings = re.findall(r"^#+ +(.*?) *$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_a_heading_lead_to_one(page: Path) -> None:
    found = [(page.parent / target if target else page, anchor) for target, anchor in ANCHOR.findall(CODE.sub("", page.read_text()))]
    assert [(str(target), anchor) for target, anchor in found if target.suffix == ".md" and anchor not in anchors(target)] == []
