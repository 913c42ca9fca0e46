# SPDX-License-Identifier: Apache-2.0
"""The names of container images follow their content. The Dockerfiles, the ignore file and the hash agree on what that content is."""

import re
from pathlib import Path

import pytest

from tools.devcluster import images
from tools.devcluster.errors import CommandFailed, DevclusterError
from tools.devcluster.paths import REPOSITORY


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("Dockerfile.operator", ".dockerignore", "constraints.txt", "operator/pyproject.toml", "operator/src/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(images, "REPOSITORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize("changed", ["Dockerfile.operator", "constraints.txt", "operator/src/a.py", "operator/src/new.py"])
def test_any_change_of_the_content_changes_the_tag(tree: Path, changed: str) -> None:
    before = images.reference("operator")
    (tree / changed).write_text("changed")
    assert images.reference("operator") != before


@pytest.mark.parametrize("rubbish", ["operator/src/__pycache__/a.pyc", "operator/src/x.egg-info/PKG-INFO", "README.md"])
def test_what_does_not_go_in_does_not_change_the_tag(tree: Path, rubbish: str) -> None:
    before = images.reference("operator")
    (tree / rubbish).parent.mkdir(parents=True, exist_ok=True)
    (tree / rubbish).write_text("rubbish")
    assert images.reference("operator") == before


def test_another_torch_index_is_another_image(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = images.reference("operator")
    monkeypatch.setenv("TORCH_INDEX", "https://index.example.com/cpu")
    assert images.reference("operator") != before
    assert "--build-arg=TORCH_INDEX=https://index.example.com/cpu" in images.docker_build_command("worker", "x")


def test_an_unknown_image_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(DevclusterError, match="no image 'engine', only worker and operator"):
        images.reference("engine")


@pytest.mark.parametrize("image", sorted(images.INPUTS))
def test_all_that_a_dockerfile_copies_counts_for_the_tag_and_passes_the_ignore_file(image: str) -> None:
    lines = (REPOSITORY / f"Dockerfile.{image}").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    copied = {word for words in copies for word in words if not word.startswith("--")}
    inputs = set(images.INPUTS[image])
    for source in copied:
        assert any(given == source or given.startswith(f"{source}/") for given in inputs), source
    allowed = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert inputs <= allowed


def test_the_torch_layer_depends_on_torchs_own_pins_alone() -> None:
    pattern = re.search(r"grep -E '(.+)'", (REPOSITORY / "Dockerfile.worker").read_text())
    assert pattern is not None
    pins = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if re.match(pattern[1], line)]
    names = {pin.split("==")[0] for pin in pins}
    assert {"torch", "triton", "sympy", "networkx", "filelock", "fsspec"} <= names
    assert not {"diffusers", "transformers", "numpy", "ruff"} & names


@pytest.mark.parametrize("image", sorted(images.INPUTS))
def test_the_images_run_as_a_user_without_rights(image: str) -> None:
    lines = (REPOSITORY / f"Dockerfile.{image}").read_text().splitlines()
    assert lines[-1].endswith(f'"diffusion-{image}"]')
    assert "USER 65532:65532" in lines[-3:]


def test_the_workers_image_asks_for_no_gpu_by_itself() -> None:
    """Check that the Dockerfile sets no variable of NVIDIA or CUDA and has a plain base.

    With `NVIDIA_VISIBLE_DEVICES` in the image every pod would see all GPUs of its node, even one that asked for none.
    """
    lines = (REPOSITORY / "Dockerfile.worker").read_text().splitlines()
    assert [line for line in lines if "NVIDIA_" in line or "CUDA_VISIBLE" in line] == []
    # CUDA's own base images set it, so the base has to be another one.
    assert "ARG BASE_IMAGE=python:3.11-slim-bookworm" in lines


def test_docker_builds_with_its_own_base_image() -> None:
    assert images.docker_build_command("worker", "localhost/diffusion-worker:0123") == [
        *("docker", "build", "--file", "Dockerfile.worker", "--tag", "localhost/diffusion-worker:0123", "."),
    ]


@pytest.mark.parametrize(
    ("target", "tls"),
    [
        *(("ghcr.io/me/image:1", True), ("localhost.example.com/me", True), ("198.18.0.1:5000", True)),
        *(("127.0.0.1:5000/me/image:1", False), ("localhost/me", False), ("localhost:5000", False)),
    ],
)
def test_only_a_registry_on_this_machine_has_no_tls(target: str, tls: bool) -> None:
    assert images.has_tls(target) is tls


@pytest.mark.parametrize(
    "printed", ["5f70bf18a086: Pushed\n1.2.3: digest: {} size: 1990\n", "Pushed: ghcr.io/me/chart:1.2.3\nDigest: {}\n"]
)
def test_the_digest_is_the_one_that_docker_or_helm_printed(printed: str, tmp_path: Path) -> None:
    digest = f"sha256:{'0123456789abcdef' * 4}"
    (tmp_path / "log").write_text(printed.format(digest))
    assert images.pushed_digest(tmp_path / "log") == digest
    (tmp_path / "log").write_text("retrying\n")
    with pytest.raises(CommandFailed, match="expected a digest in what the push printed, found 'retrying"):
        images.pushed_digest(tmp_path / "log")


def test_buildah_builds_in_a_chroot_on_a_base_of_ours_and_keeps_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = images.buildah_build_command("worker", "localhost/diffusion-worker:0123", "localhost/base:1")
    assert command[:3] == ["buildah", "--root", f"{tmp_path}/diffusion-operator/storage"]
    assert {"--layers", "--build-arg=BASE_IMAGE=localhost/base:1"} <= set(command)
    assert command[command.index("--isolation") + 1] == "chroot"
