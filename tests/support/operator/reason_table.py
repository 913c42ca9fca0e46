# SPDX-License-Identifier: Apache-2.0
"""The table of reasons: statuses that have every reason of every condition of both kinds, and what each status asks for.

Tests of the plan, of the documents and of the chart compare it with Degraded, with Argo CD and Flux, and with the alerts.
Real: the conditions. Not real: what they are computed from is made for one reason each.
"""

from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from diffusion_operator.api.adapter import InstanceState, InstanceStatus, LoRAAdapter, ResolvedStatus
from diffusion_operator.api.deployment_spec import DeploymentSpec
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.meta import Verdict, verdict
from diffusion_operator.api.worker_state import AdapterRecord, ModelReport, RecordState, WireError
from diffusion_operator.plan.adapters import acceptance
from diffusion_operator.plan.adapters.acceptance import Claim, Decision, decide
from diffusion_operator.plan.adapters.conditions import adapter_verdicts, not_understood, without_deployment
from diffusion_operator.plan.adapters.error_codes import DEPLOYMENT_REASONS, RELOAD_LOOP, SOURCE_REASONS
from diffusion_operator.plan.adapters.instances import Instance
from diffusion_operator.plan.adapters.plan import AdapterPlan, tally_of
from diffusion_operator.plan.adapters.view import AdapterView, marks_of
from diffusion_operator.plan.observed import children
from diffusion_operator.plan.observed.children import REFUSALS, ChildState
from diffusion_operator.plan.observed.observed import Poll
from diffusion_operator.plan.observed.pods import Exit
from diffusion_operator.plan.observed.replica_state import Group, Problem
from diffusion_operator.plan.observed.worker_exit_codes import MODEL_REASONS
from diffusion_operator.plan.replicas.model_pinning import Resolution
from diffusion_operator.plan.replicas.rollout import RolloutProgress
from diffusion_operator.plan.status.conditions import deployment_verdicts, pass_failed
from diffusion_operator.plan.status.inputs import Situation
from support.operator.condition_reasons import returned
from support.operator.plan_builders import NOW, READY, made, planned, pod


class Asks(Enum):
    """Conclusion from a status, in Argo CD's word and in Flux's."""

    A_PERSON = ("Degraded", "failed")
    NOTHING = ("Healthy", "current")
    NOTHING_SUSPENDED = ("Suspended", "current")
    PATIENCE = ("Progressing", "waiting")


class Row(NamedTuple):
    subject: str
    verdicts: tuple[Verdict, ...]
    asks: Asks


BASE = planned(pod(routable=True)).situation


def spec(**fields: Any) -> DeploymentSpec:
    return made(**fields).spec


def group(state: ReplicaState = ReplicaState.AWAKE, problem: Problem | None = None, document: Any = READY, **facts: Any) -> Group:
    up = state not in (ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.FAILED)
    one = pod(**({"ready": up, "routable": up} | facts))
    return Group(index=0, pod=one, poll=Poll(state=document), state=state, problem=problem, message="words" if problem else "")


def row(subject: str, asks: Asks, *groups: Group, resolved: Resolution | None = None, **fields: Any) -> Row:
    """Return the row of a deployment with these replicas, or with one that serves."""
    present = groups or BASE.groups
    resolution = resolved or Resolution(model=BASE.resolution.model, source=BASE.resolution.source, groups=present)
    situation: Situation = msgspec.structs.replace(BASE, **({"groups": present, "resolution": resolution} | fields))
    return Row(subject, deployment_verdicts(situation), asks)


def child(reason: str, kind: str = "PodDisruptionBudget", *, ours: bool = True, **more: Any) -> tuple[ChildState, ...]:
    return (ChildState(kind=kind, name="d", ours=ours, reason=reason, message="words", **more),)


