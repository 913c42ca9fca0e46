# SPDX-License-Identifier: Apache-2.0
"""A file that a server leaves while its model sleeps, so that its successor starts asleep, without device memory.

The file is there exactly while the model sleeps as a whole. It counts only for the same options, version and model.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.messages import Fingerprint, SleepLevel

log = logging.getLogger(__name__)

FILE_NAME = "asleep.json"


class SleepRecord(msgspec.Struct, frozen=True):
    """A sleep: how deep, what each rank held before it, and by which options and version."""

    key: str
    level: SleepLevel
    fingerprints: list[Fingerprint]


class SleepNotes:
    """The record of one server's place; nothing happens where there is no folder for it."""

    def __init__(self, folder: str | None, *, key: Callable[[], str], fingerprints: Callable[[], list[Fingerprint]]) -> None:
        self._path = Path(folder) / FILE_NAME if folder else None
        self._key = key
        self._fingerprints = fingerprints

    def write(self, level: SleepLevel) -> None:
        """The model sleeps: leave a record, whole or not at all. Without it the next server only loads, so an error is logged."""
        if self._path is None:
            return
        record = SleepRecord(self._key(), level, self._fingerprints())
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(record))
            part.replace(self._path)
        except OSError as error:
            log.error("no record of the sleep at %s: %s", self._path, error)

    def remove(self) -> None:
        """It does not any more; harmless without a record."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.error("the record of the sleep stays at %s: %s", self._path, error)

    def read(self) -> SleepRecord | None:
        """Read the predecessor's record; void if it had other options, another version or another model."""
        if self._path is None:
            return None
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=SleepRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("the record of a sleep at %s is void: %s", self._path, error)
            return None
        if record.key != self._key():
            log.warning("the record of a sleep at %s is void: it is one of other options, another version or another model", self._path)
            return None
        return record


def record_key(config: WorkerConfig, *, version: str, revision: str | None) -> str:
    """Return the key of a record. A model that is fetched is known by its source and revision: where it is put is new each time."""
    model = config.model_source or config.model
    parts = [version, revision, msgspec.structs.replace(config, model=model)]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
