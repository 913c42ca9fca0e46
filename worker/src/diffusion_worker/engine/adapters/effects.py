# SPDX-License-Identifier: Apache-2.0
"""The effects of the state machine of adapters: data that the machine returns, and that its runner performs."""

from collections.abc import Sequence

import msgspec

from diffusion_worker.engine.adapters.table import Adapter, Load
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.fetching import Fetched


class Effect(msgspec.Struct, frozen=True):
    """Something that the runner does for a transition."""


class Start(Effect, frozen=True):
    """Run a load: from its source to all ranks."""

    adapter: Adapter
    load: Load


class Cancel(Effect, frozen=True):
    """Cancel a load that has not reached the ranks yet."""

    load: Load


class Answer(Effect, frozen=True):
    """Give a load's outcome to its waiters."""

    load: Load
    error: RequestError | None


class Release(Effect, frozen=True):
    """Give a fetched file back to the fetcher, because the adapter does not read it any more."""

    fetched: Fetched


class Retire(Effect, frozen=True):
    """Unload a leaving adapter once its requests are over, or ended after `drain_s`, and the ranks are awake."""

    adapter: Adapter
    drain_s: float


class Undo(Effect, frozen=True):
    """Unload an adapter from all ranks after a load that failed or is not wanted any more.

    A victim that some rank has evicted for it is unloaded from the other ranks too.
    """

    adapter: Adapter
    number: int
    victims: Sequence[Adapter]


class Abort(Effect, frozen=True):
    """End requests with an error."""

    request_ids: Sequence[str]
    code: ErrorCode
    message: str


class Expire(Effect, frozen=True):
    """Have the machine drop the record of an adapter's failure (`machine.expired`) once it was shown for `FAILED_S` seconds."""

    adapter: Adapter


class Moved(Effect, frozen=True):
    """Wake all that wait for an adapter to come, to go or to become unused."""
