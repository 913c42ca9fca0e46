# SPDX-License-Identifier: Apache-2.0
"""A machine as `make gpu` expects it: a Python with torch, transformers, peft, pytest and what these need, and the carried packages apart.

Real: the interpreter, which finds only what is linked into its own environment. Not real: the carried packages, which are links to the
installed ones, of the same versions as the wheels.
"""

import importlib.metadata
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.gpu.wheels import CARRIED, THERE


def needed_by(names: set[str], *, but_for: set[str] = frozenset(), python: str | None = None) -> set[str]:  # type: ignore[assignment]
    """Return the names of distributions and of all that they need in turn, by the metadata of those installed here.

    Distributions in `but_for` are left out, and so are their needs. `python` is another version, such as 3.12.
    """
    environment = {"extra": ""} | ({"python_version": python, "python_full_version": f"{python}.3"} if python else {})
    found: set[str] = set()
    left: set[str] = {canonicalize_name(name) for name in names}
    while left:
        name = left.pop()
        if name in found or name in but_for:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            needs = Requirement(line)
            if needs.marker is None or needs.marker.evaluate(environment):
                left.add(canonicalize_name(needs.name))
    return found


def make_machine(folder: Path) -> tuple[Path, Path]:
    """Make a virtual environment and a folder of the carried packages in `folder`; return the environment's Python and that folder.

    The environment has links to the packages in THERE and all that these need, less the carried ones.
    """
    venv.create(folder / "machine", with_pip=False, symlinks=True)
    site = next((folder / "machine" / "lib").glob("python3.*/site-packages"))
    _link(needed_by(set(THERE)) - set(CARRIED), site)
    carried = folder / "carried"
    carried.mkdir()
    _link(set(CARRIED), carried)
    return folder / "machine" / "bin" / "python", carried


def _link(names: set[str], into: Path) -> None:
    for name in names:
        distribution = importlib.metadata.distribution(name)
        tops = {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            place = into / top
            if not place.exists():
                place.symlink_to(Path(str(distribution.locate_file(top))))
