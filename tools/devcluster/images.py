# SPDX-License-Identifier: Apache-2.0
"""Our two images, built by a Docker engine or by buildah. The tag is the hash of the inputs, so an unchanged tree builds nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import programs
from .cache import cached, content_hash, locked
from .errors import CommandFailed, DevclusterError
from .paths import IMAGES_RUN, REPOSITORY, image_store, log_dir
from .progress import run_logged, run_quiet, say

# Files that each Dockerfile copies; a test holds the two together.
INPUTS = {
    "worker": ("constraints.txt", "worker/pyproject.toml", "worker/src", "examples/digits/model", "examples/digits/loras"),
    "operator": ("constraints.txt", "operator/pyproject.toml", "operator/src"),
}
KEPT = 3  # builds of one image
BASE_SUITE = "bookworm"
BASE_PACKAGES = "ca-certificates,python3,python3-venv"
_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


def docker_answers() -> bool:
    """Ask the Docker engine for its version; return False if there is no client, no engine, or no answer within 20 s."""
    if shutil.which("docker") is None:
        return False
    try:
        asked = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def reference(image: str) -> str:
    """Return the name of one of our two images, tagged with the hash of all its inputs; nothing is built.

    Raises:
        DevclusterError: the image is neither `worker` nor `operator`.
    """
    if image not in INPUTS:
        raise DevclusterError(f"there is no image {image!r}, only {' and '.join(INPUTS)}")
    parts: list[Path | str] = [REPOSITORY / f"Dockerfile.{image}", REPOSITORY / ".dockerignore", *(REPOSITORY / p for p in INPUTS[image])]
    return f"localhost/diffusion-{image}:{content_hash([*parts, *_build_arguments()], relative_to=REPOSITORY)}"


def build(image: str) -> str:
    """Build one of our two images unless there is one of this content, and return its reference. Concurrent builds wait."""
    name = reference(image)
    with locked("images"):
        if docker_answers():
            _build_with_docker(image, name)
        else:
            _build_with_buildah(image, name)
    return name


def docker_build_command(image: str, name: str) -> list[str]:
    """Return the words of `docker build` for one of our images, to be run in the repository. `name` is its tag."""
    arguments = [f"--build-arg={a}" for a in _build_arguments()]
    return ["docker", "build", "--file", f"Dockerfile.{image}", "--tag", name, *arguments, "."]


def buildah_build_command(image: str, name: str, base: str) -> list[str]:
    """Return the words by which buildah builds one of our images in a chroot, upon the image `base`; to be run in the repository."""
    arguments = [f"--build-arg={a}" for a in (f"BASE_IMAGE={base}", *_build_arguments())]
    ignore = ["--ignorefile", ".dockerignore"]
    what = ["--file", f"Dockerfile.{image}", *ignore, "--tag", name, *arguments, "."]
    return [*buildah(), "build", "--layers", "--isolation", "chroot", *what]


def buildah() -> list[str]:
    """Return the first words of every call of buildah: with a store of its own in the cache, apart from the machine's other images."""
    places = ["--root", str(image_store()), "--runroot", str(IMAGES_RUN)]
    return ["buildah", *places, "--storage-driver", "overlay"]


def clear_unfinished() -> None:
    """Remove the containers of buildah's store, and unmount the store and all below it, as a killed build leaves them; images stay.

    Do nothing without buildah or store. The caller holds the lock `images`.
    """
    store = image_store()
    if shutil.which("buildah") is None or not store.exists():
        return
    run_quiet([*buildah(), "rm", "--all"])
    for mounted in sorted((line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()), reverse=True):
        if Path(mounted).is_relative_to(store):
            run_quiet(["umount", mounted])


def publish(name: str, target: str) -> str:
    """Push the image `name` to a registry as `target`, with the credentials of the user of Docker or buildah; return its digest there."""
    if not docker_answers():
        return push(name, f"docker://{target}", tls=has_tls(target))
    log = log_dir() / "push.log"
    run_logged(["docker", "tag", name, target], what=f"name {target}", log=log_dir() / "tag.log")
    with locked("images"):
        run_logged(["docker", "push", target], what=f"push {target}", log=log, deadline_s=3600)
        return pushed_digest(log)


def has_tls(target: str) -> bool:
    """Return whether a registry is reached by TLS: false only for `localhost` and `127.0.0.1`, as Docker does it."""
    return re.match(r"(localhost|127\.0\.0\.1)(:\d+)?(/|$)", target) is None


