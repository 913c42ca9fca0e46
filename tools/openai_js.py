# SPDX-License-Identifier: Apache-2.0
"""OpenAI's SDK for JavaScript, for the tests of what its users see; installed by npm into the cache, once a version."""

import shutil
import subprocess
from pathlib import Path

from tools.devcluster.cache import cached
from tools.devcluster.errors import PrerequisiteMissing

# The last one for Node.js 20.
VERSION = "6.49.0"
INSTALL_TIMEOUT_S = 300


def modules() -> Path:
    """A folder with the SDK in its `node_modules`.

    Raises:
        PrerequisiteMissing: Node.js or npm is not there, or npm cannot install the SDK.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise PrerequisiteMissing(f"{program} is not in PATH: install Node.js 20 or later")
    return cached("openai-js", VERSION, _install)


def _install(folder: Path) -> None:
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"--prefix={folder}", f"openai@{VERSION}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if ended.returncode:
        raise PrerequisiteMissing(f"npm cannot install openai@{VERSION}: {ended.stderr.strip()[-500:]}")
