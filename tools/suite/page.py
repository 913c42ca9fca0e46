# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.suite.page`: write docs/development/test-time.md and tests/seconds.json from the last run of each stage."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping

import click

from tools.devcluster.paths import REPOSITORY

from .ledger import ProcessCost, TestCost, read
from .order import SECONDS, file_of
from .stages import LEDGER, STAGES, LastRuns, StageRun

PAGE = REPOSITORY / "docs" / "development" / "test-time.md"
SLOWEST_TESTS = 20
SLOWEST_FILES = 40

HEAD = """# Test time

`make test` keeps what each test cost, and `python -m tools.suite.page` writes this page from it.
It also writes `tests/seconds.json`, from which pytest takes the order of the files: the longest come first.

Times are seconds by the clock. CPU is the processor time of a test's process, and of its child processes that ended during the test.
So a worker that several tests share counts for the last of them. Waiting is the time of a test beyond its CPU.

"""


def stages_table(runs: Mapping[str, StageRun]) -> list[str]:
    """Return a table with a row for each stage that ran: its time, the machine's load before and during it, and the busy cores."""
    ran = [(stage.name, runs[stage.name]) for stage in STAGES if stage.name in runs]
    rows = [[name, seconds(run.seconds), f"{run.load_before:.1f}", f"{run.load:.1f}", f"{run.busy_cores:.1f}"] for name, run in ran]
    return table(["stage", "time", "load before", "mean load", "busy cores"], rows)


def processes_table(costs: Mapping[str, list[ProcessCost]]) -> list[str]:
    """Build a table of each test process: its tests, and the seconds that it was starting, testing (on the CPU or waiting) and idle.

    A process is idle from its end to that of the stage's last process.
    """
    rows = []
    for stage, processes in costs.items():
        end = max(cost.ended for cost in processes)
        for cost in processes:
            tested, cpu_s = sum(test.seconds for test in cost.tests), sum(test.cpu_s for test in cost.tests)
            waited = sum(max(0.0, test.seconds - test.cpu_s) for test in cost.tests)
            parts = [cost.collected - cost.began, tested, cpu_s, waited, end - cost.ended]
            rows.append([stage, cost.name, str(len(cost.tests)), *map(seconds, parts)])
    return table(["stage", "process", "tests", "starting", "testing", "CPU", "waiting", "idle at the end"], rows)


def files_table(costs: Mapping[str, list[ProcessCost]]) -> list[str]:
    """Build a table of the 40 test files whose tests took the most time in sum, with their stage, number of tests, time and CPU."""
    files: dict[tuple[str, str], list[TestCost]] = defaultdict(list)
    for stage, test in _tests(costs):
        files[stage, file_of(test.name)].append(test)
    rows = [
        [stage, f"`{file}`", str(len(tests)), seconds(sum(test.seconds for test in tests)), seconds(sum(test.cpu_s for test in tests))]
        for (stage, file), tests in sorted(files.items(), key=lambda item: -sum(test.seconds for test in item[1]))
    ]
    return table(["stage", "file", "tests", "time", "CPU"], rows[:SLOWEST_FILES])


def tests_table(costs: Mapping[str, list[ProcessCost]]) -> list[str]:
    """Build a table of the 20 slowest tests of all stages, with their time and CPU in seconds."""
    slowest = sorted(_tests(costs), key=lambda item: -item[1].seconds)[:SLOWEST_TESTS]
    return table(
        ["stage", "test", "time", "CPU"], [[stage, f"`{test.name}`", seconds(test.seconds), seconds(test.cpu_s)] for stage, test in slowest]
    )


def file_seconds(costs: Mapping[str, list[ProcessCost]]) -> dict[str, float]:
    """Return the seconds of each file's tests; for a file with tests in several stages, those of the longest stage."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stage, test in _tests(costs):
        found[file_of(test.name)][stage] += test.seconds
    return {file: round(max(stages.values()), 1) for file, stages in sorted(found.items())}


def recorded(new: Mapping[str, float]) -> dict[str, float]:
    """Return these seconds merged over those in tests/seconds.json, without files that no longer exist."""
    old: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return {file: value for file, value in sorted((old | dict(new)).items()) if (REPOSITORY / file).exists()}


def _tests(costs: Mapping[str, list[ProcessCost]]) -> Iterable[tuple[str, TestCost]]:
    return ((stage, test) for stage, processes in costs.items() for process in processes for test in process.tests)


def seconds(value: float) -> str:
    """Return seconds as a text without a unit, with a digit behind the point below 10."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Write the page and the recorded seconds from what the last run of each stage kept."""
    costs = {stage.name: found for stage in STAGES if (found := read(LEDGER, stage.name))}
    parts = {
        "Stages": stages_table(LastRuns(LEDGER).read()),
        "Processes": processes_table(costs),
        "Slowest files": files_table(costs),
        "Slowest tests": tests_table(costs),
    }
    PAGE.write_text(HEAD + "\n\n".join("\n".join([f"## {title}", "", *lines]) for title, lines in parts.items()) + "\n")
    SECONDS.write_text(json.dumps(recorded(file_seconds(costs)), indent=1) + "\n")
    click.echo(f"wrote {PAGE} and {SECONDS}")


if __name__ == "__main__":
    main(prog_name="python -m tools.suite.page")
