# SPDX-License-Identifier: Apache-2.0
"""Fetches by real processes from a real server on loopback, which misbehaves, goes away, or is asked by two at once."""

import asyncio
import gzip
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.downloading import Downloader, RemoteFile, Totals
from diffusion_worker.sources.fetching import Fetched
from diffusion_worker.sources.file_cache import FileCache
from diffusion_worker.sources.job import FetchLimits
from diffusion_worker.sources.source import HttpSource, S3Source, Source
from diffusion_worker.sources.transport import checked_client
from diffusion_worker.sources.transport_rules import Reach
from support.sources.rig import DEADLINE_S, SourceRig, adapter_bytes, fetch_processes, http_source, until
from support.sources.servers import Served, SourceServer

PATH = "/a.safetensors"
LARGE = adapter_bytes(400_000)
QUICK = FetchLimits(stall_s=4.0, adapter_bytes=1_000_000)


@pytest.fixture
def server() -> Iterator[SourceServer]:
    with SourceServer().running() as server:
        yield server


@pytest.fixture
def rig(tmp_path: Path) -> SourceRig:
    return SourceRig(tmp_path)


def content(fetched: Fetched) -> bytes:
    """Return the bytes of the file that a fetch left in the cache."""
    return Path(fetched.path).read_bytes()


def is_here(fetched: Fetched) -> bool:
    """Return whether the cache still has a fetched file."""
    return Path(fetched.path).exists()


def serve(server: SourceServer, served: Served) -> Source:
    """Publish a file at PATH of the server, over an earlier one; return a source that pins its SHA-256."""
    server.files[PATH] = served
    return http_source(server.url, served)


async def test_an_adapter_is_fetched_once_and_then_needs_no_network(server: SourceServer, rig: SourceRig) -> None:
    source = serve(server, Served(LARGE))
    first = await rig.adapter(source)
    assert source.http is not None
    assert (first.digest, first.size_bytes) == (f"sha256:{source.http.sha256}", len(LARGE))
    assert content(first) == LARGE
    assert Path(first.path).suffix == ".safetensors"
    assert rig.progress[-1] == (len(LARGE), len(LARGE))
    del server.files[PATH]
    assert await rig.adapter(source) == first
    assert server.asked[PATH] == 1
    assert fetch_processes() == []


async def test_another_digest_is_told_with_both_and_nothing_of_the_file_stays(server: SourceServer, rig: SourceRig) -> None:
    source = serve(server, Served(LARGE))
    wrong = Source(http=HttpSource(f"{server.url}{PATH}?signature=hidden", "0" * 64))
    error = await rig.refusal(wrong)
    assert source.http is not None
    assert error.code is ErrorCode.DIGEST_MISMATCH
    assert "0" * 64 in error.message
    assert source.http.sha256 in error.message
    assert "hidden" not in error.message
    assert rig.files("partial") == rig.files("blobs") == rig.files("trees") == []


@pytest.mark.slow
async def test_a_digest_that_contradicts_that_of_the_source_is_refused_unasked(server: SourceServer, rig: SourceRig) -> None:
    error = await rig.refusal(serve(server, Served(LARGE)), digest=f"sha256:{'1' * 64}")
    assert error.code is ErrorCode.DIGEST_MISMATCH
    assert not server.asked


