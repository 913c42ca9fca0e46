# SPDX-License-Identifier: Apache-2.0
"""The same adapters and models from every kind of source, from real servers on loopback: a hub, S3, plain http, a claim, a path."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.sources.fetching import Fetched
from diffusion_worker.sources.job import FetchLimits
from diffusion_worker.sources.source import HttpSource, HuggingFaceSource, PvcSource, S3Source, SecretKey, SecretName, Source
from support.sources.rig import PEFT_CONFIG, S3Server, SourceRig, adapter_bytes, fetch_processes, s3_server, until
from support.sources.servers import Served, SourceServer

REMOTE = ("hub", "s3", "http")
KINDS = (*REMOTE, "pvc", "path")
FOLDERS = ("hub", "s3", "pvc", "path")
PEFT = {"adapter_model.safetensors": adapter_bytes(), "adapter_config.json": PEFT_CONFIG}
MODEL = {
    "model_index.json": b'{"_class_name": "X"}',
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": adapter_bytes(300_000),
    "text_encoder/config.json": b"{}",
}


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def content(fetched: Fetched) -> dict[str, bytes]:
    """Return the bytes of each file that a fetch left, by its name below the path; a single file has an empty name."""
    top = Path(fetched.path)
    if top.is_file():
        return {"": top.read_bytes()}
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def is_here(fetched: Fetched) -> bool:
    return Path(fetched.path).exists()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def rig(tmp_path: Path) -> SourceRig:
    return SourceRig(tmp_path)


class Shelf:
    """A place where a test puts files and gets a source for them, of one kind: a hub, S3, HTTP, a claim or a path."""

    def __init__(self, kind: str, rig: SourceRig, hub: SourceServer, s3: Callable[[], S3Server]) -> None:
        self.kind, self._rig, self._hub, self._s3 = kind, rig, hub, s3
        self._bucket = f"bucket-{hashlib.sha256(str(rig.cache).encode()).hexdigest()[:20]}"

    def put(self, files: dict[str, bytes], *, file: str | None = None) -> Source:
        """Put these files into the folder `x`; return a source of the folder, or of the file in it named by `file`. HTTP needs `file`."""
        if self.kind == "hub":
            self._hub.push("org/x", {f"x/{name}": file for name, file in files.items()})
            return Source(hugging_face=HuggingFaceSource("org/x", subfolder="x/", file=file))
        if self.kind == "s3":
            self._s3().put(self._bucket, {f"x/{name}": file for name, file in files.items()})
            return Source(s3=S3Source(f"s3://{self._bucket}/x/{file or ''}", endpoint=self._s3().url))
        if self.kind == "http":
            self._hub.files = {f"/x/{name}": Served(content) for name, content in files.items()}
            return Source(http=HttpSource(f"{self._hub.url}/x/{file}", hashlib.sha256(files[str(file)]).hexdigest()))
        folder = self._rig.claims / "claim" / "x"
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        if self.kind == "pvc":
            return Source(pvc=PvcSource("claim", f"x/{file or ''}"))
        return Source(path=str(folder / (file or "")))

    def remove(self, files: dict[str, bytes]) -> None:
        """Remove the files from the remote source; a claim or a path keeps them."""
        self._hub.delete("org/x")
        self._hub.files = {}
        if self.kind == "s3":
            for name in files:
                self._s3().delete(self._bucket, f"x/{name}")


@pytest.fixture
def shelf(request: pytest.FixtureRequest, rig: SourceRig, hub: SourceServer) -> Shelf:
    return Shelf(request.param, rig, hub, lambda: request.getfixturevalue("s3"))


@pytest.mark.slow
@pytest.mark.parametrize("shelf", KINDS, indirect=True)
async def test_one_file_of_any_kind_is_an_adapter(rig: SourceRig, shelf: Shelf) -> None:
    files = {"styles.safetensors": adapter_bytes(), "other.safetensors": adapter_bytes(9)}
    fetched = await rig.adapter(shelf.put(files, file="styles.safetensors"))
    assert content(fetched) == {"": files["styles.safetensors"]}
    if shelf.kind in REMOTE:
        assert fetched.digest == digest_of(files["styles.safetensors"])
        assert fetched.size_bytes == len(files["styles.safetensors"])


@pytest.mark.slow
@pytest.mark.parametrize("shelf", FOLDERS, indirect=True)
async def test_a_peft_folder_of_any_kind_is_an_adapter(rig: SourceRig, shelf: Shelf) -> None:
    fetched = await rig.adapter(shelf.put(PEFT))
    assert content(fetched) == PEFT
    assert fetched.digest in (None, digest_of(PEFT["adapter_model.safetensors"]))


@pytest.mark.slow
@pytest.mark.parametrize("shelf", FOLDERS, indirect=True)
async def test_a_model_of_any_kind_is_a_folder(rig: SourceRig, shelf: Shelf) -> None:
    assert content(await rig.model(shelf.put(MODEL))) == MODEL


@pytest.mark.slow
@pytest.mark.parametrize("shelf", KINDS, indirect=True)
async def test_a_source_of_any_kind_that_is_not_there_is_told(rig: SourceRig, shelf: Shelf) -> None:
    files = {"a.safetensors": adapter_bytes()}
    source = shelf.put(files, file="a.safetensors")
    shelf.remove(files)
    for path in rig.claims.rglob("*.safetensors"):
        path.unlink()
    assert (await rig.refusal(source)).code is ErrorCode.SOURCE_NOT_FOUND


@pytest.mark.slow
@pytest.mark.parametrize("shelf", REMOTE, indirect=True)
async def test_a_pinned_adapter_whose_source_is_gone_comes_from_the_cache(rig: SourceRig, shelf: Shelf) -> None:
    files = {"a.safetensors": adapter_bytes()} if shelf.kind == "http" else PEFT
    source = shelf.put(files, file="a.safetensors" if shelf.kind == "http" else None)
    first = await rig.adapter(source)
    shelf.remove(files)
    assert await rig.adapter(source, digest=first.digest) == first


@pytest.mark.slow
async def test_a_pinned_file_that_came_from_another_source_needs_no_network(rig: SourceRig, hub: SourceServer) -> None:
    hub.files["/a"] = Served(adapter_bytes())
    first = await rig.adapter(Source(http=HttpSource(f"{hub.url}/a", hub.files["/a"].sha256)))
    hub.asked.clear()
    gone = Source(hugging_face=HuggingFaceSource("org/gone", file="a.safetensors"))
    assert content(await rig.adapter(gone, digest=first.digest)) == content(first)
    assert not hub.asked
    assert (await rig.refusal(gone)).code is ErrorCode.SOURCE_NOT_FOUND


@pytest.mark.slow
@pytest.mark.parametrize("shelf", REMOTE, indirect=True)
async def test_another_digest_than_the_pinned_one_is_refused_and_the_file_does_not_stay(rig: SourceRig, shelf: Shelf) -> None:
    files = {"a.safetensors": adapter_bytes()}
    error = await rig.refusal(shelf.put(files, file="a.safetensors"), digest=f"sha256:{'0' * 64}")
    assert error.code is ErrorCode.DIGEST_MISMATCH
    assert "0" * 64 in error.message
    assert digest_of(files["a.safetensors"]) in error.message
    assert rig.files("blobs") == rig.files("partial") == []


@pytest.mark.slow
@pytest.mark.parametrize("shelf", FOLDERS, indirect=True)
async def test_pickled_weights_of_any_kind_are_refused(rig: SourceRig, shelf: Shelf) -> None:
    """Fetch a folder and a file with pickled weights; both must be refused, because a pickle runs its author's code when it is read."""
    assert (await rig.refusal(shelf.put({"adapter_model.bin": b"x", "adapter_config.json": PEFT_CONFIG}))).code is (
        ErrorCode.UNSUPPORTED_FORMAT
    )
    assert (await rig.refusal(shelf.put({"lora.pt": b"x"}, file="lora.pt"))).code is ErrorCode.UNSUPPORTED_FORMAT


