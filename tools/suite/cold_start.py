# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.suite.cold_start`: run `make demo` or `make test` with empty caches, and write a page of its timeline."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from tools.devcluster.paths import REPOSITORY

from .page import table
from .runner import minutes

PAGES = {"demo": "cold-start.md", "test": "cold-start-of-tests.md"}
DEADLINE_S = {"demo": 3600.0, "test": 5400.0}
WIDTH = 48
SHORTEST_S = 2.0

HEAD = """# Cold start of `make {target}`

`python -m tools.suite.cold_start --target {target}` writes this page. It clones the repository and runs `make {target}` there, with empty
caches of this project, Go, uv and pip. Debian's packages that were installed before stay installed.

"""
# devcluster says the end of a step; the demo says a heading, and later its end.
_STEP = re.compile(r"\[ *[\d.]+ s\] (.+): done in ([\d.]+) s$")
_ENVIRONMENT = re.compile(r"Made (\.venv) in (\d+) s$")
_STAGE = re.compile(r"([a-z-]+): passed in ([\d.]+) (s|min)$")
_HEADING = re.compile(r"\[ *\d+:\d+\]  (.+)$")
_END = re.compile(r" +done in ([\d.]+) s")


@dataclass(frozen=True)
class Step:
    """A step of the run: its name, when it began in seconds since the run's beginning, and how many seconds it took."""

    name: str
    began: float
    seconds: float


def steps_of(lines: Iterable[tuple[float, str]]) -> list[Step]:
    """Find the steps that a run reports in its lines, each with its seconds, and return them in the order of their beginnings.

    Steps of less than 2 s are left out. Each line comes with the seconds at which it was written.
    """
    found, heading = [], ""
    for now, line in lines:
        if match := _HEADING.match(line):
            heading = match[1]
        elif match := _STEP.match(line) or _ENVIRONMENT.match(line):
            found.append(Step(match[1].replace(", once)", ")"), now - float(match[2]), float(match[2])))
        elif match := _STAGE.match(line):
            seconds = float(match[2]) * (60 if match[3] == "min" else 1)
            found.append(Step(f"**{match[1]}**", now - seconds, seconds))
        elif match := _END.match(line):
            found.append(Step(f"**{heading}**", now - float(match[1]), float(match[1])))
    return sorted((step for step in found if step.seconds >= SHORTEST_S), key=lambda step: step.began)


def timeline(steps: Iterable[Step], whole_s: float) -> list[str]:
    """Draw steps as the lines of a Markdown table. A row has a step's start and length in seconds, and shows both as a bar."""
    rows = []
    for step in steps:
        before, length = round(step.began / whole_s * WIDTH), max(1, round(step.seconds / whole_s * WIDTH))
        bar = ("·" * before + "█" * length)[:WIDTH].ljust(WIDTH, "·")
        rows.append([step.name, f"{max(0.0, step.began):.0f}", f"{step.seconds:.0f}", f"`{bar}`"])
    return table(["step", "begins", "seconds", "when"], rows)


def empty_caches(folder: Path) -> dict[str, str]:
    """Return this process's environment with all caches in the folder; nothing is made or emptied there."""
    caches = {"XDG_CACHE_HOME": "cache", "GOCACHE": "go-build", "GOMODCACHE": "go-modules", "UV_CACHE_DIR": "uv", "PIP_CACHE_DIR": "pip"}
    return {**os.environ, **{name: str(folder / place) for name, place in caches.items()}}


def run(folder: Path, target: str) -> tuple[list[tuple[float, str]], float]:
    """Clone the repository into `folder`, and run `make TARGET` there with empty caches.

    Return its lines, each after the seconds at which it came, and the seconds of the whole run. At the end, also after a failure,
    `make cluster-down` ends the cluster.

    Raises:
        ClickException: make failed, or passed its deadline.
    """
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True, timeout=60)
    environment, began, lines = empty_caches(folder), time.monotonic(), []
    make = subprocess.Popen(
        ["make", target], cwd=clone, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert make.stdout is not None
        for line in make.stdout:
            now = time.monotonic() - began
            lines.append((now, line.rstrip("\n")))
            click.echo(line, nl=False, err=True)
            if now > DEADLINE_S[target]:
                raise click.ClickException(f"make {target} was not done after {DEADLINE_S[target]:.0f} s")
        if make.wait(60) != 0:
            raise click.ClickException(f"make {target} ended with code {make.returncode}")
        return lines, time.monotonic() - began
    finally:
        make.kill()
        subprocess.run(["make", "cluster-down"], cwd=clone, env=environment, stdout=subprocess.DEVNULL, timeout=300)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path, exists=False))
@click.option("--target", type=click.Choice(list(PAGES)), default="demo", show_default=True, help="The command: make demo or make test.")
def main(folder: Path, target: str) -> None:
    """Run the command with its caches in FOLDER, which must not exist and is removed afterwards, and write the page.

    It takes 30 GB for the demo and 45 GB for the tests.
    """
    if folder.exists():
        raise click.ClickException(f"expected no folder {folder}; it is there")
    folder.mkdir(parents=True)
    load, times = os.getloadavg()[0], os.times()
    try:
        lines, whole_s = run(folder.resolve(), target)
    finally:
        # Go makes its modules read-only.
        subprocess.run(["chmod", "-R", "u+w", folder], check=False, timeout=300)
        shutil.rmtree(folder)
    cpu_s = os.times().children_user + os.times().children_system - times.children_user - times.children_system
    machine = f"{os.cpu_count()} cores, with a load of {load:.1f} before"
    summary = f"In all {minutes(whole_s)} on {machine}; make and what it waited for used {cpu_s:.0f} s of CPU.\n\n"
    page = REPOSITORY / "docs" / "development" / PAGES[target]
    page.write_text(HEAD.format(target=target) + summary + "\n".join(timeline(steps_of(lines), whole_s)) + "\n")
    click.echo(f"wrote {page}")


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m tools.suite.cold_start"))
