# SPDX-License-Identifier: Apache-2.0
"""The health rules in docs/gitops.md, run in Lua and CEL on statuses that the reconciles write.

Real: the rules, the statuses, Lua, and CEL by a library for Python. Not real: Argo CD and Flux themselves.
"""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import celpy
import lupa
import msgspec
import pytest
import yaml

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, KINDS, Kind
from support.operator.reason_table import TABLE, Row
from support.operator.rig import Rig, adapter, deployment, serving, with_adapter

PAGE = Path(__file__).parents[2] / "docs" / "gitops.md"
ARGO, FLUX = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S))


def argo(kind: Kind, manifest: dict[str, Any]) -> str:
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(manifest, recursive=True)
    found = lua.execute(ARGO["data"][f"resource.customizations.health.diffusion-operator.dev_{kind.kind}"])
    assert found.message
    return str(found.status)


def flux(kind: Kind, manifest: dict[str, Any]) -> str:
    """Return Flux's verdict on an object: the first of `inProgress`, `failed` and `current` whose expression holds, else `waiting`."""
    (rules,) = (one for one in FLUX["spec"]["healthCheckExprs"] if one["kind"] == kind.kind)
    assert rules["apiVersion"] == kind.api_version
    environment = celpy.Environment()
    variables = {name: celpy.json_to_cel(manifest.get(name, {})) for name in ("metadata", "spec", "status")}
    for verdict in ("inProgress", "failed", "current"):
        if environment.program(environment.compile(rules[verdict])).evaluate(variables):
            return verdict
    return "waiting"


async def edited(**spec: Any) -> Rig:
    rig = await serving(1)
    rig.cluster.change(DEPLOYMENT, "d", lambda now: now.update(spec))
    await rig.run(120)
    return rig


async def new() -> Rig:
    rig = Rig()
    rig.cluster.put(deployment())
    return rig


async def starting() -> Rig:
    rig = await new()
    await rig.run(20)
    return rig


async def failing() -> Rig:
    rig = await serving(1)
    rig.cluster.crashed("d-0-0", code=1, message="no model there")
    await rig.run(30)
    return rig


CASES: dict[str, tuple[Callable[[], Awaitable[Rig]], str, str]] = {
    "not seen yet": (new, "Progressing", "inProgress"),
    "starting": (starting, "Progressing", "waiting"),
    "serving": (lambda: serving(1), "Healthy", "current"),
    "suspended": (lambda: edited(suspend=True), "Suspended", "current"),
    "asleep on request": (lambda: edited(sleep={"policy": "Asleep"}), "Healthy", "current"),
    "without replicas": (lambda: edited(replicas=0), "Healthy", "current"),
    "failing": (failing, "Degraded", "failed"),
}


@pytest.mark.parametrize(("rig", "in_argo", "in_flux"), CASES.values(), ids=CASES)
async def test_a_deployment_is_as_healthy_as_its_spec_asks(rig: Callable[[], Awaitable[Rig]], in_argo: str, in_flux: str) -> None:
    found = (await rig()).cluster.find(DEPLOYMENT, "d")
    assert found is not None
    assert (argo(DEPLOYMENT, found), flux(DEPLOYMENT, found)) == (in_argo, in_flux), found.get("status")


async def test_an_adapter_is_healthy_once_it_is_ready_and_failed_where_it_cannot_be() -> None:
    rig = Rig()
    rig.cluster.put(adapter())
    found = rig.cluster.find(ADAPTER, "x")
    assert found is not None
    assert (argo(ADAPTER, found), flux(ADAPTER, found)) == ("Progressing", "inProgress")
    found = (await with_adapter()).cluster.find(ADAPTER, "x")
    assert found is not None
    assert (argo(ADAPTER, found), flux(ADAPTER, found)) == ("Healthy", "current")


@pytest.mark.parametrize("turned", [False, True], ids=["", "backwards"])
@pytest.mark.parametrize(
    ("kind", "row"), [pytest.param(KINDS[kind], row, id=f"{kind} {row.subject}") for kind in TABLE for row in TABLE[kind]]
)
def test_both_tools_conclude_what_the_table_of_reasons_says_in_any_order_of_the_conditions(kind: Kind, row: Row, turned: bool) -> None:
    conditions = [msgspec.to_builtins(one) for one in row.verdicts][:: -1 if turned else 1]
    manifest = {"metadata": {"generation": 1}, "status": {"observedGeneration": 1, "conditions": conditions}}
    assert (argo(kind, manifest), flux(kind, manifest)) == row.asks.value, conditions
