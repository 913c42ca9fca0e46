# SPDX-License-Identifier: Apache-2.0
"""DiffusionDeployment: what is asked for and what is."""

import msgspec

from diffusion_operator.api.deployment_spec import DeploymentSpec
from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import ObjectMeta


class DiffusionDeployment(msgspec.Struct, frozen=True, rename="camel"):
    metadata: ObjectMeta
    spec: DeploymentSpec
    status: DeploymentStatus = DeploymentStatus()

    @property
    def served_name(self) -> str:
        """The name of the model in requests: `spec.servedName`, else the object's own name."""
        return self.spec.served_name or self.metadata.name

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model in requests, `served_name` first."""
        return self.served_name, *self.spec.served_names
