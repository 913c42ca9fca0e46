# SPDX-License-Identifier: Apache-2.0
"""`diffusion-operator run`: read the settings, start kopf."""

import logging
from pathlib import Path

import click
import kopf

from diffusion_operator.errors import SettingsError
from diffusion_operator.handlers import Process, build_kopf_settings, build_registry
from diffusion_operator.kopf_storage import NoMemories
from diffusion_operator.logs import ObjectFields
from diffusion_operator.metrics import serve_metrics
from diffusion_operator.open_files import raise_limit
from diffusion_operator.settings import Settings, election_settings, operator_pods, read_operator_keys


@click.group(context_settings={"auto_envvar_prefix": "DIFFUSION_OPERATOR"})
def main() -> None:
    """Run the operator, which keeps DiffusionDeployments and LoRAAdapters as their specs ask."""


@main.command()
@click.option("--engine-image", required=True, help="Container image of workers whose spec names none.")
@click.option(
    "--operator-key-file",
    required=True,
    type=click.Path(path_type=Path),
    help="A file with the key that control tokens are derived from; further lines hold keys from before a rotation.",
)
@click.option("--operator-key-secret", default="", help="Secret that holds this key, in the operator's namespace; no worker may mount it.")
@click.option("--operator-service-account", default="", help="The operator's own ServiceAccount; no worker may use it.")
@click.option(
    "--allow-host-access", is_flag=True, help="Let deployments ask for host namespaces, host paths, privileges and added capabilities."
)
@click.option("--operator-namespace", default=None, help="Namespace of the operator's own pods, for NetworkPolicies that let them in.")
@click.option(
    "--operator-label", "operator_labels", multiple=True, metavar="NAME=VALUE", help="A label of the operator's own pods; may be repeated."
)
@click.option("--lease-namespace", default=None, help="Namespace of the Lease that elects a leader, the operator's own.")
@click.option("--lease-name", default=None, help="Name of the Lease, which also names this release in the status of objects.")
@click.option(
    "--identity",
    default=None,
    help="Name of this process in the Lease. Give --lease-namespace, --lease-name and --identity together. Without them there is no "
    "leader election: run one process only.",
)
@click.option("--namespace", "namespaces", multiple=True, help="A namespace to watch; may be repeated.")
@click.option("--all-namespaces", is_flag=True, help="Watch every namespace.")
@click.option("--metrics-port", type=int, default=None, help="Port of the Prometheus metrics; by default none are served.")
@click.option("--liveness-port", type=int, default=8080, show_default=True, help="Port of /healthz.")
@click.option("--log-format", type=click.Choice(["plain", "json"]), default="plain", show_default=True, help="Form of the log lines.")
def run(
    engine_image: str,
    operator_key_file: Path,
    operator_key_secret: str,
    operator_service_account: str,
    operator_namespace: str | None,
    operator_labels: tuple[str, ...],
    lease_namespace: str | None,
    lease_name: str | None,
    identity: str | None,
    namespaces: tuple[str, ...],
    *,
    allow_host_access: bool,
    all_namespaces: bool,
    metrics_port: int | None,
    liveness_port: int,
    log_format: str,
) -> None:
    """Run the operator until a signal ends it."""
    if all_namespaces == bool(namespaces):
        raise click.UsageError("give either --namespace, once or more, or --all-namespaces")
    try:
        current, *previous = read_operator_keys(operator_key_file)
        own_pods = operator_pods(operator_namespace, operator_labels)
        election = election_settings(lease_namespace, lease_name, identity)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    settings = Settings(
        engine_image=engine_image,
        operator_key=current,
        previous_keys=tuple(previous),
        operator_key_secret=operator_key_secret,
        operator_service_account=operator_service_account,
        allow_host_access=allow_host_access,
        operator_pods=own_pods,
        election=election,
        namespaces=namespaces,
        metrics_port=metrics_port,
        liveness_port=liveness_port,
    )
    configure_logs(log_format)
    try:
        raise_limit()
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    if metrics_port is not None:
        serve_metrics(metrics_port)
    process = Process(settings)
    try:
        kopf.run(
            registry=build_registry(process),
            settings=build_kopf_settings(),
            memories=NoMemories(),
            standalone=True,
            namespaces=namespaces,
            clusterwide=all_namespaces,
            liveness_endpoint=f"http://0.0.0.0:{liveness_port}/healthz",
        )
    except Exception:
        if process.failure:
            raise click.ClickException(process.failure) from None
        raise


def configure_logs(log_format: str) -> None:
    """Set up the logs of the whole process: JSON lines for `json`, plain text for any other word.

    Access logs and kopf's line for each watch event are left out below a warning. Each line of a pass gets its object.
    """
    kopf.configure(log_format=kopf.LogFormat.JSON if log_format == "json" else kopf.LogFormat.FULL)
    for chatty in ("aiohttp.access", "kopf.objects"):  # a line for each probe, and one for each watch event
        logging.getLogger(chatty).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(ObjectFields())


if __name__ == "__main__":
    main()