ON_IDLE, ASLEEP, NO_REPLICAS = spec(sleep={"policy": "OnIdle"}), spec(sleep={"policy": "Asleep"}), spec(replicas=0)
PERSON, NOTHING, SUSPENDED, PATIENCE = Asks.A_PERSON, Asks.NOTHING, Asks.NOTHING_SUSPENDED, Asks.PATIENCE
STARTING, FAILED, SLEEPER = group(ReplicaState.STARTING), group(ReplicaState.FAILED), group(ReplicaState.ASLEEP)
NO_NODE = {"unschedulable": "0/3 nodes", "scheduled": False, "node": "", "ip": ""}
PENDING = group(ReplicaState.PENDING, **(NO_NODE | {"unschedulable": ""}))
STOPPED = RolloutProgress(stalled=True)
OTHER = READY.__class__(boot_id="b", state=READY.state, model=ModelReport(digest="sha256:other"))
PINNED = msgspec.structs.replace(BASE.resolution.model, digest="sha256:pinned", resolved_at=NOW - timedelta(days=1))
UNTOUCHED = {Problem.WAITING_FOR_GPU: PATIENCE, Problem.UNSCHEDULABLE: PATIENCE}


def deployments() -> Iterator[Row]:
    yield row("it serves", NOTHING)
    yield row("it sleeps and wakes for a request", NOTHING, SLEEPER, spec=ON_IDLE)
    yield row("it falls asleep", NOTHING, group(ReplicaState.SLEEPING), spec=ON_IDLE)
    yield row("it sleeps as it was asked to", NOTHING, SLEEPER, spec=ASLEEP)
    yield row("nobody wants replicas", NOTHING, spec=NO_REPLICAS, groups=())
    yield row("it is suspended", SUSPENDED, spec=spec(suspend=True), groups=())
    yield row("it is suspended, and a name is taken", SUSPENDED, spec=spec(suspend=True), groups=(), children=child("NameConflict"))
    newer = (verdict("DefaultImage", False, "NewerExists", "words"),)
    yield row("the operator has a newer default container image", NOTHING, default_image=newer)
    yield row("it starts", PATIENCE, STARTING)
    yield row("it has no node yet", PATIENCE, PENDING)
    yield row("it waits for quota", PATIENCE, group(ReplicaState.PENDING, **(NO_NODE | {"unschedulable": "", "gated": True})))
    yield row("it started again once", PATIENCE, FAILED)
    yield row("it is woken because the policy says so", PATIENCE, SLEEPER)
    yield row("its probe does not pass", PATIENCE, group(ready=False))
    yield row("it is awake and not routed to yet", PATIENCE, group(routable=False))
    yield row("one of two is there", PATIENCE, spec=spec(replicas=2))
    yield row("old replicas are replaced", PATIENCE, outdated=1)
    yield row("some replicas are awake", PATIENCE, group(), msgspec.structs.replace(STARTING, index=1), spec=spec(replicas=2))
    yield row("it waits for memory to wake", PATIENCE, group(ReplicaState.ASLEEP, Problem.INSUFFICIENT_MEMORY), spec=ON_IDLE)
    for problem in Problem:
        facts = NO_NODE if problem in UNTOUCHED else {}
        state = ReplicaState.PENDING if problem in UNTOUCHED else ReplicaState.FAILED
        yield row(f"a replica has {problem.value}", UNTOUCHED.get(problem, PERSON), group(state, problem, **facts))
        yield row(f"a replica that is up has {problem.value}", UNTOUCHED.get(problem, PERSON), group(state, problem, **facts), group())
    yield row("a wake fails", PERSON, group(ReplicaState.ASLEEP, Problem.WAKE_FAILED), spec=ON_IDLE)
    yield row("a sleep fails", PERSON, group(problem=Problem.SLEEP_FAILED), spec=ON_IDLE)
    yield row("the control port is cut off", PERSON, group(problem=Problem.UNREACHABLE))
    yield row("the rollout is past its deadline", PERSON, progress=STOPPED, outdated=1)
    yield row("a replica is past the deadline", PERSON, STARTING, late=STARTING)
    yield row(
        "a replica waits for a GPU past the deadline", PERSON, group(ReplicaState.PENDING, Problem.WAITING_FOR_GPU, **NO_NODE), late=PENDING
    )
    yield row("the template is refused", PERSON, outdated=1, template_refusal="words")
    yield row("pods are refused", PERSON, groups=(), refusal="words")
    yield row("a pod beside the old ones is refused", PERSON, outdated=1, refusal="words")
    yield row("a quota is full", PERSON, groups=(), refusal="exceeded quota")
    yield row("the Secret's name is taken", PERSON, groups=(), children=child("NameConflict", "Secret", ours=False))
    yield row("the Service's name is taken", PERSON, children=child("NameConflict", "Service", ours=False))
    yield row("the policy is refused", PERSON, policy_possible=True, children=child("Forbidden", "NetworkPolicy"))
    yield row("the policy is there", NOTHING, policy_possible=True)
    of_children = (
        children.ANOTHER_OPERATOR,
        children.CONTESTED,
        children.LEAVING,
        children.REFUSED,
        children.PASS_FAILED,
        *sorted(REFUSALS),
    )
    for reason in of_children:
        yield row(f"a child has {reason}", PERSON, children=child(reason))
    yield row("a child of an earlier object leaves", NOTHING, children=child(children.LEAVING, silent=True))
    for code in MODEL_REASONS:
        ended = group(ReplicaState.FAILED, Problem.MODEL_ERROR, document=None)
        container = msgspec.structs.replace(ended.pod.container, last_exit=Exit(code=1, message=f"Error: --model: {code}: words"))
        failed = msgspec.structs.replace(ended, pod=msgspec.structs.replace(ended.pod, container=container))
        yield row(f"the model has {code}", PERSON, failed)
    other = Resolution(model=PINNED, source=BASE.resolution.source, groups=(group(document=OTHER),))
    yield row("a replica serves another model", PERSON, group(document=OTHER), resolved=other)
    yield from with_adapters()
    yield Row("a field is not understood", not_understood("spec.model: expected a value"), PERSON)
    yield Row("the pass failed", pass_failed("words"), PERSON)


