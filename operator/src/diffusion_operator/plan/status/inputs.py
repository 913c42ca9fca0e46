# SPDX-License-Identifier: Apache-2.0
"""Inputs of a deployment's status, and counts that several of its conditions use."""

import msgspec

from diffusion_operator.api.deployment_spec import DeploymentSpec, SleepPolicy
from diffusion_operator.api.deployment_status import AvoidedNode, ReplicaState
from diffusion_operator.api.meta import Verdict
from diffusion_operator.plan.adapters.plan import AdapterPlan
from diffusion_operator.plan.observed.children import ChildState, no_service, pods_wait_for, policy_refusal
from diffusion_operator.plan.observed.control_security import PolicyOutcome
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.states import RESTING_STATES
from diffusion_operator.plan.replicas.model_pinning import Resolution
from diffusion_operator.plan.replicas.rollout import RolloutProgress


class Situation(msgspec.Struct, frozen=True):
    spec: DeploymentSpec
    groups: tuple[Group, ...]
    """Without those on their way out."""
    adapters: AdapterPlan
    outdated: int
    progress: RolloutProgress
    resolution: Resolution
    refusal: str
    template_refusal: str = ""
    """The message where no pod can be made of the changed template, or its check pod failed, else empty."""
    checks: bool = False
    """A check pod tries it."""
    default_image: tuple[Verdict, ...] = ()
    """The condition DefaultImage, if there is one."""
    policy_possible: bool = False
    """The operator knows the labels of its own pods."""
    children: tuple[ChildState, ...] = ()
    late: Group | None = None
    """The first replica that is over `spec.rollout.progressDeadlineSeconds` after the rollout was done."""
    avoided_nodes: tuple[AvoidedNode, ...] = ()

    @property
    def policy(self) -> PolicyOutcome:
        return PolicyOutcome(possible=self.policy_possible, refusal=policy_refusal(self.children))

    @property
    def pods_wait_for(self) -> str:
        """Return why new pods could not start: messages about the operator's own Secret and ConfigMap, joined by '; '.

        Each names one that another object's name keeps away, or that the API server refused. Empty if both are there, or if no replica is
        missing or outdated.
        """
        return pods_wait_for(self.children) if len(self.groups) < self.wanted or self.outdated else ""

    @property
    def over_quota(self) -> bool:
        """Return whether the API server's refusal of a pod says that a quota is exceeded."""
        return "exceeded quota" in self.refusal

    @property
    def no_service(self) -> str:
        """Return why no client reaches the replicas; empty where clients do."""
        return no_service(self.children)

    @property
    def wanted(self) -> int:
        return self.spec.wanted_replicas

    @property
    def rolling(self) -> bool:
        """True while replicas are being replaced, unless that is stalled or the new template is refused."""
        return self.outdated > 0 and not self.progress.stalled and not self.template_refusal

    @property
    def asleep_wanted(self) -> bool:
        return self.spec.sleep.policy is SleepPolicy.ASLEEP

    @property
    def on_idle(self) -> bool:
        return self.spec.sleep.policy is SleepPolicy.ON_IDLE

    @property
    def _resting(self) -> int:
        return sum(group.state in RESTING_STATES and group.pod.ready and group.problem is None for group in self.groups)

    @property
    def wakeable(self) -> int:
        """Number of replicas that rest without a problem because nobody needs them; a request wakes them. 0 without OnIdle."""
        return self._resting if self.on_idle else 0

    @property
    def arrived(self) -> int:
        """Number of replicas that requests reach: awake and routed to, or woken by one. With the policy Asleep those that sleep count."""
        asleep = self._resting if self.on_idle or self.asleep_wanted else 0
        return asleep + sum(group.state is ReplicaState.AWAKE and group.pod.ready and group.pod.routable for group in self.groups)

    def count(self, *states: ReplicaState) -> int:
        return sum(group.state in states for group in self.groups)

    @property
    def serving(self) -> int:
        """Number of replicas that are awake and, as the kubelet's probe says, answer."""
        return sum(group.state is ReplicaState.AWAKE and group.pod.ready for group in self.groups)