@pytest.mark.slow
@pytest.mark.parametrize("shelf", ["hub", "s3"], indirect=True)
async def test_new_bytes_under_an_old_name_are_fetched_and_the_same_ones_are_not(rig: SourceRig, shelf: Shelf, hub: SourceServer) -> None:
    source = shelf.put(PEFT)
    first = await rig.adapter(source)
    asked = dict(hub.asked)
    again = await rig.adapter(source)
    assert again == first
    assert {path: count for path, count in hub.asked.items() if "resolve" in path} == {
        path: count for path, count in asked.items() if "resolve" in path
    }
    second = await rig.adapter(shelf.put({**PEFT, "adapter_model.safetensors": adapter_bytes(fill=2)}))
    assert second.digest == digest_of(adapter_bytes(fill=2))
    assert second.revision != first.revision


@pytest.mark.slow
async def test_a_branch_of_a_hub_is_resolved_to_its_commit(rig: SourceRig, hub: SourceServer) -> None:
    commit = hub.push("org/x", {"a.safetensors": adapter_bytes()}, branch="v1")
    hub.push("org/x", {"a.safetensors": adapter_bytes(fill=2)})
    source = Source(hugging_face=HuggingFaceSource("org/x", revision="v1", file="a.safetensors"))
    fetched = await rig.adapter(source)
    assert (fetched.revision, content(fetched)[""]) == (commit, adapter_bytes())


