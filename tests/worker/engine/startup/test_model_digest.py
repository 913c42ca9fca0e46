# SPDX-License-Identifier: Apache-2.0
"""The digest of a model folder: computed after the load, equal to that of sha256sum, and in the provenance once it is known."""

import asyncio
import hashlib
import os
import subprocess
import threading
from pathlib import Path

import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.engine.startup import model_digest
from diffusion_worker.engine.startup.model_digest import ModelDigest, Stopped, digest_of
from support.worker.fake_rank_group import FakeRankGroup

DEADLINE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a model folder with files in folders, a link among them, and files that tools leave behind."""
    (tmp_path / "model" / "vae").mkdir(parents=True)
    (tmp_path / "model" / ".git").mkdir()
    (tmp_path / "blob").write_bytes(b"weights" * 1000)
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "model" / "vae" / "weights.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "model" / "vae" / "Z ä.txt").write_bytes(b"")
    (tmp_path / "model" / ".git" / "index").write_text("who cloned it")
    (tmp_path / "model" / ".marker").write_text("when")
    return tmp_path / "model"


def test_the_digest_is_that_of_the_lines_that_sha256sum_prints_for_the_files_in_order(folder: Path) -> None:
    names = "model_index.json", "vae/Z ä.txt", "vae/weights.safetensors"
    printed = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True).stdout
    assert digest_of(folder, threading.Event()) == "sha256:" + hashlib.sha256(printed).hexdigest()


def test_it_depends_on_what_is_in_the_files_and_on_their_names_and_not_on_where_they_are_or_on_hidden_ones(
    folder: Path, tmp_path: Path
) -> None:
    before = digest_of(folder, threading.Event())
    (folder / ".git" / "index").write_text("somebody else")
    (folder / "unused").mkdir()
    moved = folder.rename(tmp_path / "elsewhere")
    assert digest_of(moved, threading.Event()) == before
    (moved / "vae" / "Z ä.txt").rename(moved / "vae" / "Y.txt")
    renamed = digest_of(moved, threading.Event())
    (tmp_path / "blob").write_bytes(b"weightz" * 1000)
    assert len({before, renamed, digest_of(moved, threading.Event())}) == 3


def test_a_file_that_cannot_be_read_is_an_error_and_a_digest_that_nobody_wants_any_more_ends(folder: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        digest_of(folder, stop)
    (folder / "gone").symlink_to(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match="gone"):
        digest_of(folder, threading.Event())


def test_it_is_computed_in_a_thread_of_the_lowest_priority(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(path: Path, stop: threading.Event) -> str:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return "sha256:0"

    monkeypatch.setattr(model_digest, "digest_of", look)
    digest = ModelDigest(folder)
    digest.begin().join(DEADLINE_S)
    assert (digest.value, seen) == ("sha256:0", [19])
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


async def test_provenance_and_state_have_no_digest_before_the_load_is_over_and_the_digest_after_that(folder: Path) -> None:
    # Threads of other tests' engines, which have the lowest priority and may run for a while.
    others = set(threading.enumerate())
    ranks = FakeRankGroup()
    engine = Engine(WorkerConfig(model=str(folder), served_name="m", warmup_steps=0), ranks, boot_id="b")
    ranks.loading.clear()
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    assert engine.state_document().model.digest is None
    assert not any(thread.name == "model-digest" for thread in set(threading.enumerate()) - others)
    ranks.loading.set()
    async with asyncio.timeout(DEADLINE_S):
        await starting
        for thread in set(threading.enumerate()) - others:
            if thread.name == "model-digest":
                await asyncio.to_thread(thread.join)
        made = await engine.generate(GenerationParams(prompt="p kumquatfen", seed=1))
    assert engine.state_document().model.digest == made.provenance.digest == digest_of(folder, threading.Event())
    assert made.provenance.revision is None
    await engine.terminate()


def test_a_folder_that_cannot_be_read_leaves_the_digest_unknown_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    digest = ModelDigest(tmp_path / "nowhere")
    digest.begin().join(DEADLINE_S)
    assert digest.value is None
    assert "has no digest" in caplog.text
