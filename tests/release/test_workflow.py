# SPDX-License-Identifier: Apache-2.0
"""The workflows: our commands exist and take the arguments given, and steps use outputs of earlier steps only."""

import re
import shlex
from collections.abc import Iterator
from string import Template
from typing import Any

import pytest

from support.release.workflow import PUBLISH, ROOT, WORKFLOWS
from tools.release.__main__ import parser

BY_DIGEST = f"registry.example/image@sha256:{'0' * 64}"
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def lines() -> Iterator[Any]:
    """Yield test parameters for the shell lines of all workflows and the python3 lines of `docs/install.md`.

    A shell line comes with the names of the variables that its workflow, job and step set.
    """
    for name, workflow in WORKFLOWS.items():
        for job in workflow["jobs"].values():
            for step in job.get("steps", []):
                variables = {**workflow.get("env", {}), **job.get("env", {}), **step.get("env", {}), "GITHUB_OUTPUT": ""}
                yield from (pytest.param(line, [*variables], id=f"{name}: {line}") for line in step.get("run", "").splitlines())
    page = (ROOT / "docs" / "install.md").read_text()
    yield from (pytest.param(line.replace("DIGEST", "0" * 64), [], id=line) for line in re.findall(r"^python3 .*", page, re.MULTILINE))


@pytest.mark.parametrize(("line", "variables"), lines())
def test_a_line_is_a_command_that_is_here(line: str, variables: list[str]) -> None:
    words = shlex.split(Template(line).substitute(dict.fromkeys(variables, BY_DIGEST)).removesuffix(f' >> "{BY_DIGEST}"'))
    if words[0] == "make":
        assert words[1:] and set(words[1:]) <= set(TARGETS)
    else:
        assert words[:3] == ["python3", "-m", "tools.release"]
        parser().parse_args(words[3:])


def test_a_step_reads_outputs_of_steps_before_it() -> None:
    made: set[tuple[str, str]] = set()
    for step in PUBLISH:
        assert set(re.findall(r"steps\.(\w+)\.outputs\.(\w+)", str(step))) <= made, step
        made |= {(step["id"], output) for output in ("name", "digest")} if "id" in step else set()
    assert {step for step, _ in made} == {"operator", "worker", "chart"}


def test_all_that_is_published_has_its_provenance_attested_and_each_image_its_bill_of_materials() -> None:
    given = [step["with"] for step in PUBLISH if step.get("uses", "").startswith("actions/attest@")]
    attested = [(re.findall(r"steps\.(\w+)\.", one["subject-name"] + one["subject-digest"]), one.get("sbom-path")) for one in given]
    assert attested == [
        *((["operator"] * 2, None), (["operator"] * 2, "operator.cdx.json")),
        *((["worker"] * 2, None), (["worker"] * 2, "worker.cdx.json")),
        (["chart"] * 2, None),
    ]
    written = re.findall(r'sbom "\$(\w+)" (\S+)', "\n".join(step.get("run", "") for step in PUBLISH))
    assert written == [("OPERATOR", "operator.cdx.json"), ("WORKER", "worker.cdx.json")]


def test_a_release_is_tested_first_by_the_other_workflow() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["publish"]["needs"] == "test" and jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    # YAML reads the key `on` as true.
    assert "workflow_call" in WORKFLOWS["ci"][True]
