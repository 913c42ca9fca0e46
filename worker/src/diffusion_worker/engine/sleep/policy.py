# SPDX-License-Identifier: Apache-2.0
"""The current rules of sleep: the mounted desired file, read again when it changes, and the policies of later calls."""

import logging
from pathlib import Path

import msgspec

from diffusion_worker.engine.state.state_document import ColdRequests, DesiredSleep, DesiredState, SleepPolicy
from diffusion_worker.errors import ConfigError
from diffusion_worker.messages import SleepLevel

log = logging.getLogger(__name__)


def read_desired(path: str | None) -> DesiredState:
    """Return the mounted desired file, or an empty one without a path.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    if path is None:
        return DesiredState()
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=DesiredState)
    except OSError as error:
        raise ConfigError(f"--desired {path!r}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--desired {path!r}: {error}") from None


class SleepRules:
    """The sleep policy and the limits of cold requests; for the policy, the newer of the file and the calls counts.

    A file that changed with the same policy, as when an adapter comes, does not override a call.
    """

    def __init__(self, path: str | None) -> None:
        """Take policy and limits from the desired file, or defaults without a path.

        Raises:
            ConfigError: the file is missing, unreadable or not in its format.
        """
        self._path = path
        self._seen = _stamp(path)
        self._desired = read_desired(path)
        self._policy = self._desired.sleep.policy

    @property
    def desired(self) -> DesiredState:
        """The file as it is now, or as it last was if it cannot be read."""
        self._look()
        return self._desired

    @property
    def policy(self) -> SleepPolicy:
        """The sleep policy in force."""
        self._look()
        return self._policy

    @property
    def sleep(self) -> DesiredSleep:
        """The desired file's level and wake timeout, which count for sleeps by policy and wakes for requests; calls bring their own."""
        return self.desired.sleep

    @property
    def wants_mirrors(self) -> bool:
        """Return whether the policy may send the model to a sleep at `HostMemory`, which a mirror of the weights makes fast."""
        return self.policy is not SleepPolicy.ALWAYS_AWAKE and self.sleep.level is SleepLevel.HOST_MEMORY

    @property
    def cold_requests(self) -> ColdRequests:
        """Handling of requests for a model that cannot serve them yet."""
        return self.desired.cold_requests

    def declare(self, policy: SleepPolicy | None) -> None:
        """Take over the policy of a call, which is newer than the file as it is now; None changes nothing."""
        if policy is not None and policy is not self.policy:
            log.info("sleep policy=%s by a call", policy)
            self._policy = policy

    def _look(self) -> None:
        """Read the file again if it changed since the last look."""
        seen = _stamp(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            desired = read_desired(self._path)
        except ConfigError as error:
            log.error("the changed desired file is not used, the last one stays in force: %s", error)
            return
        before, self._desired = self._desired.sleep.policy, desired
        if desired.sleep.policy is not before:
            log.info("sleep policy=%s by the desired file", desired.sleep.policy)
            self._policy = desired.sleep.policy


def _stamp(path: str | None) -> tuple[int, int, int] | None:
    """Return a stamp that changes with the file, also if its link is pointed to another file; None without a path or a readable file."""
    if path is None:
        return None
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
