# SPDX-License-Identifier: Apache-2.0
"""The worker's own parser on the arguments of a pod."""

import click

from diffusion_worker import cli
from diffusion_worker.config import WorkerConfig


def config_of_arguments(arguments: list[str]) -> WorkerConfig:
    """The settings that `diffusion-worker` would serve with; raises what the parser raises."""
    command = cli.cli.get_command(click.Context(cli.cli), arguments[0])
    assert command is not None
    context = command.make_context("serve", arguments[1:])
    return cli.config_of({name: value for name, value in context.params.items() if name not in ("host", "port", "control_port")})
