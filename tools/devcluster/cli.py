# SPDX-License-Identifier: Apache-2.0
"""The command line: results on stdout, progress on stderr, an error as one sentence and exit code 1."""

from __future__ import annotations

import json
import os
import signal
import sys

import click

from . import apiserver, cluster, images
from .connect import connect as connected
from .errors import DevclusterError
from .paths import cache_dir
from .progress import say


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except DevclusterError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run a Kubernetes cluster for the demo and the tests."""
    # SIGTERM ends us like Ctrl-C, so that what we started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@main.command()
def check() -> None:
    """Ask whether this machine has what is needed; change nothing."""
    where = cluster.provider()
    where.check()
    click.echo(f"provider: {where.name}")


@main.command()
@click.option("--only-apiserver", is_flag=True, help="Only etcd and kube-apiserver, on loopback; prints the kubeconfig's path.")
def up(only_apiserver: bool) -> None:
    """Start the cluster, or find it running."""
    if only_apiserver:
        click.echo(apiserver.up())
        return
    cluster.provider().up()


@main.command()
@click.option("--purge", is_flag=True, help="Remove the cache too: programs, images, layers.")
@click.option("--only-apiserver", is_flag=True, help="End only the processes that `up --only-apiserver` started.")
def down(purge: bool, only_apiserver: bool) -> None:
    """End the cluster and what `up --only-apiserver` left."""
    apiserver.down()
    if not only_apiserver:
        provider = cluster.provider()
        provider.down(purge=purge)
        if provider.name != "given":
            say("the cluster is gone" + ("" if purge else f"; its programs and images stay in {cache_dir()}"))


@main.command()
@click.argument("images_to_build", metavar="[IMAGE]...", nargs=-1, type=click.Choice(sorted(images.INPUTS)))
def prepare(images_to_build: tuple[str, ...]) -> None:
    """Make what is slow, once: the cluster's programs, and beside them the images named."""
    cluster.prepare(images_to_build)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def status(as_json: bool) -> None:
    """Say which provider there is and whether the cluster runs."""
    known = cluster.status()
    if as_json:
        click.echo(json.dumps(known))
        return
    for key, value in known.items():
        click.echo(f"{key}: {value}")


@main.command()
def kubeconfig() -> None:
    """Print the kubeconfig's path."""
    click.echo(cluster.provider().kubeconfig())


@main.command(name="exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(command: tuple[str, ...]) -> None:
    """Run COMMAND with KUBECONFIG, kubectl and helm at hand."""
    environment = cluster.environment()
    try:
        os.execvpe(command[0], list(command), environment)
    except FileNotFoundError:
        raise DevclusterError(f"there is no program {command[0]}") from None


@main.command()
@click.option("-n", "--namespace", default="default", show_default=True)
@click.argument("target", metavar="SERVICE[:PORT]")
def connect(namespace: str, target: str) -> None:
    """Print a local address for a Service and keep it until ended."""
    service, _, port = target.partition(":")
    with connected(namespace, service, port or "http") as url:
        click.echo(url)
        signal.pause()


@main.command()
@click.argument("action", type=click.Choice(["add", "remove"]))
def node(action: str) -> None:
    """Give the node a second one beside it, or take it away; only where the nodes are on this machine."""
    nodes = cluster.provider().own_nodes()
    if action == "add":
        click.echo(nodes.add_second())
    else:
        nodes.remove_second()


@main.command(name="build-image")
@click.argument("image", type=click.Choice(sorted(images.INPUTS)))
def build_image(image: str) -> None:
    """Build an image where its content is new; print its reference."""
    click.echo(images.build(image))


@main.command(name="load-image")
@click.argument("reference")
def load_image(reference: str) -> None:
    """Bring a built image to the cluster; print the name by which pods ask for it."""
    click.echo(cluster.provider().load_image(reference))