ADAPTER = msgspec.convert(
    {
        "metadata": {"name": "x", "namespace": "n", "uid": "x", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"deploymentRef": {"name": "d"}, "source": {"path": "/loras/x"}},
    },
    LoRAAdapter,
)
PAUSED = msgspec.structs.replace(ADAPTER, spec=msgspec.structs.replace(ADAPTER.spec, suspend=True))
RESOLVED = ResolvedStatus(source="/loras/x", digest="sha256:a")
WANTED = decide(made(), ADAPTER, Claim(), held=()).desired


def instance(state: InstanceState = InstanceState.LOADED, *, code: str = "", **facts: Any) -> Instance:
    error = WireError(code=code, message="words") if code else None
    record = AdapterRecord(name="x", state=RecordState.LOADED, **facts.pop("record", {}))
    return Instance(status=InstanceStatus(replica=0, state=state), record=record, error=error, **facts)


def view(*instances: Instance, states: tuple[ReplicaState, ...] = (), reason: str = "Accepted", **facts: Any) -> AdapterView:
    decision = Decision(
        adapter=ADAPTER, accepted=reason == "Accepted", reason=reason, message="words", desired=facts.pop("desired", WANTED)
    )
    there = states or tuple(ReplicaState.AWAKE for _ in instances)
    return AdapterView(deployment_uid="u", decision=decision, instances=instances, group_states=there, **facts)


LOADED, AT_IT, BROKEN = instance(), instance(InstanceState.LOADING), instance(InstanceState.FAILED, code="RankFailed")
EVICTED, LATER = instance(InstanceState.CACHED), instance(InstanceState.DEFERRED)
BOTH, RESTS = (ReplicaState.AWAKE, ReplicaState.ASLEEP), (ReplicaState.ASLEEP,)


def with_adapters() -> Iterator[Row]:
    """Yield rows of deployments with an adapter. An adapter that cannot be served is degraded itself."""
    for subject, of_it in (
        ("loaded", view(LOADED)),
        ("being loaded", view(AT_IT)),
        ("that failed", view(BROKEN)),
        ("that was evicted", view(EVICTED)),
        ("without room", view(LOADED, reason="CapacityExceeded")),
    ):
        yield row(f"it has an adapter {subject}", NOTHING, adapters=adapter_plan(of_it))
    deferred = adapter_plan(view(LATER, states=RESTS))
    yield row("it sleeps, and its adapter with it", NOTHING, SLEEPER, spec=ASLEEP, adapters=deferred)


