# SPDX-License-Identifier: Apache-2.0
"""A worker whose model comes from a hub: its answers while it fetches, and the same service as with a folder."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.startup import model_fetching
from diffusion_worker.engine.startup.model_digest import digest_of
from diffusion_worker.errors import ConfigError
from diffusion_worker.offline.engine import DiffusionEngine
from diffusion_worker.sources.options import locate_model
from support.sources.rig import SourceRig, adapter_bytes, fetch_processes, until
from support.sources.servers import Served, SourceServer
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.process import DIGITS, DIGITS_MODEL, WorkerProcess

DIGITS_FILES = {str(path.relative_to(DIGITS_MODEL)): path.read_bytes() for path in DIGITS_MODEL.rglob("*") if path.is_file()}
SMALL = {"model_index.json": b'{"_class_name": "X"}', "unet/x.safetensors": adapter_bytes(100_000)}


def names_in(folder: str) -> set[str] | None:
    """Return the names in a folder, or None if there is no folder."""
    return {path.name for path in Path(folder).iterdir()} if Path(folder).exists() else None


@asynccontextmanager
async def starting(tmp_path: Path, model: str, **options: object) -> AsyncIterator[tuple[Engine, "asyncio.Task[None]", WorkerConfig]]:
    """Start an engine over fake ranks without waiting; yield it, the task of its start, and its settings. End it with the block."""
    rig = SourceRig(tmp_path, **options)
    place = locate_model(model, rig.config.claims_dir)
    config = msgspec.structs.replace(rig.config, model=place.folder, model_source=place.source)
    engine = Engine(config, FakeRankGroup(1), boot_id="boot")
    task = asyncio.create_task(engine.start())
    try:
        yield engine, task, config
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConfigError):
            await task
        await engine.terminate()


async def test_a_worker_answers_while_it_fetches_and_says_how_far_it_is(hub: SourceServer, tmp_path: Path) -> None:
    weights = Served(SMALL["unet/x.safetensors"], gate_after=50_000)
    commit = hub.push("org/tiny", {**SMALL, "unet/x.safetensors": weights})
    async with starting(tmp_path, "hf://org/tiny") as (engine, start, config):
        await until(lambda: engine.state_document().load.bytes_done >= 50_000)
        document = engine.state_document()
        assert (document.state, document.load.stage, document.model.path) == ("starting", "Fetching", "hf://org/tiny")
        assert document.load.bytes_total == sum(map(len, SMALL.values()))
        assert document.model.revision is None
        weights.gate.set()
        await start
        document = engine.state_document()
        assert (document.state, document.load.stage, document.model.revision) == ("ready", "Done", commit)
        assert names_in(config.model) == {"model_index.json", "unet"}
    assert names_in(config.model) is None


async def test_a_missing_secret_is_shown_and_the_fetch_goes_on_when_it_appears(
    hub: SourceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetching, "FIRST_RETRY_S", 0.05)
    hub.push("org/tiny", SMALL)
    source = '{"huggingFace": {"repo": "org/tiny", "tokenSecretRef": {"name": "hub"}}}'
    async with starting(tmp_path, source) as (engine, start, _):
        await until(lambda: engine.state_document().failure)
        failure = engine.state_document().failure
        assert failure is not None
        assert (failure.code, failure.retryable) == ("SecretMissing", True)
        SourceRig(tmp_path).secret("hub", token="t")
        await start
        assert engine.state_document().failure is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"unet/x.safetensors": b"x"}, "UnsupportedFormat: model: hub org/tiny@main: expected a diffusers folder"),
        ({"model_index.json": b"{}", "unet/x.bin": b"x"}, "pickle files and archives are not read"),
        ({"model_index.json": b"no JSON", "unet/x.safetensors": adapter_bytes()}, "model_index.json cannot be read"),
    ],
)
async def test_a_repository_that_is_no_model_ends_the_start(hub: SourceServer, tmp_path: Path, files: dict[str, bytes], says: str) -> None:
    hub.push("org/tiny", files)
    async with starting(tmp_path, "hf://org/tiny") as (_, start, _):
        with pytest.raises(ConfigError) as refused:
            await start
        assert says in str(refused.value)


@pytest.mark.slow
async def test_a_model_that_cannot_be_had_in_the_time_of_a_start_ends_it(hub: SourceServer, tmp_path: Path) -> None:
    hub.token = "another"
    async with starting(tmp_path, "hf://org/tiny", startup_timeout_s=5.0) as (_, start, _):
        with pytest.raises(ConfigError, match="SourceUnauthorized"):
            await start


@pytest.mark.slow
async def test_a_last_try_that_is_cut_short_does_not_hide_why_the_one_before_failed(hub: SourceServer, tmp_path: Path) -> None:
    hub.push("org/tiny", {name: Served(content, gate_after=0) for name, content in SMALL.items()})
    source = '{"huggingFace": {"repo": "org/tiny", "tokenSecretRef": {"name": "hub"}}}'
    async with starting(tmp_path, source, startup_timeout_s=5.0) as (engine, start, _):
        await until(lambda: engine.state_document().failure)
        SourceRig(tmp_path).secret("hub", token="t")
        with pytest.raises(ConfigError, match="SecretMissing"):
            await start
        assert hub.at_gate.is_set()


@pytest.mark.slow
async def test_a_worker_that_ends_while_it_fetches_leaves_no_process(hub: SourceServer, tmp_path: Path) -> None:
    hub.push("org/tiny", {**SMALL, "unet/x.safetensors": Served(SMALL["unet/x.safetensors"], gate_after=50_000)})
    async with starting(tmp_path, "hf://org/tiny") as (engine, _, _):
        await until(hub.at_gate.is_set)
        assert len(fetch_processes()) == 1
    assert fetch_processes() == []
    assert engine.state_document().model.revision is None


@pytest.mark.slow
def test_a_worker_that_is_told_to_end_while_it_fetches_ends_with_0(hub: SourceServer) -> None:
    hub.push("org/tiny", {**SMALL, "unet/x.safetensors": Served(SMALL["unet/x.safetensors"], gate_after=50_000)})
    with WorkerProcess(model="hf://org/tiny", options=("--allow-http-sources",)) as worker:  # type: ignore[arg-type]
        worker.wait_for(lambda: worker.state()["load"]["bytesDone"] >= 50_000, what="halfway")
        assert worker.get("/readyz").status_code == 503
        assert worker.request_images(prompt="").status_code == 400
        fetching = fetch_processes(worker.pid)
        assert len(fetching) == 1
        assert worker.terminate(10.0) == 0
        assert not Path(f"/proc/{fetching[0]}").exists()


@pytest.mark.slow
def test_a_real_worker_serves_a_model_and_an_adapter_of_a_hub_as_it_does_from_folders(hub: SourceServer, tmp_path: Path) -> None:
    commit = hub.push("org/digits", {**DIGITS_FILES, "README.md": b"not fetched"})
    stripes = {path.name: path.read_bytes() for path in (DIGITS / "loras" / "stripes").iterdir()}
    hub.push("org/styles", {f"stripes/{name}": content for name, content in stripes.items()})
    options = ("--lora=stripes=hf://org/styles/stripes", f"--cache-dir={tmp_path}", "--allow-http-sources")
    with WorkerProcess(model="hf://org/digits", options=options) as worker:  # type: ignore[arg-type]
        worker.wait_ready()
        state = worker.state()
        assert (state["model"]["path"], state["model"]["revision"]) == ("hf://org/digits", commit)
        [adapter] = state["adapters"]
        assert (adapter["state"], adapter["source"]["huggingFace"]["repo"]) == ("Loaded", "org/styles")
        folder = digest_of(DIGITS_MODEL, threading.Event())
        worker.wait_for(lambda: worker.state()["model"]["digest"] == folder, what="known to have the folder's digest")
        fetched = worker.image(prompt="a red seven kumquatfen", seed=1, model="stripes")
        put = {"operationId": "1", "source": {"path": str(DIGITS / "loras" / "stripes")}}
        assert worker.control("PUT", "/v1/adapters/local", json=put).status_code == 200
        assert worker.image(prompt="a red seven kumquatfen", seed=1, model="local").tobytes() == fetched.tobytes()
        assert worker.image(prompt="a red seven kumquatfen", seed=1).tobytes() != fetched.tobytes()
    assert [path for path in hub.asked if "README" in path] == []


@pytest.mark.slow
def test_an_engine_in_a_script_takes_a_model_of_a_hub(hub: SourceServer) -> None:
    commit = hub.push("org/digits", DIGITS_FILES)
    with DiffusionEngine("hf://org/digits", allow_http_sources=True, startup_timeout_s=120.0) as engine:
        [image] = engine.generate("a red seven", seed=1)
        assert image.provenance.revision == commit