def pushed_digest(log: Path) -> str:
    """Find the digest, `sha256:…`, in the log of a `docker push` or `helm push`; raise CommandFailed if the log has none."""
    printed = log.read_text()
    found = re.search(r"[Dd]igest: (sha256:[0-9a-f]{64})", printed)
    if found is None:
        raise CommandFailed(f"expected a digest in what the push printed, found {printed!r}")
    return found[1]


def push(name: str, destination: str, *, tls: bool = True) -> str:
    """Push the image `name` from buildah's storage to `destination`, and return the digest of its manifest there.

    Layers that are there already are not sent. Without `tls`, for a registry on this machine, layers are packed with zstd.
    """
    # zstd, lightly: half of gzip's time to pack and two thirds to unpack. Only registries on this machine have no TLS.
    how = [] if tls else ["--tls-verify=false", "--compression-format", "zstd", "--compression-level", "1"]
    with locked("images"), tempfile.NamedTemporaryFile("r") as digest:
        words = [*buildah(), "push", "--format", "oci", *how, "--digestfile", digest.name, name, destination]
        run_logged(words, what=f"push {name}", log=log_dir() / "push.log", deadline_s=1800)
        return digest.read().strip()


def _build_arguments() -> list[str]:
    index = os.environ.get("TORCH_INDEX")
    base = os.environ.get("BASE_IMAGE")
    return [*([f"TORCH_INDEX={index}"] if index else []), *([f"BASE_IMAGE={base}"] if base else [])]


def _build_with_docker(image: str, name: str) -> None:
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode != 0:
        run_logged(docker_build_command(image, name), what=f"image of the {image}", log=log_dir() / f"image-{image}.log", cwd=REPOSITORY)


def _build_with_buildah(image: str, name: str) -> None:
    programs.install_debian_packages(("buildah", "debootstrap"))
    if _has(name):
        return
    clear_unfinished()
    base = os.environ.get("BASE_IMAGE") or _base()
    log = log_dir() / f"image-{image}.log"
    run_logged(buildah_build_command(image, name, base), what=f"image of the {image}", log=log, cwd=REPOSITORY, env=_environment())
    _forget_older(image)


def _base() -> str:
    """Build a base image of Debian with Python from packages, without a registry; return its name."""
    key = content_hash([BASE_SUITE, BASE_PACKAGES, *([_BUNDLE] if _BUNDLE.exists() else [])], relative_to=Path("/"))
    name = f"localhost/devcluster-base:{key}"
    if not _has(name):
        archive = cached("base", key, _make_rootfs) / "rootfs.tar"
        (archive.parent / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
        build_base = [*buildah(), "build", "--tag", name, str(archive.parent)]
        run_logged(build_base, what="base image", log=log_dir() / "image-base.log", env=_environment())
        archive.unlink()
    return name


def _make_rootfs(draft: Path) -> None:
    root = draft / "root"
    # In namespaces of its own: killed half-way it would leave /proc mounted in the folder and its children at work.
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = [*apart, "debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", BASE_SUITE, str(root)]
    run_logged(words, what="Debian with Python (about 90 s, once)", log=log_dir() / "debootstrap.log")
    for rubbish in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/lib/apt/lists/*_*")):
        rubbish.unlink()
    if _BUNDLE.exists():  # a machine behind an authority of its own: pip in the image must know it too
        shutil.copyfile(_BUNDLE, root / _BUNDLE.relative_to("/"))
        (root / "etc/pip.conf").write_text(f"[global]\ncert = {_BUNDLE}\n")
    pack = ["tar", "-C", str(root), "--numeric-owner", "-cf", str(draft / "rootfs.tar"), "."]
    run_logged(pack, what="base image's archive", log=log_dir() / "tar.log")
    shutil.rmtree(root)


def _has(name: str) -> bool:
    return subprocess.run([*buildah(), "inspect", "--type", "image", name], capture_output=True).returncode == 0


def _forget_older(image: str) -> None:
    # Listed newest first. Another process may be about to push the last one or two; older ones share most layers anyway.
    listed = run_quiet([*buildah(), "images", "--format", "{{.Name}}:{{.Tag}}"]).split()
    older = [name for name in listed if re.fullmatch(rf"localhost/diffusion-{image}:[0-9a-f]+", name)][KEPT:]
    if older:
        say(f"forgets {len(older)} older image(s) of the {image}")
        run_quiet([*buildah(), "rmi", *older])


def _environment() -> dict[str, str]:
    return {**os.environ, "BUILDAH_ISOLATION": "chroot"}
