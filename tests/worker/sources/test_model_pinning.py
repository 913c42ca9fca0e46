# SPDX-License-Identifier: Apache-2.0
"""A model that another replica found first: fetched at its pin after its branch moved, its bucket changed, or its source went."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from diffusion_worker.engine.startup.model_fetching import ModelFetch
from diffusion_worker.engine.state.state_document import DesiredModel, DesiredState
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.sources.fetching import Fetched
from diffusion_worker.sources.source import HuggingFaceSource, S3Source, Source
from support.sources.rig import S3Server, SourceRig, adapter_bytes, s3_server
from support.sources.servers import SourceServer

pytestmark = pytest.mark.slow

SOURCE = Source(hugging_face=HuggingFaceSource("org/x"))


def model(fill: int) -> dict[str, bytes]:
    return {"model_index.json": b'{"_class_name": "X"}', "unet/x.safetensors": adapter_bytes(1000, fill=fill)}


def weights(fetched: Fetched) -> bytes:
    return Path(fetched.path, "unet/x.safetensors").read_bytes()


async def refusal(rig: SourceRig, source: Source, **pin: str) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await rig.model(source, **pin)  # type: ignore[arg-type]
    return refused.value


@pytest.fixture
def rig(tmp_path: Path) -> SourceRig:
    return SourceRig(tmp_path)


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


async def test_a_branch_that_moved_is_fetched_as_it_was_pinned(hub: SourceServer, rig: SourceRig, tmp_path: Path) -> None:
    pinned = hub.push("org/x", model(1))
    hub.push("org/x", model(2))
    found = await rig.model(SOURCE, revision=pinned)
    assert (found.revision, weights(found)) == (pinned, model(1)["unet/x.safetensors"])
    assert weights(await rig.model(SOURCE)) == model(2)["unet/x.safetensors"], "without a pin it is what the branch has now"


async def test_a_pinned_commit_that_is_in_the_cache_needs_no_source(hub: SourceServer, rig: SourceRig) -> None:
    """Fetch a model by its branch, delete the source, and fetch the first commit by its pin: the cache still has it."""
    pinned = hub.push("org/x", model(1))
    first = await rig.model(SOURCE)
    hub.push("org/x", model(2))
    await rig.model(SOURCE)
    hub.delete("org/x")
    assert await rig.model(SOURCE, revision=pinned) == first


async def test_a_pinned_commit_is_not_replaced_by_what_was_fetched_last(hub: SourceServer, rig: SourceRig) -> None:
    """Pin a commit that the cache does not have, of a source that is gone; the error must be SourceNotFound and name the commit."""
    hub.push("org/x", model(2))
    await rig.model(SOURCE)
    hub.delete("org/x")
    error = await refusal(rig, SOURCE, revision="0" * 40)
    assert (error.code, "0" * 40 in error.message) == (ErrorCode.SOURCE_NOT_FOUND, True)


@pytest.mark.slow
async def test_a_bucket_that_changed_is_the_pinned_model_only_with_the_same_bytes(s3: S3Server, rig: SourceRig, tmp_path: Path) -> None:
    source = Source(s3=S3Source("s3://bucket/x/", endpoint=s3.url))
    s3.put("bucket", {f"x/{name}": content for name, content in model(1).items()})
    first = await rig.model(source)
    assert first.revision is not None
    assert first.digest is not None
    s3.put("bucket", {f"x/{name}": content for name, content in model(2).items()})
    assert await rig.model(source, revision=first.revision) == first, "the cache has it"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = SourceRig(elsewhere)
    for pin in ({}, {"digest": first.digest}):
        error = await refusal(other, source, revision=first.revision, **pin)
        assert error.code is ErrorCode.DIGEST_MISMATCH
        assert first.revision in error.message
        assert not error.retryable
    now = await other.model(source)
    same = await other.model(source, revision="etags-of-another-upload", digest=str(now.digest))
    assert (same.revision, weights(same)) == ("etags-of-another-upload", model(2)["unet/x.safetensors"])


async def fetched_revision(rig: SourceRig, tmp_path: Path, pinned: DesiredModel | None) -> str | None:
    """Fetch the model as a server does whose desired file has this pin; return the revision that it fetched, or None."""
    config = msgspec.structs.replace(rig.config, model=str(tmp_path / "link"), model_source="hf://org/x")
    fetch = ModelFetch(config, rig.fetcher, lambda: DesiredState(model=pinned).model)
    await fetch.run()
    fetch.end()
    return fetch.revision


async def test_a_server_follows_the_pin_of_its_own_source_and_no_other(hub: SourceServer, rig: SourceRig, tmp_path: Path) -> None:
    pinned = hub.push("org/x", model(1))
    newest = hub.push("org/x", model(2))
    other = Source(hugging_face=HuggingFaceSource("org/x", revision="other"))
    assert await fetched_revision(rig, tmp_path, DesiredModel(SOURCE, pinned)) == pinned
    assert await fetched_revision(rig, tmp_path, DesiredModel(other, pinned)) == newest
    assert await fetched_revision(rig, tmp_path, None) == newest


@pytest.mark.usefixtures("hub")
async def test_a_model_that_cannot_be_had_ends_the_start_in_the_words_of_its_code(rig: SourceRig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^SourceNotFound: model: hub org/x@gone"):
        await fetched_revision(rig, tmp_path, DesiredModel(SOURCE, "gone"))
