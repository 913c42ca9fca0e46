# SPDX-License-Identifier: Apache-2.0
"""Protection of a deployment's control ports, as far as the operator can observe it.

Every control port takes a token, so there is no reason for one without. A missing token Secret shows as pods that do not start.
"""

import msgspec

from diffusion_operator.api.deployment_spec import DeploymentSpec, PolicyMode
from diffusion_operator.api.meta import Verdict, verdict


class PolicyOutcome(msgspec.Struct, frozen=True):
    """Facts about the operator's last attempt at a NetworkPolicy, from which the condition ControlSecured is judged."""

    possible: bool = False
    """The operator knows the labels of its own pods, which the policy needs."""
    refusal: str = ""
    """The API server's refusal; empty if it accepted the policy."""


def control_secured(spec: DeploymentSpec, policy: PolicyOutcome) -> Verdict:
    token = "the control port accepts only the deployment's token"
    if spec.control.network_policy is PolicyMode.NONE:
        return verdict("ControlSecured", True, "TokenOnly", f"{token}; spec.control.networkPolicy is None")
    if not policy.possible:
        text = f"{token}; no NetworkPolicy is made, because the operator does not know the labels of its own pods (--operator-namespace)"
        return verdict("ControlSecured", True, "TokenOnly", text)
    if policy.refusal:
        return verdict("ControlSecured", False, "PolicyRefused", f"{token}; {policy.refusal}")
    text = f"{token}, and a NetworkPolicy lets in the operator's pods only; whether it is enforced depends on the cluster's network plugin"
    return verdict("ControlSecured", True, "TokenAndPolicy", text)
