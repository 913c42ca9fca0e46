# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium of Debian's, for the tests of the worker's page. No browser is downloaded."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from tools.devcluster import checks, programs
from tools.devcluster.errors import PrerequisiteMissing

PROGRAM = "chromium"
START_TIMEOUT_MS = 60_000


def program() -> str:
    """Find Chromium in the system's folders and return its path; if it is absent and this is root on Debian, install the package first.

    Raises:
        PrerequisiteMissing: installing needs root and apt-get, or the package brought no such program.
    """
    found = shutil.which(PROGRAM, path=checks.SYSTEM_PATH)
    if found is None:
        if os.geteuid() != 0 or shutil.which("apt-get", path=checks.SYSTEM_PATH) is None:
            raise PrerequisiteMissing("Chromium is not in PATH: install it (on Debian: apt-get install chromium, as root)")
        programs.install_debian_packages((PROGRAM,))
        found = shutil.which(PROGRAM, path=checks.SYSTEM_PATH)
    if found is None:
        raise PrerequisiteMissing("Debian's package chromium was installed, but there is no such program")
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a headless Chromium, yield it, and close it at the end of the block; installed first if it is missing.

    Playwright keeps an event loop in this thread, so nothing else can run one meanwhile.
    """
    # Chromium's own sandbox does not start as root; /dev/shm is small in containers.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program(), args=arguments, timeout=START_TIMEOUT_MS)
        try:
            yield started
        finally:
            started.close()
