# SPDX-License-Identifier: Apache-2.0
"""The documentation says what there is: every field, every reason and code it should name, and no link that leads nowhere."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffusion_operator.plan.groups import Problem
from diffusion_worker.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "charts").glob("*/README.md")])
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
FIELD_ROW = re.compile(r"^\| ((?:`[A-Za-z0-9.]+`(?:, )?)+) \|", re.MULTILINE)
# These are reasons of Degraded and Awake, not of Ready.
OTHER_CONDITIONS = {"WakeFailed", "SleepFailed"}


def spec_fields(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The ends of a spec by their dotted names; a map or a list is an end."""
    for name, inner in schema.get("properties", {}).items():
        if "properties" in inner:
            yield from spec_fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def documented_fields(title: str) -> set[str]:
    section = (ROOT / "docs" / "fields.md").read_text().partition(f"\n## {title}")[2].partition("\n## ")[0]
    return {name for row in FIELD_ROW.findall(section) for name in re.findall(r"`([A-Za-z0-9.]+)`", row)}


@pytest.mark.parametrize(("kind", "file"), [("DiffusionDeployment", "diffusiondeployments"), ("LoRAAdapter", "loraadapters")])
def test_the_page_of_fields_has_every_field_and_no_other(kind: str, file: str) -> None:
    crd = yaml.safe_load((ROOT / "crds" / f"{file}.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert documented_fields(kind) == set(spec_fields(schema))


def test_every_problem_of_a_replica_has_advice() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [problem for problem in Problem if problem not in OTHER_CONDITIONS and f"| `{problem}` |" not in page] == []


def test_every_code_of_a_worker_is_explained() -> None:
    section = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## A request")[2].partition("## The local cluster")[0]
    assert [code for code in ErrorCode if f"`{code}`" not in section] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "//" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
