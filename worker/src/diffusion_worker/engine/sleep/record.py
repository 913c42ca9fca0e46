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
    """A sleep: the key of its options and version, the level, and the fingerprint of each rank before it."""

    key: str
    level: SleepLevel
    fingerprints: list[Fingerprint]


class SleepNotes:
    """The record file of one server; without a folder nothing is read or written."""

    def __init__(self, folder: str | None, *, key: Callable[[], str], fingerprints: Callable[[], list[Fingerprint]]) -> None:
        self._path = Path(folder) / FILE_NAME if folder else None
        self._key = key
        self._fingerprints = fingerprints

    def write(self, level: SleepLevel) -> None:
        """Write the record of a sleep, whole or not at all. An error is only logged, as the next server then loads the model."""
        if self._path is None:
            return
        record = SleepRecord(self._key(), level, self._fingerprints())
        part = self._path.with_suffix(".part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(record))
            part.replace(self._path)
        except OSError as error:
            log.error("the record of the sleep cannot be written, so a restart would load the model path=%s: %s", self._path, error)

    def remove(self) -> None:
        """Remove the record, as the model does not sleep any more; harmless without one."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.error("the record of the sleep cannot be removed path=%s: %s", self._path, error)

    def read(self) -> SleepRecord | None:
        """Return the predecessor's record; None if there is none, it cannot be read, or it has other options, version or model."""
        if self._path is None:
            return None
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=SleepRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("the record of a sleep cannot be read, so the model is loaded path=%s: %s", self._path, error)
            return None
        if record.key != self._key():
            cause = "it was made with other options, another version or another model"
            log.warning("the record of a sleep is void, so the model is loaded path=%s: %s", self._path, cause)
            return None
        return record


def record_key(config: WorkerConfig, *, version: str, revision: str | None) -> str:
    """Return the digest of options, version and model that a record has; a server uses a record only if its own digest is the same.

    A fetched model counts by its source and revision, as its path differs each time.
    """
    model = config.model_source or config.model
    parts = [version, revision, msgspec.structs.replace(config, model=model)]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
