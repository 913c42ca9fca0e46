# SPDX-License-Identifier: Apache-2.0
"""The help of each command of both programs, an option a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click


def helps() -> Iterator[tuple[str, Iterable[str]]]:
    """Yield, for each command of the operator's and the worker's program, a title and lines: its usage, its help, and its options."""
    from diffusion_operator.__main__ import main as operator
    from diffusion_worker.cli import cli as worker

    for program, command in {"diffusion-operator": operator, "diffusion-worker": worker}.items():
        for name, inner in _commands(program, command):
            yield f"{name} --help", _lines(name, inner)


def _lines(name: str, command: click.Command) -> Iterator[str]:
    with command.make_context(name, [], resilient_parsing=True, max_content_width=10_000, terminal_width=10_000) as context:
        yield f"    {command.get_usage(context)}"
        yield f"    {name}: {' '.join((command.help or '').split())}"
        records = (param.get_help_record(context) for param in command.get_params(context))
        yield from (f"    {option}: {text}" for option, text in filter(None, records) if text)


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for below, inner in command.commands.items() if isinstance(command, click.Group) else ():
        yield from _commands(f"{name} {below}", inner)
