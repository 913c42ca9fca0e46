# SPDX-License-Identifier: Apache-2.0
"""Every reason that a condition can have: the troubleshooting page explains it, and a table says whether a person must act."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from diffusion_operator.plan.adapters import acceptance
from diffusion_operator.plan.adapters.error_codes import DEPLOYMENT_REASONS, SOURCE_REASONS
from diffusion_operator.plan.observed.children import ANOTHER_OPERATOR, CONTESTED, LEAVING, NAME_CONFLICT, PASS_FAILED, REFUSALS, REFUSED
from support.operator.condition_reasons import PROBLEM, problems, reasons_of, returned
from support.operator.reason_table import TABLE, Asks, Row, condition

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"
REASONS = reasons_of(
    # Reasons that cannot be read from the source: they come from a decision or from a worker's code.
    {
        "view.decision.reason": {acceptance.Decision.__struct_defaults__[0], *DEPLOYMENT_REASONS, *returned(acceptance)},
        "_source_error(view)": set(SOURCE_REASONS.values()),
        "before.reason": set(SOURCE_REASONS.values()),
        "worst.reason": {ANOTHER_OPERATOR, CONTESTED, NAME_CONFLICT, LEAVING, REFUSED, PASS_FAILED, *REFUSALS},
    }
)
KINDS = {"DiffusionDeployment": REASONS.deployment, "LoRAAdapter": REASONS.adapter}
ROWS = [pytest.param(kind, row, id=f"{kind} {row.subject}") for kind, rows in TABLE.items() for row in rows]
CASES = [pytest.param(kind, type_, id=f"{kind}-{type_}") for kind, types in KINDS.items() for type_ in sorted(types)]


def explained(kind: str) -> dict[str, set[str]]:
    """Return the reasons that the page's tables of a kind explain, by condition; the line before a table names its condition."""
    section = PAGE.read_text().partition(f"\n## {kind}")[2].partition("\n## ")[0]
    found: dict[str, set[str]] = defaultdict(set)
    type_ = "Ready"
    for line in section.splitlines():
        if (opening := re.match(r"`(\w+)` ", line)) is not None:
            type_ = opening[1]
        elif line.startswith("| `"):
            found[type_] |= set(re.findall(r"`(\w+)`", line.split("|")[1]))
    return found


@pytest.mark.parametrize(("kind", "type_"), CASES)
def test_every_reason_of_a_condition_is_explained(kind: str, type_: str) -> None:
    wanted = KINDS[kind][type_] - {PROBLEM}
    if PROBLEM in KINDS[kind][type_] and type_ == "Ready":
        wanted |= problems()
    assert wanted - explained(kind)[type_] == set()


@pytest.mark.parametrize(("kind", "type_"), CASES)
def test_nothing_is_explained_that_is_no_reason_of_its_condition(kind: str, type_: str) -> None:
    wanted = KINDS[kind][type_]
    # A problem that blocks a replica is explained under Ready, and under another condition if that helps.
    allowed = wanted | (problems() if PROBLEM in wanted else set())
    assert explained(kind)[type_] - allowed == set()


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_speaks_of_no_other_condition(kind: str) -> None:
    assert explained(kind).keys() - KINDS[kind].keys() == set()


@pytest.mark.parametrize(("kind", "type_"), CASES)
def test_the_table_of_reasons_has_a_status_with_every_reason(kind: str, type_: str) -> None:
    wanted = KINDS[kind][type_] - {PROBLEM} | (problems() if (type_, PROBLEM) == ("Ready", *(KINDS[kind][type_] & {PROBLEM})) else set())
    assert wanted - {found.reason for row in TABLE[kind] if (found := condition(row, type_)) is not None} == set()


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_a_status_is_degraded_where_a_person_must_act_and_nowhere_else(kind: str, row: Row) -> None:
    degraded, ready = condition(row, "Degraded"), condition(row, "Ready")
    assert degraded is not None
    assert ready is not None
    suspended = row.asks is Asks.NOTHING_SUSPENDED
    assert (degraded.status == "True") is (row.asks is Asks.A_PERSON) or suspended, f"{ready}\n{degraded}"


def test_the_reasons_are_found_at_all() -> None:
    adapter, deployment = KINDS["LoRAAdapter"], KINDS["DiffusionDeployment"]
    assert set(adapter) == {"Ready", "Accepted", "SourceResolved", "Loaded", "UpToDate", "Degraded"}
    assert {"Evicted", "PartiallyLoaded", "SourceError", "Failed", "LoadedEverywhere"} <= adapter["Ready"]
    assert {"NameConflict", "SecretNotMounted", "Accepted", "RankTooLarge"} <= adapter["Accepted"]
    assert {"Unauthorized", "Resolved", "NotTried"} <= adapter["SourceResolved"]
    assert {"Ready", "Available", "Progressing", "Scheduled", "Awake", "AdaptersReady", "Degraded"} <= set(deployment)
    assert {"Serving", "SleepRequested", "AsleepWakeable", PROBLEM} <= deployment["Ready"]
    assert {"AllAsleep", "Waking", "NoReplicas"} <= deployment["Awake"]
    assert {"VerificationFailed", "WakeFailing", "AsExpected"} <= deployment["Degraded"]
    assert {"CrashLooping", "InsufficientGPUMemory", "ControlUnreachable"} <= problems()