REFUSALS = {
    "nothing there": (Served(status=404), ErrorCode.SOURCE_NOT_FOUND, "answered 404"),
    "unauthorized": (Served(status=401), ErrorCode.SOURCE_UNAUTHORIZED, "answered 401"),
    "forbidden": (Served(status=403), ErrorCode.SOURCE_UNAUTHORIZED, "answered 403"),
    "out of order": (Served(status=503), ErrorCode.NETWORK_ERROR, "answered 503"),
    "teapot": (Served(status=418), ErrorCode.NETWORK_ERROR, "answered 418"),
    "too large": (Served(adapter_bytes(1_000_000)), ErrorCode.TOO_LARGE, "at most 1000000 bytes"),
    "too large without a length": (Served(adapter_bytes(1_000_000), length=False), ErrorCode.TOO_LARGE, "at most 1000000 bytes"),
    "breaks each time at the same byte": (Served(LARGE, break_after=1000, ranges=False), ErrorCode.NETWORK_ERROR, "connection failed"),
    "says more than it sends": (Served(LARGE, length=len(LARGE) + 9, ranges=False), ErrorCode.NETWORK_ERROR, "connection failed"),
    "says less than it sends": (Served(LARGE, length=len(LARGE) - 9), ErrorCode.DIGEST_MISMATCH, "expected sha256:"),
    "stalls": (Served(LARGE, gate_after=1000), ErrorCode.NETWORK_ERROR, "sent nothing for"),
    "redirects without end": (Served(redirect=PATH), ErrorCode.NETWORK_ERROR, "redirects too often"),
    "redirects to a metadata address": (Served(redirect="http://169.254.169.254/latest"), ErrorCode.NETWORK_ERROR, "a link-local address"),
    "redirects to another scheme": (Served(redirect="ftp://127.0.0.1/a"), ErrorCode.NETWORK_ERROR, "expected a source over https"),
    "redirects to a file": (Served(redirect="file:///etc/passwd"), ErrorCode.NETWORK_ERROR, "expected a source over https"),
    "compressed": (Served(gzip.compress(LARGE), headers={"Content-Encoding": "gzip"}), ErrorCode.NETWORK_ERROR, "compressed"),
    "archive": (Served(b"PK\x03\x04" + LARGE), ErrorCode.UNSUPPORTED_FORMAT, "an archive"),
    "pickle": (Served(b"\x80\x02" + LARGE), ErrorCode.UNSUPPORTED_FORMAT, "a pickle file"),
    "page": (Served(b"<!doctype html>" * 10), ErrorCode.INVALID_ADAPTER, "papercut"),
    "empty": (Served(b""), ErrorCode.INVALID_ADAPTER, "papercut"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_source_that_misbehaves_ends_in_a_clear_error(server: SourceServer, tmp_path: Path, kind: str) -> None:
    served, code, says = REFUSALS[kind]
    rig = SourceRig(tmp_path, limits=QUICK)
    source = serve(server, served)
    error = await rig.refusal(source)
    assert (error.code, says in error.message) == (code, True), error.message
    assert not rig.files("trees")
    assert fetch_processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://169.254.169.254/latest/meta-data", ErrorCode.NETWORK_ERROR),
        ("http://user:secret@127.0.0.1/a", ErrorCode.INVALID_REQUEST),
        ("http:///a", ErrorCode.INVALID_REQUEST),
    ],
)
async def test_an_address_that_may_not_be_asked_is_refused(rig: SourceRig, url: str, code: ErrorCode) -> None:
    error = await rig.refusal(Source(http=HttpSource(url, "0" * 64)))
    assert error.code is code
    assert "secret" not in error.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "public_only", "says"),
    [
        ("https://127.0.0.1/a", False, "127.0.0.1 is a loopback address, which needs --allow-http-sources"),
        ("https://[::ffff:10.0.0.7]/a", True, "is a private address, which a source may have only if the worker has --control-token-file"),
        ("http://127.0.0.1/a", True, "is a loopback address, which a source may have only if the worker has --control-token-file"),
        ("https://[64:ff9b:1::a9fe:a9fe]/a", False, "is a link-local address"),
    ],
)
async def test_an_address_out_of_reach_is_refused_before_it_is_called(tmp_path: Path, address: str, public_only: bool, says: str) -> None:
    # Even the option that allows loopback does not allow it to a call without the token.
    fetcher = SourceRig(tmp_path, allow_http_sources=public_only).fetcher
    for source in (Source(http=HttpSource(address, "0" * 64)), Source(s3=S3Source("s3://bucket/a.safetensors", endpoint=address[:-2]))):
        with pytest.raises(RequestError, match=re.escape(says)):
            await fetcher.fetch_adapter(
                source, digest=None, deadline_s=DEADLINE_S, report=lambda *_: None, name="papercut", public_only=public_only
            )


@pytest.mark.slow
async def test_a_region_that_is_no_part_of_a_hosts_name_is_refused(rig: SourceRig) -> None:
    error = await rig.refusal(Source(s3=S3Source("s3://bucket/a.safetensors", region="evil.example/x")))
    assert (error.code, "source.s3.region" in error.message) == (ErrorCode.INVALID_REQUEST, True)


