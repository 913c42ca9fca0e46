# SPDX-License-Identifier: Apache-2.0
"""Clients' SDKs of other languages, for the tests of what their users see: installed or built into the cache, once a version."""

import shutil
from pathlib import Path

from tools.devcluster import programs
from tools.devcluster.cache import cached, content_hash
from tools.devcluster.errors import PrerequisiteMissing
from tools.devcluster.paths import log_dir
from tools.devcluster.progress import run_logged

# The last ones for Node.js 20.
PACKAGES = ("openai@6.49.0", "ai@6.0.325", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92")
INSTALL_TIMEOUT_S = 300


def javascript() -> Path:
    """Return a folder with OpenAI's SDK and Vercel's in its `node_modules`; npm installs them once into the cache.

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


def _install(folder: Path) -> None:
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"--prefix={folder}", *PACKAGES]
    run_logged(command, what="SDKs for JavaScript (about 5 s, once)", log=log_dir() / "npm.log", deadline_s=INSTALL_TIMEOUT_S)