def adapter_plan(of_it: AdapterView) -> AdapterPlan:
    return AdapterPlan(tally=tally_of({"x": of_it}, {"x": marks_of(of_it)}))


def of_adapter(subject: str, asks: Asks, of_it: AdapterView, *, adapter: LoRAAdapter = ADAPTER, resolved: bool = True) -> Row:
    return Row(subject, adapter_verdicts(adapter, of_it, RESOLVED if resolved else None), asks)


def adapters() -> Iterator[Row]:
    on_request = {"loads_on_request": True}
    yield of_adapter("every replica has it", NOTHING, view(LOADED))
    yield of_adapter("every replica that is awake has it", NOTHING, view(LOADED, LATER, states=BOTH))
    yield of_adapter("a request loads it", NOTHING, view(EVICTED, **on_request), resolved=False)
    yield of_adapter("a request wakes a replica for it", NOTHING, view(LATER, states=RESTS, on_idle=True))
    yield of_adapter("it is suspended", SUSPENDED, view(LOADED, desired=None), adapter=PAUSED)
    yield of_adapter("its deployment is suspended", NOTHING, view(suspended=True))
    yield of_adapter("its deployment has no replicas", NOTHING, view())
    yield of_adapter("its deployment sleeps", NOTHING, view(LATER, states=RESTS))
    yield of_adapter("it is being loaded", PATIENCE, view(AT_IT), resolved=False)
    yield of_adapter("its replica starts", PATIENCE, view(LATER, states=(ReplicaState.STARTING,), desired=WANTED))
    yield of_adapter("nobody has looked yet", PATIENCE, view(instance(InstanceState.PENDING)), resolved=False)
    yield of_adapter("one of two has it", PATIENCE, view(LOADED, AT_IT))
    yield of_adapter("the version before serves", PATIENCE, view(msgspec.structs.replace(AT_IT, other_digest="sha256:b")))
    yield of_adapter("it was evicted", PERSON, view(EVICTED))
    yield of_adapter("it cannot be loaded", PERSON, view(BROKEN), resolved=False)
    yield of_adapter("one of two cannot load it", PERSON, view(LOADED, BROKEN))
    yield of_adapter("a sleeper cannot load it", PERSON, view(LOADED, BROKEN, states=BOTH))
    for code in SOURCE_REASONS:
        yield of_adapter(f"its source has {code}", PERSON, view(instance(InstanceState.FAILED, code=code)))
    for reason in REFUSED_FOR:
        yield of_adapter(f"it is refused for {reason}", PERSON, view(reason=reason, desired=None))
    yield of_adapter("it is evicted again and again", PERSON, view(instance(InstanceState.FAILED, code=RELOAD_LOOP)))
    yield of_adapter("it was evicted though nobody asked", PERSON, view(msgspec.structs.replace(LOADED, evictions=1)))
    yield of_adapter("a wake found it changed", PERSON, view(instance(record={"verification_failed": True})))
    drifted = msgspec.structs.replace(AT_IT, drifted=True, other_digest="sha256:b")
    yield of_adapter("its bytes differ", PERSON, view(drifted))
    pin = msgspec.structs.replace(WANTED, load=msgspec.structs.replace(WANTED.load, digest="sha256:b", identity="c:one"))
    yield of_adapter("its configuration differs", PERSON, view(msgspec.structs.replace(drifted, other_identity="c:other"), desired=pin))
    yield Row("it has no deployment", without_deployment(ADAPTER), PERSON)
    yield Row("a field is not understood", not_understood("spec.source: expected a value"), PERSON)


REFUSED_FOR = sorted(returned(acceptance) | DEPLOYMENT_REASONS)
TABLE = {"DiffusionDeployment": tuple(deployments()), "LoRAAdapter": tuple(adapters())}


def condition(found: Row, type_: str) -> Verdict | None:
    return next((one for one in found.verdicts if one.type == type_), None)
