# SPDX-License-Identifier: Apache-2.0
"""The state document with a part of its adapters: one page of all, or of the changes after a revision.

A token names a position among all changes, so no state is kept here for it. A name that changes between two pages comes again, in a
later page or after the revision of the first one. So a client that takes all pages, and then asks for changes after the first page's
revision, misses nothing.
"""

from collections.abc import Callable, Iterable

import msgspec

from diffusion_worker.engine.adapters.table import Adapter, AdapterTable
from diffusion_worker.engine.state.adapter_changes import AdapterChanges
from diffusion_worker.engine.state.revision import Look, Revision, Signal
from diffusion_worker.engine.state.state_document import AdapterDocument, StateDocument
from diffusion_worker.errors import ErrorCode, RequestError

# Most bytes of a page's adapters, so that a whole answer stays below 1 MiB.
PAGE_BYTES = 640 << 10


class StatePages:
    """The pages of one engine's state, and its revision; `document` returns it without adapters, `look` in comparable form."""

    def __init__(
        self,
        boot_id: str,
        table: AdapterTable,
        signal: Signal,
        *,
        document: Callable[[], StateDocument],
        look: Callable[[], Look],
        ranks: int,
    ) -> None:
        self._boot_id = boot_id
        self._table = table
        self._document = document
        self._ranks = ranks
        # The names whose adapters changed, by revision.
        self._changes = AdapterChanges()
        self.revision = Revision(boot_id, signal, look=look, touched=self._touched, settled=self._settle, published=self._publish)

    def first(self, limit: int) -> StateDocument:
        """Return the engine's state with the first page of all its adapters: at most `limit` names, and `PAGE_BYTES` beyond the first."""
        return self._page(0, limit, self.revision.current())

    def since(self, revision: str, limit: int) -> StateDocument:
        """Return the first page of the changes after a revision; of all adapters, if those changes are not known any more."""
        current, number = self.revision.current(), self.revision.number_of(revision)
        changes = self._changes
        if number is None or not changes.knows_since(number):
            return self._page(0, limit, current)
        page = self._page(changes.position_at(number), limit, current)
        return msgspec.structs.replace(page, adapters_since=revision, adapters_removed=changes.gone_since(number))

    def continued(self, token: str, limit: int) -> StateDocument:
        """Return the page that a token names; raise RequestError (WrongBoot) for a token of another life of the server."""
        former_boot_id, _, position = token.rpartition(".")
        if former_boot_id != self._boot_id:
            raise RequestError(
                ErrorCode.WRONG_BOOT,
                f"continue: expected a token of the server process {self._boot_id}, found one of {former_boot_id}; "
                "list again without continue",
            )
        return self._page(int(position), limit, self.revision.current())

    def _page(self, position: int, limit: int, revision: str) -> StateDocument:
        """Return the page of names that changed after a position: at most `limit` names and `PAGE_BYTES`, but at least one name."""
        records: list[AdapterDocument] = []
        room, more = PAGE_BYTES, None
        for count, (name, at) in enumerate(self._changes.after(position)):
            found = [adapter.document(self._ranks) for adapter in self._of_name(name)]
            room -= sum(len(msgspec.json.encode(one)) for one in found)
            if count and (count >= limit or room < 0):
                more = f"{self._boot_id}.{position}"
                break
            records += found
            position = at
        return msgspec.structs.replace(self._document(), adapters=records, revision=revision, adapters_continue=more)

    def _of_name(self, name: str) -> list[Adapter]:
        """Return all adapters of a name: the current, the arriving and the leaving ones."""
        found = [self._table.named.get(name), self._table.arriving.get(name)]
        return [adapter for adapter in found if adapter is not None] + [each for each in self._table.leaving if each.name == name]

    def _touched(self) -> list[tuple[Adapter, AdapterDocument | None]]:
        """List the adapters whose record may have changed since the last `_settle`, with the record; None for removed ones."""
        touched = list(self._table.touched.unpublished)
        return [(adapter, adapter.document(self._ranks) if adapter in self._table else None) for adapter in touched]

    def _publish(self, number: int, adapters: Iterable[object]) -> None:
        """Record that a revision published changes of these adapters."""
        for name in {adapter.name for adapter in adapters if isinstance(adapter, Adapter)}:
            self._changes.add(name, number, gone=not self._of_name(name))

    def _settle(self, adapters: Iterable[object]) -> None:
        """Take these records as known. A record with a temporary value is looked at again until that ends."""
        for adapter in adapters:
            if isinstance(adapter, Adapter) and (adapter.found_wrong_s is None or not adapter.document(1).verification_failed):
                self._table.touched.unpublished.pop(adapter, None)
