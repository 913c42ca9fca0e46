# SPDX-License-Identifier: Apache-2.0
"""What must be true of a worker's state document at any moment, and of the memory of its ranks as the kernel counts it."""

from typing import Any

from support.worker.process import WorkerProcess, resident_bytes

# Of the weights' bytes.
RESIDENT_ASLEEP = 0.02


def consistent(document: dict[str, Any], *, max_held: int) -> list[str]:
    """What one document says that cannot be."""
    state, wrong = document["state"], []
    asleep = [rank["rank"] for rank in document["ranks"] if rank["memory"] and rank["memory"]["asleep"]]
    if document["held"]["current"] > max_held:
        wrong.append(f"{document['held']['current']} are held, of at most {max_held}")
    if state == "ready" and asleep:
        wrong.append(f"ready, and ranks {asleep} sleep")
    if state == "asleep" and document["inFlight"]:
        wrong.append(f"asleep, and {document['inFlight']} are in flight")
    if state == "asleep" and document["operation"] is None and len(asleep) != len(document["ranks"]):
        wrong.append(f"asleep, and only ranks {asleep} sleep")
    if state not in ("starting", "restarting", "failed") and document["load"]["stage"] != "Done":
        wrong.append(f"{state}, and the load is at {document['load']['stage']}")
    return wrong


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
    return found if found and _same_sleep(document, worker.state()) else []


def _same_sleep(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether nothing happened between two documents."""
    return all(one[key] == other[key] for key in ("bootId", "generation", "state", "operation", "lastOperation"))
