# SPDX-License-Identifier: Apache-2.0
"""The judges of the soak of sleep: of a request, by the events while it waited, and of a worker's state document at any moment.

A request is never lost: it has an image that equals its reference, or an error that an event meanwhile excuses. The judgement of requests
is pure; `Times` has the events. The kernel reports the memory of ranks.
"""

import enum
import time
from contextlib import suppress
from typing import Any

from support.soak.adapters import References, Spell, held_while_asked
from support.soak.frame import Asked, those_that_hold
from support.worker.process import WorkerProcess, resident_bytes

# A wrong request is refused even before the model can serve, but a busy machine needs a moment for that.
REFUSED_WITHIN_S = 5.0
RESIDENT_ASLEEP = 0.02  # a share of the weights' bytes


class Excuse(enum.StrEnum):
    """Events that excuse an answer without an image, if they happen while the request waits."""

    # The worker refuses requests, or ends running ones, at once or at the end of the drain.
    ASKED = "asked to sleep"
    KILLED = "a rank was lost"
    DOWN = "the server was killed"


# The codes that each excuse allows. Without an excuse a good request gets its image.
ALLOWED = {
    Excuse.ASKED: {"Asleep"},
    # RequestFailed for a request that ran alone when a second rank was killed: the worker takes it for the cause.
    Excuse.KILLED: {"RankFailed", "RequestFailed"},
    Excuse.DOWN: {"no connection"},
}
# Codes for a name that stood for nothing for a while; the last one is sent while the adapter comes back.
NO_SUCH_ADAPTER = frozenset({"model_not_found", "AdapterRemoved", "AdapterNotLoaded"})


class Times(list[Spell]):
    """The spells of each excuse."""

    def begin(self, excuse: Excuse) -> None:
        if not self.holds(excuse):
            self.append(Spell(excuse, time.monotonic()))

    def end(self, *excuses: Excuse) -> None:
        for spell in self:
            if spell.content in excuses:
                spell.ends = min(spell.ends, time.monotonic())

    def holds(self, excuse: Excuse) -> bool:
        return any(spell.content is excuse and spell.ends == float("inf") for spell in self)


def why_wrong(asked: Asked, times: Times, *, references: References, max_held: int) -> str | None:
    """Return the reason why an answer is unacceptable, given the references and the excuses of its time (kills, sleeps, changes); None
    if it is acceptable."""
    if asked.gone_after_s is not None and asked.code == "no answer":
        return None
    if asked.status == 200 and asked.body is not None:
        return references.why_wrong(asked)
    seconds, excuses = asked.ended - asked.begun, held_while_asked(times, asked)
    allowed = {code for excuse in excuses for code in ALLOWED[excuse]}
    if asked.body is None:
        allowed &= {"no connection"}
        # A wrong request was refused correctly and at once.
        if asked.status == asked.expected and (seconds < REFUSED_WITHIN_S or excuses & {Excuse.KILLED, Excuse.DOWN}):
            return None
    elif asked.beside >= max_held:
        allowed |= {"Overloaded"}
    if any(None in could for could in references.could_be(asked)):
        allowed |= NO_SUCH_ADAPTER
    if asked.code in allowed:
        return None
    found = f"found {asked.status} {asked.code} {asked.document.get('error', {}).get('message', '')} after {seconds:.1f} s"
    return f"body {asked.body} {asked.names}: expected {asked.expected}, {found}, and what happened meanwhile is {sorted(excuses)}"


def consistent(document: dict[str, Any], *, max_held: int) -> list[str]:
    """List the contradictions in a state document."""
    state, held, idle = document["state"], document["held"]["current"], document["operation"] is None
    asleep = [rank["rank"] for rank in document["ranks"] if rank["memory"] and rank["memory"]["asleep"]]
    loading, stage = state in ("starting", "restarting", "failed"), document["load"]["stage"]
    wrong = {
        f"{held} are held, of at most {max_held}": held > max_held,
        f"ready, and ranks {asleep} sleep": state == "ready" and asleep,
        f"asleep, and {document['inFlight']} are in flight": state == "asleep" and document["inFlight"],
        f"asleep, and only ranks {asleep} sleep": state == "asleep" and idle and len(asleep) != len(document["ranks"]),
        f"{state}, and the load is at {stage}": not loading and stage != "Done",
    }
    return those_that_hold(wrong)


def nothing_resident(worker: WorkerProcess, document: dict[str, Any]) -> list[str]:
    """List the ranks that report sleeping weights although the kernel counts resident ones. It is empty unless the worker slept all the
    while."""
    if document["state"] != "asleep" or document["operation"] is not None:
        return []
    found = []
    for rank in document["ranks"]:
        memory = rank["memory"]
        if "weights" in memory["asleep"]:
            with suppress(FileNotFoundError, ProcessLookupError):  # the next state document shows the end of the rank
                resident, weights = resident_bytes(rank["pid"], memory["mappings"]), memory["weightsBytes"]
                if resident > RESIDENT_ASLEEP * weights:
                    found.append(f"rank {rank['rank']} sleeps, and the kernel counts {resident} of {weights} bytes of weights")
    after = worker.state() if found else document
    same_sleep = all(document[key] == after[key] for key in ("bootId", "generation", "state", "operation", "lastOperation"))
    return found if same_sleep else []
