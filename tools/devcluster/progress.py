# SPDX-License-Identifier: Apache-2.0
"""Tells a person what is going on, on stderr: stdout stays for results. Runs programs with their output in a log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import CommandFailed

QUIET_S = 2.0  # a step that is done sooner is not worth a line
TICK_S = 15.0

_started = time.monotonic()


def say(text: str) -> None:
    """Print a progress line to stderr, after the seconds since this module was imported."""
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def step(what: str, *, log: Path | None = None) -> Iterator[None]:
    """Print progress of the block to stderr: nothing for the first two seconds, then that it runs, every fifteen seconds, and its end.

    Each repeated line has the last line of `log`. A failure is printed at once.
    """
    begun, ended = time.monotonic(), threading.Event()
    ticker = threading.Thread(target=_tick, args=(what, log, ended), daemon=True)
    ticker.start()
    try:
        yield
    except BaseException:
        say(f"{what}: failed after {time.monotonic() - begun:.1f} s")
        raise
    finally:
        ended.set()
        ticker.join()
    if time.monotonic() - begun >= QUIET_S:
        say(f"{what}: done in {time.monotonic() - begun:.1f} s")


def _tick(what: str, log: Path | None, ended: threading.Event) -> None:
    begun = time.monotonic()
    if ended.wait(QUIET_S):
        return
    say(f"{what} …")
    while not ended.wait(TICK_S):
        last = _last_lines(log, 1)
        say(f"{what}: {time.monotonic() - begun:.0f} s{': ' + last[:100] if last else ''}")


def run_logged(
    argv: Sequence[str | Path],
    *,
    what: str,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    deadline_s: float = 3600.0,
) -> None:
    """Run a program as a step whose progress is announced; its output goes to `log`.

    CommandFailed means that it is missing, was not done in `deadline_s` seconds, or failed; then the log's last 20 lines are quoted. With
    `setpriv` the kernel kills it if the calling thread ends, so that no build goes on beside the next.
    """
    words = [str(a) for a in argv]
    if shutil.which(words[0], path=(env or os.environ).get("PATH")) is None:
        raise CommandFailed(f"{what}: there is no program {words[0]}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with step(what, log=log), log.open("wb") as output:
        try:
            done = subprocess.run(
                [*_with_us(), *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=cwd, timeout=deadline_s
            )
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"{what}: not done after {deadline_s:.0f} s; see {log}") from None
    if done.returncode != 0:
        raise CommandFailed(f"{what}: {words[0]} ended with code {done.returncode}; the end of {log}:\n{_last_lines(log, 20)}")


def _with_us() -> list[str]:
    # Else a build would go on beside the next one, in the same folder.
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def run_quiet(
    argv: Sequence[str | Path], *, stdin: str | None = None, env: Mapping[str, str] | None = None, deadline_s: float = 60.0
) -> str:
    """Run a short program and return its standard output.

    Raises:
        CommandFailed: it is missing, is not done in `deadline_s` seconds, or failed; then its error output is quoted.
    """
    words = [str(a) for a in argv]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, env=env, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"`{' '.join(words)}` was not done after {deadline_s:.0f} s") from None
    except FileNotFoundError:
        raise CommandFailed(f"there is no program {words[0]}") from None
    if done.returncode != 0:
        raise CommandFailed(f"`{' '.join(words)}` ended with code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _last_lines(log: Path | None, count: int) -> str:
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200 * count))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])