@pytest.mark.slow
async def test_a_commit_of_a_hub_that_is_in_the_cache_needs_no_network(rig: SourceRig, hub: SourceServer) -> None:
    commit = hub.push("org/x", MODEL)
    source = Source(hugging_face=HuggingFaceSource("org/x", revision=commit))
    first = await rig.model(source)
    hub.asked.clear()
    assert await rig.model(source) == first
    assert not hub.asked


@pytest.mark.slow
async def test_a_model_whose_hub_cannot_be_asked_is_what_it_was_last(
    rig: SourceRig, hub: SourceServer, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.push("org/x", MODEL)
    source = Source(hugging_face=HuggingFaceSource("org/x"))
    first = await rig.model(source)
    hub.delete("org/x")
    assert await rig.model(source) == first
    assert f"revision {commit}, fetched before, is used" in caplog.text


@pytest.mark.slow
async def test_of_a_models_repository_only_what_is_loaded_is_fetched(rig: SourceRig, hub: SourceServer) -> None:
    others = {"unet/diffusion_pytorch_model.bin": b"x", "README.md": b"x", ".gitattributes": b"x", "big.safetensors": b"x"}
    hub.push("org/x", {**MODEL, **others})
    assert content(await rig.model(Source(hugging_face=HuggingFaceSource("org/x")))) == MODEL
    some = HuggingFaceSource("org/x", allow_patterns=["*.json", "unet/*.safetensors", "unet/*.bin"])
    assert content(await rig.model(Source(hugging_face=some))) == MODEL


@pytest.mark.slow
async def test_a_hub_whose_answer_has_no_end_is_given_up_in_bounded_memory(tmp_path: Path, hub: SourceServer) -> None:
    rig = SourceRig(tmp_path, limits=FetchLimits(memory_bytes=300 << 20))
    hub.files["/api/models/org/x/revision/main"] = Served(b"[" * (200 << 20))
    error = await rig.refusal(Source(hugging_face=HuggingFaceSource("org/x")))
    assert (error.code, "more memory than" in error.message) == (ErrorCode.TOO_LARGE, True)


@pytest.mark.slow
async def test_a_fetch_takes_no_token_and_no_proxy_from_its_surroundings(
    rig: SourceRig, hub: SourceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_TOKEN": "hf_ofauser", "HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    file = Served(adapter_bytes(), gate_after=10)
    hub.push("org/x", {"a.safetensors": file})
    fetching = asyncio.create_task(rig.adapter(Source(hugging_face=HuggingFaceSource("org/x", file="a.safetensors"))))
    await until(hub.at_gate.is_set)
    [process] = fetch_processes()
    assert b"hf_ofauser" not in content(Fetched(f"/proc/{process}/environ"))[""]
    file.gate.set()
    assert content(await fetching) == {"": adapter_bytes()}
    assert set(hub.authorizations) == {None}


async def test_a_token_comes_from_its_secret_and_is_seen_nowhere(rig: SourceRig, hub: SourceServer) -> None:
    hub.token = "hf_verysecret"
    hub.push("org/x", {"a.safetensors": Served(adapter_bytes(), gate_after=10)})
    source = Source(hugging_face=HuggingFaceSource("org/x", file="a.safetensors", token_secret_ref=SecretKey("hub-token")))
    missing = await rig.refusal(source)
    assert missing.code is ErrorCode.SECRET_MISSING
    assert "'hub-token'" in missing.message
    assert "'token'" in missing.message
    rig.secret("hub-token", token="hf_wrong")
    wrong = await rig.refusal(source)
    assert wrong.code is ErrorCode.SOURCE_UNAUTHORIZED
    assert "hf_wrong" not in wrong.message
    rig.secret("hub-token", token="hf_verysecret")
    fetching = asyncio.create_task(rig.adapter(source))
    await until(hub.at_gate.is_set)
    [process] = fetch_processes()
    for place in ("cmdline", "environ"):
        assert b"hf_verysecret" not in content(Fetched(f"/proc/{process}/{place}"))[""]
    next(iter(hub._commits.values()))["a.safetensors"].gate.set()
    assert content(await fetching) == {"": adapter_bytes()}


@pytest.mark.slow
async def test_a_token_is_not_sent_to_where_a_hub_redirects(rig: SourceRig, hub: SourceServer) -> None:
    with SourceServer().running() as elsewhere:
        elsewhere.files["/cdn"] = Served(adapter_bytes())
        elsewhere.token = None
        file = Served(adapter_bytes(), redirect=f"{elsewhere.url}/cdn?Signature=abc")
        hub.token = "hf_verysecret"
        hub.push("org/x", {"a.safetensors": file})
        rig.secret("hub-token", token="hf_verysecret")
        source = Source(hugging_face=HuggingFaceSource("org/x", file="a.safetensors", token_secret_ref=SecretKey("hub-token")))
        assert content(await rig.adapter(source)) == {"": adapter_bytes()}
        assert elsewhere.asked["/cdn"] == 1
        assert not any("hf_verysecret" in str(value) for value in elsewhere.authorizations)
        assert all("hf_verysecret" in str(value) for value in hub.authorizations)


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["../x", "a/b/c", "org/"])
async def test_a_repository_that_is_no_name_of_one_is_refused(rig: SourceRig, hub: SourceServer, repo: str) -> None:
    error = await rig.refusal(Source(hugging_face=HuggingFaceSource(repo)))
    assert error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.SOURCE_NOT_FOUND)


