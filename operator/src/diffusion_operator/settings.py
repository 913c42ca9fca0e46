# SPDX-License-Identifier: Apache-2.0
"""Settings of the operator's process: one frozen struct, read once in __main__."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from diffusion_operator.errors import SettingsError

KEY_MINIMUM_BYTES = 16  # HMAC-SHA256 wants a key of its own strength or near it; less is a mistake in the chart
KEYS_MAXIMUM = 3  # each may cost a call that is refused; two are a rotation, and one more is a rotation begun too soon


class OperatorPods(msgspec.Struct, frozen=True):
    """The namespace and labels by which a NetworkPolicy selects the operator's own pods."""

    namespace: str
    labels: Mapping[str, str]


class ElectionSettings(msgspec.Struct, frozen=True):
    """The Lease by which this process and others agree on a leader, and its own name there."""

    namespace: str
    name: str
    identity: str

    @property
    def lease(self) -> str:
        """Namespace and name of the Lease, as `namespace/name`."""
        return f"{self.namespace}/{self.name}"


class Settings(msgspec.Struct, frozen=True):
    engine_image: str
    """The worker's container image where a spec names none."""
    operator_key: bytes
    """Control tokens are derived from it, so that no Secret need ever be read."""
    previous_keys: tuple[bytes, ...] = ()
    """Keys from before a rotation: tokens of theirs are tried with workers that do not have the new one yet."""
    operator_pods: OperatorPods | None = None
    """None, as for an operator outside the cluster: no policy could let it in, so none is made."""
    election: ElectionSettings | None = None
    """None: this process leads for ever. For one that runs outside of a cluster, and alone."""
    operator_key_secret: str = ""
    """The Secret in the operator's namespace that has the key; empty where it comes from elsewhere."""
    operator_service_account: str = ""
    """The operator's own ServiceAccount, which no worker may have. Empty where it runs as somebody else."""
    allow_host_access: bool = False
    """Specs may ask for host namespaces, host paths, privileges and capabilities."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty means all of them."""
    metrics_port: int | None = None
    """None: no metrics server."""
    liveness_port: int = 8080
    poll_timeout_s: float = 2.0
    """For a connection, and for an answer that need not wait: a worker gives it without a lock, so 2 s is long."""
    call_timeout_s: float = 10.0
    """No action holds a reconcile longer; what takes longer is started, then observed."""
    resync_s: float = 600.0
    """Everything is listed, reconciled and re-applied this often, in case a watch missed a change."""
    watch_dead_s: float = 120.0
    """A watch that is stalled for so long fails the liveness probe; kopf reopens one after 70 s without events."""
    parallel_reconciles: int = 16
    """Bounds the load on the API server after a restart with many objects."""


def election_settings(namespace: str | None, name: str | None, identity: str | None) -> ElectionSettings | None:
    """Return the settings of the election; None if all three are absent. Raises SettingsError if only some are given."""
    if namespace and name and identity:
        return ElectionSettings(namespace=namespace, name=name, identity=identity)
    if namespace or name or identity:
        raise SettingsError("--lease-namespace, --lease-name and --identity together turn on the election: give all three or none")
    return None


def read_operator_keys(path: Path) -> tuple[bytes, ...]:
    """Read the keys, one a line: the current one first, then earlier ones.

    Raises SettingsError if the file cannot be read, has no key or more than three, or has one of less than 16 bytes.
    """
    try:
        keys = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise SettingsError(f"the operator key cannot be read from {path}: {error.strerror}") from error
    if not 1 <= (count := len(keys)) <= KEYS_MAXIMUM:
        raise SettingsError(f"{path} has {count} operator keys, expected 1 to {KEYS_MAXIMUM}, one a line, the current one first")
    for number, key in enumerate(keys, start=1):
        length = len(key)
        if length < KEY_MINIMUM_BYTES:
            raise SettingsError(f"operator key {number} in {path} has {length} bytes, expected at least {KEY_MINIMUM_BYTES}")
    return keys


def operator_pods(namespace: str | None, labels: Sequence[str]) -> OperatorPods | None:
    """Return the operator's namespace and labels, given as NAME=VALUE; None without both.

    Raises SettingsError for another form, or if only one of the two is given.
    """
    pairs = [label.partition("=") for label in labels]
    if any(not name or not equals for name, equals, _ in pairs):
        raise SettingsError(f"--operator-label: expected NAME=VALUE, found {', '.join(labels)}")
    if bool(namespace) != bool(pairs):
        raise SettingsError("--operator-namespace and --operator-label together select the operator's pods: give both or neither")
    return OperatorPods(namespace=namespace, labels={name: value for name, _, value in pairs}) if namespace else None