@pytest.mark.slow
async def test_http_is_refused_unless_it_is_allowed(server: SourceServer, tmp_path: Path) -> None:
    error = await SourceRig(tmp_path, allow_http_sources=False).refusal(serve(server, Served(LARGE)))
    assert (error.code, "expected a source over https" in error.message) == (ErrorCode.INVALID_REQUEST, True)
    assert not server.asked


@pytest.mark.slow
async def test_a_download_that_breaks_goes_on_where_it_broke(server: SourceServer, rig: SourceRig) -> None:
    source = serve(server, Served(LARGE, break_after=150_000))
    fetched = await rig.adapter(source)
    assert content(fetched) == LARGE
    assert server.ranges == [None, "bytes=150000-", "bytes=300000-"]


def bring(server: SourceServer, folder: Path, *, etag: str | None = None) -> bytes:
    """Download the server's file, in this process, into a cache in the folder without a known digest; return its bytes."""
    cache = FileCache(folder)
    url = f"{server.url}{PATH}"
    with checked_client(allow_http=True, reach=Reach.LOOPBACK, read_timeout_s=5.0) as client:
        downloader = Downloader(client, cache, max_bytes=1 << 30, stall_s=5.0, totals=Totals(lambda *_: None, {url: None}))
        blob, lease = downloader.bring(RemoteFile(url=url, label="the file", identity=url, etag=etag))
    lease.close()
    return cache.blob(blob.sha256).read_bytes()


def test_the_last_bytes_before_a_source_stalls_are_told() -> None:
    """Set counts of bytes faster than reports are written, and then nothing: the last count must still be reported."""
    told: queue.Queue[tuple[int, int | None]] = queue.Queue()
    with Totals(lambda done, total: told.put((done, total)), {"a": 10, "b": 20}) as totals:
        # These bytes come faster than reports are written, and nothing follows them.
        for done in (1, 2, 3):
            totals.set("b", done, 20)
        while told.get(timeout=30) != (3, 30):
            pass
    assert told.empty()


@pytest.mark.parametrize("if_range", [True, False])
def test_a_file_that_changes_between_two_reads_is_read_anew_and_never_mixed(server: SourceServer, tmp_path: Path, if_range: bool) -> None:
    new = Served(adapter_bytes(400_000, fill=2), if_range=if_range)
    server.files[PATH] = Served(LARGE, break_after=150_000, then=new)
    assert bring(server, tmp_path) == new.content
    # A server that gets the validator of the bytes already read sends the whole new file at once.
    assert server.ranges == [None, "bytes=150000-"] + ([] if if_range else [None])


@pytest.mark.parametrize("expected", ['"listed"', None])
def test_a_file_that_changes_whenever_it_is_read_is_an_error(server: SourceServer, tmp_path: Path, expected: str | None) -> None:
    first, second = Served(LARGE, break_after=150_000, etag='"one"'), Served(LARGE, break_after=150_000, etag='"two"', if_range=False)
    third = Served(LARGE, break_after=150_000, etag='"three"', if_range=False)
    first.then, second.then, third.then = second, third, second
    server.files[PATH] = first
    with pytest.raises(RequestError, match="changed at the source while it was read: expected the ETag") as refused:
        bring(server, tmp_path, etag=expected)
    assert refused.value.code is ErrorCode.NETWORK_ERROR


