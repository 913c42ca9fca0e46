# SPDX-License-Identifier: Apache-2.0
"""The download of one file over HTTP into the cache: resumable, bounded, and shared by all who want the file at the same time.

A source is not trusted: its bytes are counted and hashed, and a file that changes during its download is downloaded again.
"""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http import HTTPStatus
from typing import Self

import httpx2
import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.file_cache import Blob, FileCache, Lease, Partial, Record, key_of

PIECE_BYTES = 1 << 20
# Most tries in a row in which nothing arrives, and the pause in seconds after the first of them.
MAX_VAIN_TRIES = 4
FIRST_PAUSE_S = 0.1
# Seconds between two looks while another process or thread downloads the file.
LOOK_S = 0.05
# Seconds between two reports of progress.
TELL_S = 0.1


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file at an address.

    `label` begins messages about it. `identity` names the content: different contents have different identities. `size`, `sha256` and
    `etag` are set if known beforehand.
    """

    url: str
    label: str
    identity: str
    size: int | None = None
    sha256: str | None = None
    etag: str | None = None
    headers: dict[str, str] = {}


class Changed(Exception):
    """Raised when a source's content changes during a download."""


class Interrupted(Exception):
    """Raised on a failure that may pass, such as a broken connection or a 503; the transfer then resumes from the bytes it has."""


class Totals:
    """The received bytes of all files of one fetch. Inside its `with` block a thread passes them to `report`; nothing else may call that.

    Reports follow a clock, not the arrival of bytes, so the last bytes before a stall are reported too.
    """

    def __init__(self, report: Callable[[int, int | None], None], sizes: Mapping[str, int | None]) -> None:
        self._report = report
        self._sizes = dict(sizes)
        self._done: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def total(self) -> int | None:
        """The sum of the files' lengths; None until every length is known."""
        known = [size for size in self._sizes.values() if size is not None]
        return sum(known) if len(known) == len(self._sizes) else None

    def set(self, identity: str, done: int, size: int | None) -> None:
        """Replace a file's received bytes and size (None: unknown), for the next report."""
        with self._lock:
            self._done[identity], self._sizes[identity] = done, size

    def _tell(self) -> None:
        told = None
        last = False
        while not last:
            last = self._ended.wait(TELL_S)
            with self._lock:
                now = sum(self._done.values()), self.total
            if now != told:
                told = now
                self._report(*now)


class Downloader:
    """The downloads of one fetch, which go through `client` into `cache`; no file may exceed `max_bytes`.

    The methods block. Threads share an instance, and setting `stop` makes the others give up with RequestError (Cancelled).
    """

    def __init__(self, client: httpx2.Client, cache: FileCache, *, max_bytes: int, stall_s: float, totals: Totals) -> None:
        self.stop = threading.Event()
        self._client = client
        self._cache = cache
        self._max_bytes = max_bytes
        self._stall_s = stall_s
        self._totals = totals

    def bring(self, file: RemoteFile) -> tuple[Blob, Lease]:
        """Return a file's blob in the cache, downloaded if necessary; it is kept from eviction until the lease is closed.

        While another thread or process downloads the same file, wait for it.

        Raises:
            RequestError: see `Fetcher.fetch_adapter`.
        """
        if file.size is not None and file.size > self._max_bytes:
            raise _too_large(file, self._max_bytes)
        key = key_of("file", file.identity)
        while True:
            if (found := self._find(file, key)) is not None:
                self._totals.set(file.identity, found[0].size, found[0].size)
                return found
            self._require_wanted()
            partial = self._cache.open_partial(key)
            if partial is None:
                self._totals.set(file.identity, self._cache.partial_size(key), file.size)
                self.stop.wait(LOOK_S)
                continue
            with partial:
                # The previous holder may have finished it between the two looks.
                if self._find(file, key) is not None:
                    partial.remove()
                    continue
                blob = self._fill(partial, file)
                self._cache.put(partial, blob.sha256)
                self._cache.write_record(key, Record({"": blob}))

    def _find(self, file: RemoteFile, key: str) -> tuple[Blob, Lease] | None:
        """Look for a blob with the file's required digest, or without one for the blob recorded under `key`; return it with a lease.

        None means that it has to be downloaded, also because it has just been evicted.
        """
        record = self._cache.read_record(key)
        blob = record.files[""] if record is not None else None
        if file.sha256 is not None:
            size = self._cache.size(file.sha256)
            blob = Blob(file.sha256, size) if size is not None else None
        if blob is None or (lease := self._cache.lease({blob.sha256: blob.size})) is None:
            return None
        return blob, lease

    def _fill(self, partial: Partial, file: RemoteFile) -> Blob:
        """Download the whole file into `partial` and return its digest and size; start again if a wrong digest may come from old bytes.

        A file with a wrong digest, over the limit or of a refused format is deleted.

        Raises:
            RequestError: see `Fetcher.fetch_adapter`; Cancelled if `stop` was set.
        """
        resumed = partial.size > 0
        try:
            while True:
                found = Transfer(partial, file, self._cache, self._max_bytes, self._moved(file)).run(self._client, self._stall_s, self.stop)
                if file.sha256 in (None, found.sha256):
                    return found
                os.ftruncate(partial.descriptor, 0)
                if not resumed:
                    raise RequestError(
                        ErrorCode.DIGEST_MISMATCH, f"{file.label}: expected sha256:{file.sha256}, found sha256:{found.sha256}"
                    )
                resumed = False  # an earlier process may have left older content: start again
        except RequestError as error:
            if error.code in (ErrorCode.DIGEST_MISMATCH, ErrorCode.TOO_LARGE, ErrorCode.UNSUPPORTED_FORMAT):
                partial.remove()
            raise

    def _moved(self, file: RemoteFile) -> Callable[[int, int | None], None]:
        def moved(done: int, size: int | None) -> None:
            self._require_wanted()
            self._totals.set(file.identity, done, size)

        return moved

    def _require_wanted(self) -> None:
        if self.stop.is_set():
            raise RequestError(ErrorCode.CANCELLED, "this download ended because another file of the same source failed")


