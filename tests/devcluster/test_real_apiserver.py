# SPDX-License-Identifier: Apache-2.0
"""The stand-alone API server: it is real, starts alone, and leaves nothing behind."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.devcluster import apiserver, programs

pytestmark = pytest.mark.apiserver


def servers_in(folder: Path) -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and str(folder) in command_line(entry)]


def command_line(process: Path) -> str:
    """Return the command line of a process, whose folder in /proc is given; empty for one that has ended meanwhile."""
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kubectl(kubeconfig: Path, *words: str) -> str:
    command = [str(programs.kube() / "kubectl"), "--kubeconfig", str(kubeconfig), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_it_answers_beside_another_and_leaves_no_process_and_no_file() -> None:
    with apiserver.apiserver() as one, apiserver.apiserver() as other:
        assert one != other
        kubectl(one, "create", "namespace", "here")
        assert "namespace/here" in kubectl(one, "get", "namespaces", "--output", "name")
        assert "namespace/here" not in kubectl(other, "get", "namespaces", "--output", "name")
        folder = one.parent
    assert not folder.exists()
    assert servers_in(folder) == []


def test_it_ends_with_us_even_when_we_are_killed() -> None:
    script = "import time; from tools.devcluster.apiserver import apiserver\nwith apiserver() as k: print(k, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as holder:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip()).parent
        assert len(servers_in(folder)) == 2
        holder.kill()
    ends = time.monotonic() + 10
    while servers_in(folder):
        assert time.monotonic() < ends
    subprocess.run(["rm", "-r", str(folder)], check=True)
