# SPDX-License-Identifier: Apache-2.0
"""Names that other programs see: the API group, kinds, labels, ports and paths inside a worker's pod."""

import msgspec

GROUP = "diffusion-operator.dev"
VERSION = "v1alpha1"
FIELD_MANAGER = "diffusion-operator"

LABEL_DEPLOYMENT = f"{GROUP}/deployment"
LABEL_REPLICA_INDEX = f"{GROUP}/replica-index"
LABEL_INCARNATION = f"{GROUP}/incarnation"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_ROUTABLE = f"{GROUP}/routable"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
ANNOTATION_RESTARTED_AT = f"{GROUP}/restartedAt"
ANNOTATION_APPLIED = f"{GROUP}/applied"
"""On a child: a hash of what was applied, so that a later process sees what is to be taken away, too."""
ANNOTATION_SECRET = f"{GROUP}/control-secret"
"""On the ConfigMap: a hash of the Secret that was applied before it, which can be seen without reading the Secret."""

ANNOTATION_OWNER_UID = f"{GROUP}/owner-uid"
"""On children and pods: the UID of the object for which they were made. A worker's first token is bound to it."""

CONTAINER = "worker"
DATA_PORT = 8000
CONTROL_PORT = 8001
CONTROL_DIR = "/etc/diffusion/control"
TOKEN_KEY = "token"
API_KEY_DIR = "/etc/diffusion/api-key"
DESIRED_DIR = "/etc/diffusion/desired"
DESIRED_KEY = "desired.json"
SHARDS = 8
"""The files with adapters beside the main one, for ever: a pod that is there mounts these."""
CACHE_DIR = "/var/cache/diffusion-operator"
SECRETS_DIR = "/var/run/diffusion-operator/secrets"
CLAIMS_DIR = "/var/run/diffusion-operator/claims"
STATE_DIR = "/tmp/diffusion-worker"  # in the pod's emptyDir: it survives a container, and a new pod begins again
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"
NO_GPU_RESOURCE = "none"


class Kind(msgspec.Struct, frozen=True):
    """Identity of a kind for the API server. `api_version` and `kind` stand in manifests, and `plural` in URLs."""

    api_version: str
    kind: str
    plural: str

    @property
    def group_and_version(self) -> tuple[str, str]:
        group, _, version = self.api_version.rpartition("/")
        return group, version


DEPLOYMENT = Kind(f"{GROUP}/{VERSION}", "DiffusionDeployment", "diffusiondeployments")
ADAPTER = Kind(f"{GROUP}/{VERSION}", "LoRAAdapter", "loraadapters")
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")

KINDS = {
    kind.kind: kind for kind in (DEPLOYMENT, ADAPTER, POD, SERVICE, CONFIG_MAP, SECRET, NETWORK_POLICY, DISRUPTION_BUDGET, EVENT, LEASE)
}


def control_secret_name(deployment: str) -> str:
    return f"{deployment}-control"


def control_policy_name(deployment: str) -> str:
    return f"{deployment}-control"


def desired_config_name(deployment: str) -> str:
    return f"{deployment}-desired"


def shard_config_name(deployment: str, number: int) -> str:
    return f"{desired_config_name(deployment)}-{number}"


def shard_file(number: int) -> str:
    """Return the name of a shard's file, in its ConfigMap and in the mounted folder."""
    return f"adapters-{number}.json.gz"


def check_pod_name(deployment: str, revision: str) -> str:
    return f"{deployment}-check-{revision}"


def pod_name(deployment: str, index: int, incarnation: int) -> str:
    return f"{deployment}-{index}-{incarnation}"
