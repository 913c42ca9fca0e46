# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.suite [STAGE]`: run the tests stage by stage."""

from __future__ import annotations

import os
import signal
import sys
import time

import click

from tools.devcluster import cluster, images

from .runner import describe, minutes, run_beside
from .stages import GROUPS, KIND, KIND_SMOKE, LAST_RUNS, OF_MAKE_TEST, STAGES, LastRuns, Stage


def stages_of_make_test() -> list[Stage]:
    """Return the stages of `make test`; without the smoke on kind unless the tests of the cluster run on our own node."""
    on_node = cluster.provider_name(os.environ, docker=images.docker_answers()) == "node"
    return [stage for stage in OF_MAKE_TEST if on_node or stage is not KIND_SMOKE]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[STAGE]...", nargs=-1, type=click.Choice([stage.name for stage in STAGES]))
def main(names: tuple[str, ...]) -> None:
    """Run the named stages of the tests, or those of `make test`, and end with 1 if one failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell has programs in its background ignore the signal, which ends the stages; theirs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    last, began = LastRuns(LAST_RUNS), time.monotonic()
    wanted = [stage for stage in STAGES if stage.name in names] if names else stages_of_make_test()
    groups = [chosen for group in (*GROUPS, (KIND,)) if (chosen := [stage for stage in group if stage in wanted])]
    click.echo(f"Stages of this run:\n{describe([stage for group in groups for stage in group], last.read())}")
    for group in groups:
        if not run_beside(group, last):
            sys.exit(1)
    click.echo(f"All stages passed in {minutes(time.monotonic() - began)}.")


main(prog_name="python -m tools.suite")
