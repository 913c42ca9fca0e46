# SPDX-License-Identifier: Apache-2.0
"""Read lines of a benchmark's process, one at a time and never waiting without end."""

import select
import subprocess


def next_line(process: subprocess.Popen[str], *, within_s: float) -> str:
    """Wait for the next line that a process prints, and return it without the line's end.

    The process has to print exactly one line for each question: further lines that were read with it are not noticed.

    Raises:
        RuntimeError: the process ended, or printed nothing within `within_s`.
    """
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], within_s)[0]:
        raise RuntimeError(f"{_name(process)} said nothing within {within_s:g} s")
    if not (line := process.stdout.readline()):
        raise RuntimeError(f"{_name(process)} ended without an answer")
    return line.rstrip("\n")


def end(process: subprocess.Popen[str], *, within_s: float) -> None:
    """Close the process's input and wait for its end; kill it if it has not ended after `within_s`."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()


def _name(process: subprocess.Popen[str]) -> str:
    return " ".join(map(str, process.args[:3])) if isinstance(process.args, list) else str(process.args)
