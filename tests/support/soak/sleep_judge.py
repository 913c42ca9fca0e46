# SPDX-License-Identifier: Apache-2.0
"""The judges of the soak of sleep: of a request, by what happened while it waited, and of a worker's state document at any moment.

A request is never lost: it has an image that equals its reference, or an error that something which happened meanwhile excuses.
Judging requests is pure; `Times` has what happened. For the memory of ranks the kernel is asked.
"""

import enum
import time
from typing import Any

from support.soak.adapters import References, Spell, held_while_asked
from support.soak.frame import Asked, those_that_hold
from support.worker.process import WorkerProcess, resident_bytes

# A wrong request is refused before it is known whether the model can serve; a loaded machine needs a moment for that.
REFUSED_WITHIN_S = 5.0
# Of the weights' bytes.
RESIDENT_ASLEEP = 0.02


class Excuse(enum.StrEnum):
    """Events that excuse an answer without an image, if they happen while the request waits."""

    # Somebody asked for a sleep, or declared the policy, under which requests are refused.
    ASKED = "asked to sleep"
    # A sleep ended what ran, at once or when the time for its drain was over.
    ENDED = "sleep ended it"
    KILLED = "a rank was lost"
    DOWN = "the server was killed"


# The code that each of them allows. Without an excuse a good request gets its image.
ALLOWED = {Excuse.ASKED: "Asleep", Excuse.ENDED: "Asleep", Excuse.KILLED: "RankFailed", Excuse.DOWN: "no connection"}
# Where a name stood for nothing for a while; the last is told while it comes back.
NO_SUCH_ADAPTER = frozenset({"NotFound", "AdapterRemoved", "AdapterNotLoaded"})


class Times:
    """When each excuse held."""

    def __init__(self) -> None:
        self.spells: list[Spell] = []

    def begin(self, excuse: Excuse) -> None:
        """From now on, unless it holds already."""
        if not self.holds(excuse):
            self.spells.append(Spell(excuse, time.monotonic()))

    def end(self, *excuses: Excuse) -> None:
        """No more."""
        for spell in self.spells:
            if spell.content in excuses:
                spell.ends = min(spell.ends, time.monotonic())

    def holds(self, excuse: Excuse) -> bool:
        """Tell if it does now."""
        return any(spell.content is excuse and spell.ends == float("inf") for spell in self.spells)


def why_wrong(asked: Asked, times: Times, *, references: References, max_held: int) -> str | None:
    """Compare an answer with the references; None where it is right, or excused by what happened meanwhile."""
    if asked.gone_after_s is not None and asked.code == "no answer":
        return None
    if asked.status == 200 and asked.body is not None:
        return references.why_wrong(asked)
    seconds, excuses = asked.ended - asked.begun, held_while_asked(times.spells, asked)
    allowed = {ALLOWED[excuse] for excuse in excuses}
    if asked.body is None:
        # Refused as it should be, and at once.
        allowed &= {"no connection"}
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
    """Ranks that say that their weights sleep, and of which the kernel counts weights. [] where that changed meanwhile."""
    if document["state"] != "asleep" or document["operation"] is not None:
        return []
    found = []
    for rank in document["ranks"]:
        memory = rank["memory"]
        if "weights" in memory["asleep"]:
            try:
                resident = resident_bytes(rank["pid"], memory["mappings"])
            except (FileNotFoundError, ProcessLookupError):
                return []
            if resident > RESIDENT_ASLEEP * memory["weightsBytes"]:
                found.append(f"rank {rank['rank']} sleeps, and the kernel counts {resident} of {memory['weightsBytes']} bytes of weights")
    after = worker.state() if found else document
    same_sleep = all(document[key] == after[key] for key in ("bootId", "generation", "state", "operation", "lastOperation"))
    return found if same_sleep else []