@pytest.mark.parametrize("ranges", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_download_whose_process_is_killed_goes_on_in_the_next_one(server: SourceServer, rig: SourceRig, ranges: bool) -> None:
    served = Served(LARGE, gate_after=200_000, ranges=ranges)
    source = serve(server, served)
    fetching = asyncio.create_task(rig.refusal(source))
    await until(lambda: any(path.stat().st_size == 200_000 for path in (rig.cache / "partial").glob("*")))
    [process] = fetch_processes()
    os.kill(process, signal.SIGKILL)
    assert (await fetching).code is ErrorCode.NETWORK_ERROR
    assert rig.files("blobs") == rig.files("trees") == []
    served.gate_after = None
    assert content(await rig.adapter(source)) == LARGE
    assert server.ranges == [None, "bytes=200000-"]
    assert rig.files("partial") == []


@pytest.mark.slow
async def test_what_a_dead_process_left_of_an_older_file_is_not_kept(server: SourceServer, rig: SourceRig) -> None:
    served = Served(LARGE)
    source = serve(server, served)
    rig.fetcher.release(await rig.adapter(source))
    [blob] = (rig.cache / "blobs").iterdir()
    [record] = [path for path in (rig.cache / "records").iterdir() if b'"":' in path.read_bytes()]
    blob.rename(rig.cache / "partial" / record.stem)
    with (rig.cache / "partial" / record.stem).open("r+b") as file:
        file.truncate(100_000)
        file.write(b"older")
    assert content(await rig.adapter(source)) == LARGE


async def test_a_fetch_that_is_cancelled_leaves_no_process(server: SourceServer, rig: SourceRig) -> None:
    fetching = asyncio.create_task(rig.adapter(serve(server, Served(LARGE, gate_after=1000))))
    await until(server.at_gate.is_set)
    assert len(fetch_processes()) == 1
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert fetch_processes() == []


async def test_a_fetch_ends_at_its_deadline_and_leaves_no_process(server: SourceServer, rig: SourceRig) -> None:
    error = await rig.refusal(serve(server, Served(LARGE, gate_after=1000)), deadline_s=0.5)
    assert (error.code, "within 0.5 s" in error.message) == (ErrorCode.TIMEOUT, True)
    assert fetch_processes() == []


@pytest.mark.slow
async def test_a_fetching_process_that_is_stopped_is_given_up(server: SourceServer, tmp_path: Path) -> None:
    rig = SourceRig(tmp_path, limits=FetchLimits(stall_s=4.0))
    fetching = asyncio.create_task(rig.refusal(serve(server, Served(LARGE, gate_after=1000))))
    await until(server.at_gate.is_set)
    [process] = fetch_processes()
    os.kill(process, signal.SIGSTOP)
    error = await fetching
    assert (error.code, "no progress for 4 s" in error.message) == (ErrorCode.NETWORK_ERROR, True)
    assert fetch_processes() == []


FETCH_ALONE = """
import asyncio, sys
from pathlib import Path
from diffusion_worker.errors import RequestError
from diffusion_worker.sources.parsing import parse_source
from support.sources.rig import SourceRig
try:
    rig = SourceRig(Path(sys.argv[1]))
    print(asyncio.run(rig.adapter(parse_source(sys.argv[2]))).path, flush=True)
    sys.stdin.read()
except RequestError as error:
    print(error.code, error.message)
"""


def start_alone(folder: Path, source: Source) -> "subprocess.Popen[str]":
    """Start another process that fetches into the same cache, prints the path, and holds the file until its input ends."""
    assert source.http is not None
    command = [sys.executable, "-c", FETCH_ALONE, str(folder), f"{source.http.url}#sha256={source.http.sha256}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
async def test_two_servers_on_one_empty_cache_download_a_file_once(server: SourceServer, rig: SourceRig, tmp_path: Path) -> None:
    served = Served(LARGE, gate_after=200_000)
    source = serve(server, served)
    servers = [start_alone(tmp_path, source) for _ in range(3)]
    await until(server.at_gate.is_set)
    await until(lambda: sum(len(fetch_processes(one.pid)) for one in servers) == 3)
    served.gate.set()
    paths = [(await asyncio.to_thread(one.communicate, timeout=30))[0].strip() for one in servers]
    assert len(set(paths)) == 1
    assert content(Fetched(paths[0])) == LARGE
    assert server.asked[PATH] == 1


@pytest.mark.slow
async def test_who_waits_for_a_download_goes_on_with_it_when_its_process_is_killed(
    server: SourceServer, rig: SourceRig, tmp_path: Path
) -> None:
    served = Served(LARGE, gate_after=200_000)
    source = serve(server, served)
    with start_alone(tmp_path, source) as other:
        await until(server.at_gate.is_set)
        fetching = asyncio.create_task(rig.adapter(source))
        await until(lambda: rig.progress and rig.progress[-1][0] >= 100_000)
        served.gate_after = None
        other.kill()
        assert content(await fetching) == LARGE
    assert server.ranges[0] is None
    assert len(server.ranges) == 2
    assert str(server.ranges[1]).startswith("bytes=")


@pytest.mark.slow
async def test_a_fetching_process_ends_with_the_server_that_started_it(server: SourceServer, tmp_path: Path) -> None:
    SourceRig(tmp_path)
    with start_alone(tmp_path, serve(server, Served(LARGE, gate_after=1000))) as other:
        await until(server.at_gate.is_set)
        [process] = fetch_processes(other.pid)
        other.kill()
    await until(lambda: not Path(f"/proc/{process}").exists() or b") Z" in Path(f"/proc/{process}/stat").read_bytes())


@pytest.mark.slow
async def test_a_private_cache_goes_with_its_fetcher(server: SourceServer, tmp_path: Path) -> None:
    rig = SourceRig(tmp_path, cache_dir=None)
    fetched = await rig.adapter(serve(server, Served(LARGE)))
    assert is_here(fetched)
    await rig.fetcher.close()
    assert not is_here(fetched)


@pytest.mark.slow
async def test_what_nobody_uses_is_evicted_the_longest_unused_first(server: SourceServer, tmp_path: Path) -> None:
    rig = SourceRig(tmp_path, cache_size_bytes=1_000_000)
    fetched = {}
    for number in range(2):
        server.files[f"/{number}"] = Served(adapter_bytes(400_000, fill=number))
        fetched[number] = await rig.adapter(http_source(server.url, server.files[f"/{number}"], f"/{number}"))
    third = server.files["/2"] = Served(adapter_bytes(400_000, fill=2))
    full = await rig.refusal(http_source(server.url, third, "/2"))
    assert (full.code, "nothing left to evict" in full.message) == (ErrorCode.CACHE_FULL, True)
    rig.fetcher.release(fetched[0])
    rig.fetcher.release(fetched[1])
    # The first one is used again, so the second has been unused for the longest time.
    rig.fetcher.release(await rig.adapter(http_source(server.url, server.files["/0"], "/0")))
    await rig.adapter(http_source(server.url, third, "/2"))
    assert is_here(fetched[0])
    assert not is_here(fetched[1])
    assert len(rig.files("trees")) == 2


@pytest.mark.slow
async def test_a_file_that_does_not_fit_on_the_disk_is_refused_before_it_is_read(server: SourceServer, tmp_path: Path) -> None:
    rig = SourceRig(tmp_path, limits=FetchLimits(adapter_bytes=1 << 60))
    error = await rig.refusal(serve(server, Served(LARGE, length=1 << 59)))
    assert (error.code, error.retryable, "of room in the cache" in error.message) == (ErrorCode.CACHE_FULL, True, True)
    assert all(path.stat().st_size == 0 for path in (rig.cache / "partial").iterdir())


@pytest.mark.slow
async def test_what_another_live_server_uses_is_not_evicted_and_goes_when_that_is_killed(server: SourceServer, tmp_path: Path) -> None:
    rig = SourceRig(tmp_path, cache_size_bytes=700_000)
    source = serve(server, Served(LARGE))
    other_file = server.files["/b"] = Served(adapter_bytes(400_000, fill=2))
    with start_alone(tmp_path, source) as other:
        assert other.stdout is not None
        kept = Fetched((await asyncio.to_thread(other.stdout.readline)).strip())
        assert content(kept) == LARGE
        assert (await rig.refusal(http_source(server.url, other_file, "/b"))).code is ErrorCode.CACHE_FULL
        assert is_here(kept)
        other.kill()
    await rig.adapter(http_source(server.url, other_file, "/b"))
    assert not is_here(kept)


@pytest.mark.slow
async def test_many_fetches_at_once_share_one_download(server: SourceServer, rig: SourceRig) -> None:
    source = serve(server, Served(LARGE))
    fetched = await asyncio.gather(*(rig.adapter(source) for _ in range(6)))
    assert len({one.path for one in fetched}) == 1
    assert server.asked[PATH] == 1


@pytest.mark.slow
async def test_a_damaged_blob_is_fetched_again(server: SourceServer, rig: SourceRig) -> None:
    source = serve(server, Served(LARGE))
    rig.fetcher.release(await rig.adapter(source))
    [blob] = (rig.cache / "blobs").iterdir()
    blob.unlink()
    assert content(await rig.adapter(source)) == LARGE
    assert server.asked[PATH] == 2


@pytest.mark.slow
async def test_a_cache_that_cannot_be_written_to_is_told(tmp_path: Path, server: SourceServer) -> None:
    (tmp_path / "file").write_text("x")
    error = await SourceRig(tmp_path, cache_dir=str(tmp_path / "file")).refusal(serve(server, Served(LARGE)))
    assert error.code is ErrorCode.CACHE_FULL
    assert isinstance(error, RequestError)
