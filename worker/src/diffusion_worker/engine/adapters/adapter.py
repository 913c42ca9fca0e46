# SPDX-License-Identifier: Apache-2.0
"""The adapters a server knows by name, and the requests that use them. Without torch: ids stand for the ranks' loaded adapters."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from diffusion_worker.engine.state.state_document import AdapterCall, AdapterDocument, AdapterState, ProblemReport, Residency
from diffusion_worker.errors import RequestError
from diffusion_worker.lora.identity import contradicts
from diffusion_worker.messages import AdapterIdentity, LoadedLoRA
from diffusion_worker.sources.fetching import Fetched

LOADING = (AdapterState.FETCHING, AdapterState.LOADING)
# Seconds for which an adapter reports that a wake found it wrong, so that somebody can see it.
TELL_WRONG_S = 600.0


class Load:
    """A load in progress, shared by all its waiters. `deadline_s` is on the event loop's clock."""

    def __init__(self, *, deadline_s: float, asked: bool) -> None:
        self.deadline_s = deadline_s
        # True for a put; otherwise the load is for requests, which may try again after a failure that may pass.
        self.asked = asked
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: done.exception())  # it may fail without a waiter
        self.task: asyncio.Task[None] | None = None
        # True when the ranks have the call already, so that their answer must be awaited.
        self.registering = False
        self.waits_for_room = False
        # The error for the waiters of a load that is no longer wanted.
        self.superseded: RequestError | None = None

    def end(self, error: RequestError | None = None) -> None:
        """End the load for its waiters, with an error or without; harmless when repeated."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def give_up(self, reason: RequestError) -> None:
        """End the load because nobody wants it any more. If the ranks have their call already, the load is undone when it is over."""
        if self.superseded is None:
            self.superseded = reason
            self.end(reason)
            if self.task is not None and not self.registering:
                self.task.cancel()


class Usage:
    """The requests that used the adapters of one name. Times are monotonic."""

    def __init__(self) -> None:
        self.requests = 0
        self.last_s: float | None = None

    def add(self) -> None:
        """Count another request at the present time."""
        self.requests += 1
        self.last_s = time.monotonic()


def _ignore(adapter: "Adapter") -> None:
    pass


class Adapter:
    """A version of an adapter's content under its name. Other bytes under the same name are another adapter; each load has another id.

    `on_touched` is called at each change that its record may show, so that the records of all adapters need not be compared.
    """

    _on_touched: "Callable[[Adapter], None]"

    def __init__(self, name: str, call: AdapterCall, *, usage: Usage, on_touched: "Callable[[Adapter], None]" = _ignore) -> None:
        object.__setattr__(self, "_on_touched", on_touched)
        self.name = name
        self.call = call
        self.usage = usage
        self.lora_int_id = 0
        self.state = AdapterState.FETCHING
        # The result of the last load; kept while the adapter is `Cached`.
        self.loaded: LoadedLoRA | None = None
        # Each rank's report of the adapter, recorded at the load and compared after every wake.
        self.kept: list[str] = []
        # Seconds of the last load that succeeded.
        self.load_s: float | None = None
        # Time at which a wake last found those reports to differ.
        self.found_wrong_s: float | None = None
        self.fetched: Fetched | None = None
        self.progress: tuple[int, int | None] | None = None
        self.error: ProblemReport | None = None
        self.load: Load | None = None
        # True while the ranks hold its weights, or may hold them.
        self.registered = False
        # True while the load that runs may evict it, so that no request may take it.
        self.going = False
        # Set before the weights leave the ranks: a new generation must not load them.
        self.unloading = False
        self.users: set[str] = set()
        self.unused = asyncio.Event()
        self.unused.set()
        # Numbers of the requests that wait until all of their adapters are usable.
        self.wanted: set[int] = set()
        # The place in the order of uses and loads.
        self.touched = 0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self._on_touched(self)

    @property
    def usable(self) -> bool:
        """Return whether a request may use it now."""
        return self.state is AdapterState.LOADED and not self.going

    @property
    def serves(self) -> bool:
        """Return whether its name could be served if the ranks were awake."""
        return self.state is AdapterState.LOADED or (self.state is AdapterState.DEFERRED and self.loaded is not None)

    @property
    def digest(self) -> str:
        """sha256 of the weights of a loaded adapter."""
        assert self.loaded is not None, "only loaded adapters are used"
        return self.loaded.digest

    @property
    def identity(self) -> AdapterIdentity:
        """Identity of a loaded adapter: what it does to the model."""
        assert self.loaded is not None, "only loaded adapters are used"
        return self.loaded.identity

    @property
    def pinned_identity(self) -> str | None:
        """The identity that every load of it must find, unless another converter named it."""
        return self.loaded.identity if self.loaded else self.call.identity

    @property
    def pinned(self) -> str | None:
        """The digest that every load of it must find."""
        return self.loaded.digest if self.loaded else self.call.digest

    @property
    def resident(self) -> bool:
        """Return whether it is never evicted."""
        return self.call.residency is Residency.RESIDENT

    def copy_key(self) -> tuple[object, ...]:
        """Return the key of the adapter's copy on the ranks; adapters with one key share a copy."""
        if self.loaded is None:
            return (self.lora_int_id,)
        return (self.loaded.identity,)

    def is_content(self, call: AdapterCall) -> bool:
        """Return whether it matches a call, regardless of scale, residency and priority.

        A digest in the call decides; without one the source does, unless the source of an adapter that left memory may have changed.
        """
        loaded = self.loaded
        if self.state is AdapterState.FAILED or set(call.components) != set(self.call.components):
            return False
        if loaded and (call.format not in (None, loaded.format) or call.expected_rank not in (None, loaded.rank)):
            return False
        if loaded and contradicts(loaded.identity, call.identity):
            return False
        if call.digest is not None:
            return call.digest == self.pinned
        return call.source == self.call.source and not (loaded and self._may_have_changed())

    def may_be_behind(self, call: AdapterCall) -> bool:
        """Return whether it matches a call as far as is known without the source, which may have changed."""
        loaded = self.state is AdapterState.LOADED and self.fetched is not None
        return loaded and self.is_content(call) and not self.is_exactly(call)

    def is_exactly(self, call: AdapterCall) -> bool:
        """Return whether a call names all that was loaded, so that the source need not be looked at."""
        loaded = self.loaded
        return loaded is not None and (call.digest, call.identity) == (loaded.digest, loaded.identity)

    def _may_have_changed(self) -> bool:
        """Return whether its file may differ from the loaded one and must be read again. A deferred adapter's fetched copy cannot."""
        in_place = self.fetched is None or self.fetched.digest is None
        return self.state is AdapterState.CACHED or (self.state is AdapterState.DEFERRED and in_place)

    def describe(self, call: AdapterCall) -> None:
        """Take over the parts of a call that need no load, such as scale, residency and priority."""
        self.call = msgspec.structs.replace(call, digest=call.digest or self.call.digest, identity=call.identity or self.call.identity)
        if self.state is AdapterState.LOADED:
            self.error = None

    def hold(self, request_id: str) -> None:
        """Record that a request uses it from now on."""
        self.users.add(request_id)
        self.unused.clear()
        self.usage.add()
        self._on_touched(self)

    def let_go(self, request_id: str) -> None:
        """Record that a request does not use it any more."""
        self.users.discard(request_id)
        if not self.users:
            self.unused.set()
        self._on_touched(self)

    def _digest_on_disk(self) -> str | None:
        """Return the digest of a deferred adapter's file, which was inspected but which no rank has read yet."""
        return self.fetched.digest if self.fetched and self.state is AdapterState.DEFERRED else None

    def document(self, ranks: int) -> AdapterDocument:
        """Return the adapter as the state document shows it."""
        loaded, last_s = self.loaded, self.usage.last_s
        fetched_bytes, total_bytes = (self.progress if self.progress and self.state is AdapterState.FETCHING else None) or (None, None)
        return AdapterDocument(
            name=self.name,
            digest=loaded.digest if loaded else self._digest_on_disk(),
            identity=loaded.identity if loaded else None,
            source=self.call.source,
            state=self.state,
            scale=self.call.scale,
            rank=loaded.rank if loaded else None,
            modules=loaded.modules if loaded else None,
            size_bytes=loaded.size_bytes if loaded else None,
            ranks_loaded=ranks if loaded and self.registered else 0,
            ranks_total=ranks,
            refs=len(self.users),
            error=self.error,
            revision=self.fetched.revision if self.fetched else None,
            components=loaded.components if loaded else [],
            format=loaded.format if loaded else None,
            alpha=loaded.alpha if loaded else None,
            base_model=loaded.base_model if loaded else None,
            recipe=loaded.recipe if loaded else None,
            residency=self.call.residency,
            priority=self.call.priority,
            fetched_bytes=fetched_bytes,
            total_bytes=total_bytes,
            requests_total=self.usage.requests,
            last_request_age_seconds=None if last_s is None else round(time.monotonic() - last_s, 3),
            verification_failed=self.found_wrong_s is not None and time.monotonic() - self.found_wrong_s < TELL_WRONG_S,
            load_seconds=None if self.load_s is None else round(self.load_s, 6),
        )