class Transfer:
    """A file in transfer: its received part, and its digest so far."""

    def __init__(
        self, partial: Partial, file: RemoteFile, cache: FileCache, max_bytes: int, moved: Callable[[int, int | None], None]
    ) -> None:
        self._descriptor = partial.descriptor
        self._file = file
        self._cache = cache
        self._max_bytes = max_bytes
        self._moved = moved
        self._etag = file.etag
        self._size = file.size
        self._done = 0
        self._digest = hashlib.sha256()

    def run(self, client: httpx2.Client, stall_s: float, stop: threading.Event) -> Blob:
        """Download the missing rest of the file and return its digest and size; nothing is requested if no byte is missing.

        Raises:
            RequestError: NetworkError after `MAX_VAIN_TRIES` tries in a row without a new byte, or if the content changed twice. Others at
                once, such as TooLarge.
        """
        self._read_what_is_here()
        vain, changes = 0, 0
        while self._size is None or self._done < self._size or self._size == 0:
            before = self._done
            try:
                self._receive(client, stall_s)
                break
            except Changed as change:
                changes += 1
                if changes > 1:
                    raise RequestError(
                        ErrorCode.NETWORK_ERROR, f"{self._file.label}: changed at the source while it was read: {change}"
                    ) from None
                self._restart()
            except Interrupted as error:
                vain = 0 if self._done > before else vain + 1
                if vain >= MAX_VAIN_TRIES:
                    raise RequestError(ErrorCode.NETWORK_ERROR, f"{self._file.label}: {error}") from None
                stop.wait(FIRST_PAUSE_S * 2**vain)
        return Blob(self._digest.hexdigest(), self._done)

    def _read_what_is_here(self) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        while piece := os.read(self._descriptor, PIECE_BYTES):
            self._digest.update(piece)
            self._done += len(piece)
            self._moved(self._done, self._size)
        if self._size is not None and self._done > self._size:
            self._restart()

    def _restart(self) -> None:
        """Discard the received part and the size and ETag that were seen, so that the file begins again at its first byte."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._done, self._digest = 0, hashlib.sha256()
        self._etag, self._size = self._file.etag, self._file.size

    def _receive(self, client: httpx2.Client, stall_s: float) -> None:
        """Request the missing part; return when the source has sent all of it.

        Raises:
            Interrupted, Changed: another try may succeed. RequestError: none would.
        """
        label = self._file.label
        try:
            with client.stream("GET", self._file.url, headers=self._request_headers()) as response:
                self._accept(response)
                for piece in response.iter_raw():
                    self._write(piece)
            if self._size is not None and self._done < self._size:
                raise Interrupted(f"the source ended after {self._done} of {self._size} bytes")
        except httpx2.ReadTimeout:
            raise RequestError(ErrorCode.NETWORK_ERROR, f"{label}: the source sent nothing for {stall_s:g} s") from None
        except httpx2.TooManyRedirects:
            raise RequestError(ErrorCode.NETWORK_ERROR, f"{label}: the source redirects too often") from None
        except (httpx2.TimeoutException, httpx2.ConnectError) as error:
            raise Interrupted(f"the source cannot be reached ({type(error).__name__})") from None
        except httpx2.HTTPError as error:
            raise Interrupted(f"the connection failed after {self._done} bytes ({type(error).__name__})") from None

    def _request_headers(self) -> dict[str, str]:
        headers = {**self._file.headers, "Accept-Encoding": "identity"}
        if self._done:
            headers["Range"] = f"bytes={self._done}-"
            # With a weak ETag a server would always send the whole file.
            if self._etag and not self._etag.startswith("W/"):
                headers["If-Range"] = self._etag
        return headers

    def _accept(self, response: httpx2.Response) -> None:
        """Check an answer before its body is read; if it is the whole file and not the missing part, discard the received part.

        Raises:
            Changed: the source has other content now. Interrupted, RequestError: the answer is an error, or compressed.
        """
        status = response.status_code
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and self._done:
            raise Changed(f"the source has no bytes after the {self._done} that were read before")
        if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise_for_status(response, self._file.label)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(
                ErrorCode.NETWORK_ERROR, f"{self._file.label}: expected the file uncompressed, found another Content-Encoding"
            )
        etag = response.headers.get("etag")
        if self._done and status == HTTPStatus.OK:
            # The source cannot continue, or its content changed: the answer is the whole file.
            self._restart()
        if self._etag and etag and etag.removeprefix("W/") != self._etag.removeprefix("W/"):
            before, now = self._etag[:80], etag[:80]
            raise Changed(f"expected the ETag {before}, found {now}")
        self._etag = etag or self._etag
        self._accept_size(_whole_size(response, self._done))

    def _accept_size(self, size: int | None) -> None:
        if size is None:
            return
        if self._size is not None and size != self._size:
            before = self._size
            raise Changed(f"expected {before} bytes, found {size}")
        if size > self._max_bytes:
            raise _too_large(self._file, self._max_bytes)
        if self._size is None or self._done == 0:
            self._cache.make_room(size - self._done, self._file.label)
        self._size = size

    def _write(self, piece: bytes) -> None:
        if self._done == 0:
            refuse_magic(piece, self._file.label)
        if self._done + len(piece) > (self._max_bytes if self._size is None else self._size):
            if self._size is None:
                raise _too_large(self._file, self._max_bytes)
            raise Changed(f"expected {self._size} bytes, found more")
        view = memoryview(piece)
        while view:
            view = view[self._write_some(view) :]
        self._digest.update(piece)
        self._done += len(piece)
        self._moved(self._done, self._size)

    def _write_some(self, view: memoryview) -> int:
        try:
            return os.write(self._descriptor, view)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        self._cache.make_room(len(view), self._file.label)
        try:
            return os.write(self._descriptor, view)
        except OSError as error:
            raise RequestError(ErrorCode.CACHE_FULL, f"{self._file.label}: cannot be written to the cache: {error.strerror}") from None


def raise_for_status(response: httpx2.Response, label: str) -> None:
    """Raise the error for the status of an answer that is no file: Interrupted for 429 and 5xx, else RequestError.

    Only the status is reported, because an answer may repeat secrets.
    """
    status = response.status_code
    found = f"the source answered {status}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise RequestError(ErrorCode.SOURCE_UNAUTHORIZED, f"{label}: {found}: credentials for it are missing or insufficient")
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        raise RequestError(ErrorCode.SOURCE_NOT_FOUND, f"{label}: {found}")
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= 500:
        raise Interrupted(found)
    raise RequestError(ErrorCode.NETWORK_ERROR, f"{label}: {found}, expected 200 and a file")


# First bytes of archives and pickle files, under any name: zip, gzip, 7z, and pickle of protocol 2 to 5.
MAGIC = (b"PK\x03\x04", b"\x1f\x8b", b"7z\xbc\xaf", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def refuse_magic(piece: bytes, label: str) -> None:
    """Raise RequestError (UnsupportedFormat) if a file's first bytes are those of a pickle file or an archive.

    A safetensors file may begin with the same bytes, because the length of its header comes first; a brace follows it.
    """
    if piece.startswith(MAGIC) and piece[8:9] != b"{":
        raise RequestError(ErrorCode.UNSUPPORTED_FORMAT, f"{label}: expected a safetensors or text file, found a pickle file or an archive")


def _whole_size(response: httpx2.Response, done: int) -> int | None:
    """Return the whole file's length from an answer's headers, if given; raise Changed if it does not continue at byte `done`."""
    if response.status_code == HTTPStatus.PARTIAL_CONTENT:
        span, _, whole = response.headers.get("content-range", "").removeprefix("bytes ").partition("/")
        if not span.startswith(f"{done}-"):
            raise Changed(f"asked for bytes from {done} on, found {span[:40]!r}")
        return int(whole) if whole.isdecimal() else None
    length = response.headers.get("content-length", "")
    return int(length) if length.isdecimal() else None


def _too_large(file: RemoteFile, max_bytes: int) -> RequestError:
    return RequestError(ErrorCode.TOO_LARGE, f"{file.label}: expected at most {max_bytes} bytes, found more")


def bring_all(downloader: Downloader, files: Mapping[str, RemoteFile], stack: ExitStack) -> dict[str, Blob]:
    """Download several files at once and return their blobs by the same names; `stack` closes the leases.

    Raises:
        RequestError: the first download that failed, which stopped the others.
    """

    def bring(file: RemoteFile) -> tuple[Blob, Lease]:
        try:
            return downloader.bring(file)
        except BaseException:
            downloader.stop.set()
            raise

    with ThreadPoolExecutor(max_workers=4) as pool:
        running = {name: pool.submit(bring, file) for name, file in files.items()}
    failures = [error for future in running.values() if (error := future.exception()) is not None]
    # The first failure cancelled the other downloads, so their errors come last.
    for error in sorted(failures, key=lambda error: isinstance(error, RequestError) and error.code is ErrorCode.CANCELLED):
        raise error
    blobs: dict[str, Blob] = {}
    for name, future in running.items():
        blobs[name], lease = future.result()
        stack.callback(lease.close)
    return blobs
