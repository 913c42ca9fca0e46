# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.suite [STAGE]`: run the tests stage by stage."""

from __future__ import annotations

import signal
import sys
import time

import click

from .runner import describe, minutes, run_beside
from .stages import GROUPS, LAST_RUNS, STAGES, LastRuns


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[STAGE]...", nargs=-1, type=click.Choice([stage.name for stage in STAGES]))
def main(names: tuple[str, ...]) -> None:
    """Run the named stages of the tests, or all, and end with 1 if one failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell has programs in its background ignore the signal, which ends the stages; theirs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    last, began = LastRuns(LAST_RUNS), time.monotonic()
    groups = [chosen for group in GROUPS if (chosen := [stage for stage in group if not names or stage.name in names])]
    click.echo(f"Stages of this run:\n{describe([stage for group in groups for stage in group], last.read())}")
    for group in groups:
        if not run_beside(group, last):
            sys.exit(1)
    click.echo(f"All stages passed in {minutes(time.monotonic() - began)}.")


main(prog_name="python -m tools.suite")