@pytest.mark.slow
async def test_a_hub_that_answers_something_else_is_told(rig: SourceRig, hub: SourceServer) -> None:
    hub.files["/api/models/org/x/revision/main"] = Served(b"<html>")
    assert (await rig.refusal(Source(hugging_face=HuggingFaceSource("org/x")))).code is ErrorCode.NETWORK_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("shelf", ["s3"], indirect=True)
async def test_the_revision_of_an_object_is_its_version_and_its_credentials_come_from_a_secret(
    rig: SourceRig, shelf: Shelf, s3: S3Server
) -> None:
    s3.put("versioned", {"a.safetensors": adapter_bytes()}, versioned=True)
    keys = SecretName("minio")
    source = Source(s3=S3Source("s3://versioned/a.safetensors", endpoint=s3.url, region="eu-central-1", credentials_secret_ref=keys))
    missing = await rig.refusal(source)
    assert (missing.code, "'minio'" in missing.message, "'accessKeyId'" in missing.message) == (ErrorCode.SECRET_MISSING, True, True)
    rig.secret("minio", accessKeyId="AKIAEXAMPLE", secretAccessKey="verysecret")
    first = await rig.adapter(source)
    s3.put("versioned", {"a.safetensors": adapter_bytes(fill=2)})
    second = await rig.adapter(source)
    assert content(second) == {"": adapter_bytes(fill=2)}
    assert first.revision
    assert second.revision not in (None, first.revision)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["http://169.254.169.254", "http://[fd00:ec2::254]"])
async def test_no_endpoint_of_s3_is_at_a_metadata_address(rig: SourceRig, endpoint: str) -> None:
    for uri in ("s3://bucket/x/", "s3://bucket/x.safetensors"):
        error = await rig.refusal(Source(s3=S3Source(uri, endpoint=endpoint)))
        assert (error.code, "refused" in error.message) == (ErrorCode.NETWORK_ERROR, True)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["https://store.example:70000", "https://[::1", "https://"])
async def test_an_endpoint_of_s3_that_is_no_address_is_refused_with_the_form_that_is_expected(rig: SourceRig, endpoint: str) -> None:
    error = await rig.refusal(Source(s3=S3Source("s3://bucket/x/", endpoint=endpoint)))
    assert (error.code, "expected https://host or https://host:port" in error.message) == (ErrorCode.INVALID_REQUEST, True)


@pytest.mark.slow
async def test_a_models_source_of_kind_http_or_of_one_object_is_refused(rig: SourceRig, s3: S3Server) -> None:
    for source in (
        Source(http=HttpSource("https://host/x", "0" * 64)),
        Source(s3=S3Source("s3://bucket/x.safetensors", endpoint=s3.url)),
    ):
        with pytest.raises(RequestError, match="a model is a folder") as refused:
            await rig.model(source)
        assert refused.value.code is ErrorCode.INVALID_REQUEST
