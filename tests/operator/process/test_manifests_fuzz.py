# SPDX-License-Identifier: Apache-2.0
"""A sample of the manifests that `make soak SOAK="--part manifests"` makes: each is refused with a name, or gets a true status."""

from pathlib import Path

import pytest

from support.apiserver.real_apiserver import own_apiserver
from support.operator.manifest_strategies import Case, cases
from support.soak.operator_manifests import names_the_field, run_manifests

pytestmark = [pytest.mark.apiserver, pytest.mark.slow]


async def test_generated_manifests_are_refused_by_name_or_get_a_true_status(tmp_path: Path) -> None:
    with own_apiserver() as kubeconfig:
        outcome = await run_manifests(tmp_path, kubeconfig, seed=7, count=50, limit_s=600)
    assert outcome.wrong == []
    assert outcome.done == 50
    assert outcome.refused > 5
    assert outcome.strangers > 3
    assert outcome.obstructed == 1
    assert sum(outcome.reconciled.values()) > 15


def test_the_same_number_makes_the_same_manifests() -> None:
    assert cases(3, count=5) == cases(3, count=5)


@pytest.mark.parametrize(
    ("message", "touched", "named"),
    [
        ('LoRAAdapter "m" is invalid: spec.source.path: Too long', (), True),
        ('unknown field "spec.unheardOf"', ("spec", "unheardOf"), True),
        ("the object is invalid", ("spec", "replicas"), False),
        ("spec: Required value", ("spec",), True),
    ],
)
def test_a_message_names_a_field_or_does_not(message: str, touched: tuple[str, ...], named: bool) -> None:
    kind = next(case.kind for case in cases(1, count=20) if case.kind.kind == "LoRAAdapter")
    assert names_the_field(message, Case(kind, {}, "", touched)) is named
