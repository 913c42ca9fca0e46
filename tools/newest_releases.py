# SPDX-License-Identifier: Apache-2.0
"""`make canary`: run the tests that depend most on libraries with the newest releases of all of them, bounds and pins aside.

The environment is made in the cache, and again when one of them has a new release. To pin a release that passes here, raise the bound in
`pyproject.toml`, and change the line in `constraints.txt`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import click

from tools.devcluster.cache import cached, content_hash
from tools.devcluster.paths import log_dir
from tools.devcluster.progress import run_logged
from tools.requirements import CONSTRAINTS, DISTRIBUTIONS, ROOT, dependencies, resolve, uv, uv_environment, versions

# Import, load, families and adapters; the private names that we use of libraries first, as those fail soonest.
TESTS = (
    "tests/contract/test_private_names.py",
    "tests/worker/lora",
    "tests/worker/runner",
    "tests/worker/families/test_families.py",
    "tests/worker/processes/test_server_real_images.py",
    "tests/worker/processes/test_server_real_adapters.py",
    "tests/operator/reconcile",
)
# They hold the very bounds that are put aside here.
LEFT_OUT = "test_every_dependency_is_bounded_by_the_rule_and_what_is_installed_is_within"
INSTALL_TIMEOUT_S, TESTS_TIMEOUT_S = 1800, 5400
NAME = re.compile(r"[\w.-]+(\[[\w,-]+\])?")


def names() -> list[str]:
    """Return the names of all that both distributions and the tests need, with extras but without bounds."""
    needed = dependencies(*DISTRIBUTIONS)
    needed += tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    return [match[0] for each in needed if (match := NAME.match(each))]


def changes(pinned: Mapping[str, str], newest: Mapping[str, str]) -> list[str]:
    """Return a line for each distribution in `newest` whose version is not the pinned one, or that has no pin; sorted by name."""
    return [
        f"  {name:28} {pinned.get(name, 'none'):16} {version}" for name, version in sorted(newest.items()) if pinned.get(name) != version
    ]


def environment(lock: str) -> Path:
    """Return the path of Python in an environment with the releases of `lock` and our own sources; it is made once into the cache.

    Raises:
        CommandFailed: it cannot be made.
    """
    key = content_hash([lock, sys.version, str(ROOT)], relative_to=Path())
    return cached("newest", key, lambda folder: _make(folder, lock)) / "bin" / "python"


def _make(folder: Path, lock: str) -> None:
    log = log_dir() / "newest.log"
    run_logged(uv("venv", "--allow-existing", "--relocatable", f"--python={sys.executable}", str(folder)), what="an environment", log=log)
    (folder / "lock.txt").write_text(lock)
    ours = [word for name in DISTRIBUTIONS for word in ("-e", str(ROOT / name))]
    install = uv("pip", "install", f"--python={folder / 'bin' / 'python'}", "--no-deps")
    what = "the newest releases (some minutes)"
    run_logged([*install, "-r", str(folder / "lock.txt"), *ours], what=what, log=log, env=uv_environment(), deadline_s=INSTALL_TIMEOUT_S)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--resolve-only", is_flag=True, help="List what is newer than the pins, and end.")
@click.argument("tests", nargs=-1)
def main(resolve_only: bool, tests: tuple[str, ...]) -> None:
    """Run TESTS, or the usual ones, with the newest releases of all libraries; end with 1 if one fails."""
    try:
        lock = resolve(names())
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    newer = changes(versions(CONSTRAINTS.read_text()), versions(lock))
    click.echo("\n".join([f"Newer than the pins: {len(newer)}", *newer]))
    if resolve_only:
        return
    python = environment(lock)
    command = [str(python), "-m", "pytest", "-q", f"--deselect=tests/contract/test_private_names.py::{LEFT_OUT}", *(tests or TESTS)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    try:
        sys.exit(subprocess.run(command, cwd=ROOT, env=env, timeout=TESTS_TIMEOUT_S, check=False).returncode)
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"the tests did not end within {TESTS_TIMEOUT_S} s") from None


if __name__ == "__main__":
    main(prog_name="python -m tools.newest_releases")
