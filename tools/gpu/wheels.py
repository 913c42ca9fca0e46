# SPDX-License-Identifier: Apache-2.0
"""The wheels that travel to a machine without a network: `python -m tools.gpu.wheels` fills `.gpu-wheels/`.

The machine has torch, transformers, peft and pytest with what these need. A set is made for its Python and another for the one here.
Needs nothing but Python and pip.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.requirements import CONSTRAINTS, ROOT, versions

FOLDER = ROOT / ".gpu-wheels"
JUDGE = "judge.npz"
MACHINE = "3.12"
MOST_BYTES = 50_000_000
# Everything that the worker imports to serve a model in a folder, and that torch, transformers, peft and pytest may come without.
CARRIED = (
    "annotated-doc", "annotated-types", "anyio", "certifi", "charset-normalizer", "click", "diffusers", "fastapi", "ftfy", "greenlet",
    "h11",
    "idna", "importlib-metadata", "isal", "lazy-importer", "msgspec", "opentelemetry-api", "pillow", "prometheus-client", "pydantic",
    "pydantic-core", "python-multipart", "pyzmq", "requests", "starlette", "typing-inspection", "urllib3", "uvicorn", "wcwidth", "zipp",
)  # fmt: skip
# Dependencies of the worker that stay behind: those that fetch models, and those that only some models or options need.
LEFT_BEHIND = ("bitsandbytes", "httpx2", "obstore", "protobuf", "sentencepiece", "torchao", "torchvision")
# The machine has these, and everything that they need.
THERE = ("torch", "transformers", "peft", "pytest")
# Pip matches the number of a platform exactly.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux1")


def folder_for(python: str, base: Path = FOLDER) -> Path:
    """Return the folder of the wheels for a Python such as `3.12`."""
    return base / f"cp{python.replace('.', '')}"


def this_python() -> str:
    """Return the major and minor version of this Python, such as `3.12`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def download(python: str, base: Path = FOLDER) -> int:
    """Download the carried wheels for a Python into its folder, in place of those there, and return their bytes.

    Raises:
        SystemExit: they are too large to travel.
    """
    target, pinned = folder_for(python, base), versions(CONSTRAINTS.read_text())
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.whl"):
        old.unlink()
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for platform in PLATFORMS:
        options += ["--platform", f"{platform}_x86_64"]
    names = [f"{name}=={pinned[name]}" for name in CARRIED]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, "--dest", str(target), *names], check=True)
    size = sum(path.stat().st_size for path in target.glob("*.whl"))
    if size > MOST_BYTES:
        raise SystemExit(f"{target}: expected at most {MOST_BYTES} bytes of wheels, found {size}")
    return size


def unpack(wheels: Sequence[Path], folder: Path) -> None:
    """Unpack wheels into a folder that can be put in PYTHONPATH; raise RuntimeError if a wheel has a part for another place."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    # Packages and scripts that a wheel keeps apart are not needed here; a purelib part would be.
    for apart in folder.glob("*.data/*lib"):
        raise RuntimeError(f"{apart}: expected no wheel with a part for another place")


def write_own_metadata(folder: Path) -> None:
    """Write the metadata of an installed worker into a folder for PYTHONPATH: the worker reads its own version there."""
    project = tomllib.loads((ROOT / "worker" / "pyproject.toml").read_text())["project"]
    place = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")


def main() -> None:
    """Fill `.gpu-wheels/` for the machine's Python and for this one."""
    for python in sorted({MACHINE, this_python()}):
        size = download(python)
        print(f"{folder_for(python)}: {len(CARRIED)} wheels, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
