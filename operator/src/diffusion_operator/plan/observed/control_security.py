# SPDX-License-Identifier: Apache-2.0
"""What guards the control ports of a deployment, as far as the operator can know it.

Every control port takes a token, so there is no reason for one without. Whether a Secret with it is there shows in pods that do not start.
"""

import msgspec

from diffusion_operator.api.deployment_spec import DeploymentSpec, PolicyMode
from diffusion_operator.api.meta import Verdict, verdict


class PolicyOutcome(msgspec.Struct, frozen=True):
    """What came of the NetworkPolicy in the last pass."""

    possible: bool = False
    """The operator was told by what its own pods are known."""
    refusal: str = ""
    """Why the API server did not take it; empty if it did."""


def control_secured(spec: DeploymentSpec, policy: PolicyOutcome) -> Verdict:
    token = "the control port takes the deployment's token only"
    if spec.control.network_policy is PolicyMode.NONE:
        return verdict("ControlSecured", True, "TokenOnly", f"{token}; spec.control.networkPolicy is None")
    if not policy.possible:
        text = f"{token}; no NetworkPolicy is made, because the operator does not know the labels of its own pods (--operator-namespace)"
        return verdict("ControlSecured", True, "TokenOnly", text)
    if policy.refusal:
        return verdict("ControlSecured", False, "PolicyRefused", f"{token}; {policy.refusal}")
    text = f"{token}, and a NetworkPolicy lets in the operator's pods only; whether it is enforced depends on the cluster's network plugin"
    return verdict("ControlSecured", True, "TokenAndPolicy", text)
