# SPDX-License-Identifier: Apache-2.0
"""Placement of a replica's pod: the part of a PodSpec that a deployment may set, under Kubernetes' own names.

Fields left unset are left out of the rendered pod.
"""

from enum import StrEnum

import msgspec


class _Part(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    pass


class SelectorOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class NodeRequirement(_Part, frozen=True):
    key: str
    operator: NodeOperator
    values: tuple[str, ...] = ()


class NodeTerm(_Part, frozen=True):
    match_expressions: tuple[NodeRequirement, ...] = ()
    match_fields: tuple[NodeRequirement, ...] = ()


class NodeSelector(_Part, frozen=True):
    node_selector_terms: tuple[NodeTerm, ...]


class PreferredNode(_Part, frozen=True):
    weight: int
    preference: NodeTerm


class NodeAffinity(_Part, frozen=True):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNode, ...] = ()


class LabelRequirement(_Part, frozen=True):
    key: str
    operator: SelectorOperator
    values: tuple[str, ...] = ()


class LabelSelector(_Part, frozen=True):
    match_labels: dict[str, str] = {}
    match_expressions: tuple[LabelRequirement, ...] = ()


class PodTerm(_Part, frozen=True):
    topology_key: str
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()


class PreferredPod(_Part, frozen=True):
    weight: int
    pod_affinity_term: PodTerm


class PodAffinity(_Part, frozen=True):
    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] = ()
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPod, ...] = ()


class Affinity(_Part, frozen=True):
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class Unsatisfiable(StrEnum):
    """Choice of the scheduler if every node would exceed `maxSkew`: leave the pod pending, or place it anyway."""

    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class TopologySpread(_Part, frozen=True):
    """A spread constraint over the deployment's own pods; the operator fills in the label selector."""

    topology_key: str
    when_unsatisfiable: Unsatisfiable
    max_skew: int = 1


class Toleration(_Part, frozen=True):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None
    toleration_seconds: int | None = None


class Scheduling(_Part, frozen=True):
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: Affinity | None = None
    topology_spread: tuple[TopologySpread, ...] = ()
    priority_class_name: str | None = None
    runtime_class_name: str | None = None
    scheduler_name: str | None = None
