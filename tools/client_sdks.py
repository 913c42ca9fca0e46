# SPDX-License-Identifier: Apache-2.0
"""Clients' SDKs of other languages, for the tests of what their users see: installed or built into the cache, once a version."""

import shutil
import sys
from pathlib import Path

from tools.devcluster import programs
from tools.devcluster.cache import cached, content_hash
from tools.devcluster.errors import PrerequisiteMissing
from tools.devcluster.paths import log_dir
from tools.devcluster.progress import run_logged

# The last ones for Node.js 20.
PACKAGES = (
    "openai@6.49.0",
    "ai@6.0.325",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "@langchain/openai@1.5.8",
    "@langchain/core@1.4.0",
)
# LlamaIndex has an environment of its own, as it needs other versions than the pins of this project.
LLAMA_INDEX = ("llama-index-tools-openai-image-generation==0.7.0", "llama-index-core==0.14.25", "openai==3.57.0", "pillow==13.0.0")
INSTALL_TIMEOUT_S = 300


def javascript() -> Path:
    """Return a folder with OpenAI's SDK, Vercel's and LangChain in its `node_modules`; npm installs them once into the cache.

    Raises:
        PrerequisiteMissing: Node.js or npm is not there.
        CommandFailed: npm cannot install them.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise PrerequisiteMissing(f"{program} is not in PATH: install Node.js 20 or later")
    key = content_hash(PACKAGES, relative_to=Path())
    return cached("sdks-js", key, _install)


def go(sources: Path) -> Path:
    """Build the Go program in a folder, whose `go.mod` names the SDK, unless the cache has it; return the path of the program.

    Raises:
        PrerequisiteMissing: Go is not there.
        CommandFailed: it cannot be built.
    """
    return programs.own_program("sdk-go", sources, what="a program with OpenAI's SDK for Go (about 70 s, once)")


def llama_index() -> Path:
    """Return a folder of Python packages with LlamaIndex's tool for OpenAI's images; uv installs them once into the cache.

    Raises:
        CommandFailed: uv cannot install them.
    """
    return cached("sdk-llama-index", content_hash([*LLAMA_INDEX, sys.version], relative_to=Path()), _install_llama_index)


def _install_llama_index(folder: Path) -> None:
    uv = shutil.which("uv", path=Path(sys.executable).parent) or "uv"
    command = [uv, "pip", "install", "--compile-bytecode", f"--python={sys.executable}", f"--target={folder}", *LLAMA_INDEX]
    run_logged(command, what="LlamaIndex (about 10 s, once; 150 MB)", log=log_dir() / "llama-index.log", deadline_s=INSTALL_TIMEOUT_S)


def _install(folder: Path) -> None:
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"--prefix={folder}", *PACKAGES]
    run_logged(command, what="SDKs for JavaScript (about 5 s, once)", log=log_dir() / "npm.log", deadline_s=INSTALL_TIMEOUT_S)
