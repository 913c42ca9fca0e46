# SPDX-License-Identifier: Apache-2.0
"""The help of each command of both programs, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

WIDTH = 140


def helps() -> Iterator[tuple[str, Iterable[str]]]:
    """Yield, for each command of the operator's and the worker's program, a title and the lines of its help."""
    from diffusion_operator.__main__ import main as operator
    from diffusion_worker.cli import cli as worker

    for program, command in {"diffusion-operator": operator, "diffusion-worker": worker}.items():
        for name, inner in _commands(program, command):
            with click.Context(inner, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH) as context:
                yield f"{name} --help", inner.get_help(context).splitlines()


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for below, inner in command.commands.items() if isinstance(command, click.Group) else ():
        yield from _commands(f"{name} {below}", inner)
