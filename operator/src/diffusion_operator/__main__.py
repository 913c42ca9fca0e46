# SPDX-License-Identifier: Apache-2.0
"""`diffusion-operator run`: read the settings, start kopf."""

import logging
import resource
from pathlib import Path

import click
import kopf

from diffusion_operator.errors import SettingsError
from diffusion_operator.handlers import Process, build_kopf_settings, build_registry
from diffusion_operator.metrics import serve_metrics
from diffusion_operator.reconcile.keyed_queue import OBJECT
from diffusion_operator.settings import Settings, election_settings, operator_pods, read_operator_keys

OWN_FILES = 128
"""Those of the process itself: the API server's watches and writes, logs, probes, metrics."""
FILES_A_WORKER = 2
"""A worker's watch is a connection, and so is a call beside it."""
LEAST_WORKERS = 64
FEW_WORKERS = 2000

# As a program this module is named `__main__`.
log = logging.getLogger("diffusion_operator")

PLAIN = "[%(asctime)s] %(name)s [%(levelname)s] %(message)s"  # kopf's own format cuts a logger's name after 20 characters


@click.group(context_settings={"auto_envvar_prefix": "DIFFUSION_OPERATOR"})
def main() -> None:
    """Reconcile DiffusionDeployments and LoRAAdapters of a Kubernetes cluster."""


@main.command()
@click.option("--engine-image", required=True, help="The worker's container image for each DiffusionDeployment without spec.engine.image.")
@click.option(
    "--operator-key-file",
    required=True,
    type=click.Path(path_type=Path),
    help="A file with the key from which the operator derives each DiffusionDeployment's control token. Up to two more lines hold the keys "
    "from before a rotation. Each key has at least 16 bytes.",
)
@click.option(
    "--operator-key-secret",
    default="",
    help="Name of the Secret with the operator's key, in --operator-namespace. A DiffusionDeployment that would mount it gets no pod.",
)
@click.option(
    "--operator-service-account",
    default="",
    help="Name of the operator's own ServiceAccount, in --operator-namespace. A DiffusionDeployment that would use it gets no pod.",
)
@click.option(
    "--allow-host-access",
    is_flag=True,
    help="Let DiffusionDeployments ask for host namespaces, host paths, privileges and added capabilities. Without it they get no pod.",
)
@click.option(
    "--operator-namespace",
    default=None,
    help="Namespace of the operator's own pods. With --operator-label it lets the operator make a NetworkPolicy for each "
    "DiffusionDeployment, by which only these pods reach the workers' control port.",
)
@click.option(
    "--operator-label",
    "operator_labels",
    multiple=True,
    metavar="NAME=VALUE",
    help="A label of the operator's own pods, by which a NetworkPolicy lets them reach the workers' control port; may be repeated.",
)
@click.option("--lease-namespace", default=None, help="Namespace of the Lease by which the operator's processes elect a leader.")
@click.option(
    "--lease-name",
    default=None,
    help="Name of the Lease: one for all processes that watch the same namespaces.",
)
@click.option(
    "--identity",
    default=None,
    help="Name of this process in the Lease. Give --lease-namespace, --lease-name and --identity together. Without them there is no "
    "leader election: run one process only.",
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    help="A namespace whose objects the operator looks after; may be repeated. Give this or --all-namespaces.",
)
@click.option("--all-namespaces", is_flag=True, help="Look after the objects of every namespace.")
@click.option(
    "--metrics-port", type=int, default=None, help="Port at which Prometheus can read the metrics; by default they are not served."
)
@click.option("--liveness-port", type=int, default=8080, show_default=True, help="Port of the liveness probe, /healthz.")
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
    """Run the operator in the foreground until SIGINT or SIGTERM."""
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

    Access logs and kopf's lines for each watch event and each probe are left out below a warning. Each line of a pass gets its object.
    """
    kopf.configure(log_format=kopf.LogFormat.JSON if log_format == "json" else PLAIN)
    for chatty in ("aiohttp.access", "kopf.activities.probe", "kopf.objects"):  # two lines for each probe, one for each watch event
        logging.getLogger(chatty).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(ObjectFields())


class ObjectFields(logging.Filter):
    """A logging filter that attaches the reconciled object to each record, as the attribute `k8s_ref` that kopf's formatter reads."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Attach the object of the running pass, if any, and return True, so that every record is kept."""
        key = OBJECT.get()
        if key is not None and not hasattr(record, "k8s_ref"):
            record.k8s_ref = key._asdict()
        return True


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return how many workers it is enough for.

    Raises SettingsError if they are fewer than 64; below 2000 it logs a warning.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return workers_within(hard)


def workers_within(limit: int) -> int:
    """Return how many workers a limit of open files is enough for.

    Raises SettingsError if they are fewer than 64; below 2000 it logs a warning.
    """
    if limit == resource.RLIM_INFINITY:
        return FEW_WORKERS * 1000
    workers = (limit - OWN_FILES) // FILES_A_WORKER
    if workers < LEAST_WORKERS:
        expected = OWN_FILES + FILES_A_WORKER * LEAST_WORKERS
        raise SettingsError(
            f"the hard limit of open files (RLIMIT_NOFILE) is {limit}, expected at least {expected}; raise it for the container"
        )
    if workers < FEW_WORKERS:
        log.warning(
            "limit of open files limit=%d: it is enough for %d workers; raise RLIMIT_NOFILE of the container for more", limit, workers
        )
    return workers


if __name__ == "__main__":
    main()
