# SPDX-License-Identifier: Apache-2.0
"""Verdicts on merged calls: one for all ranks, kept in the cache folder for the next server with the same model."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from diffusion_worker.engine.state.record_file import write_record
from diffusion_worker.messages import MergeVerdict

log = logging.getLogger(__name__)

FOLDER = "merging"


def agreed(of_ranks: Sequence[Sequence[MergeVerdict]]) -> list[MergeVerdict]:
    """Merge the verdicts of all ranks into at most one for each method of a component; the first problem that a rank found wins.

    Without a problem it is the verdict of the rank with the largest difference, and allows only arguments that every rank allows. If
    then some rank has no verdict on the method, the result has none either.
    """
    by_place: dict[tuple[str, str], list[MergeVerdict]] = {}
    for verdict in (verdict for verdicts in of_ranks for verdict in verdicts):
        by_place.setdefault((verdict.component, verdict.method), []).append(verdict)
    found = []
    for verdicts in by_place.values():
        worst = max(verdicts, key=lambda verdict: verdict.apart)
        if problem := next((verdict for verdict in verdicts if verdict.problem), None):
            found.append(problem)
        elif len(verdicts) == len(of_ranks):
            kinds = set.intersection(*(set(verdict.arguments) for verdict in verdicts))
            found.append(msgspec.structs.replace(worst, arguments=sorted(kinds)))
    return found


def abandoned(verdicts: Sequence[MergeVerdict], why: str) -> list[MergeVerdict]:
    """Return the verdicts of a verification that ended early: `why` replaces each problem without a measured difference."""
    return [msgspec.structs.replace(one, problem=why) if one.problem and not one.apart else one for one in verdicts]


class KeptVerdicts:
    """A file that keeps the verdicts on merging for one combination of model, weights and versions of the libraries.

    Without a folder nothing is kept: nothing is read or written.
    """

    def __init__(self, folder: str | None, *key: str) -> None:
        name = hashlib.sha256("\n".join(key).encode()).hexdigest()
        self._path = Path(folder) / FOLDER / f"{name}.json" if folder else None

    def read(self) -> list[MergeVerdict]:
        """Return the verdicts of the file; an empty list if there is none or it cannot be read, which is only logged."""
        if self._path is None:
            return []
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[MergeVerdict])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            log.warning("the results of an earlier verification of merged calls cannot be read path=%s: %s", self._path, error)
            return []

    def write(self, verdicts: Sequence[MergeVerdict]) -> None:
        """Write the verdicts, whole or not at all. An error is only logged, as the next server then verifies again."""
        if self._path is None:
            return
        try:
            write_record(self._path, list(verdicts))
        except OSError as error:
            log.warning("the results of the verification of merged calls cannot be written path=%s: %s", self._path, error)
