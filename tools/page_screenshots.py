# SPDX-License-Identifier: Apache-2.0
"""The screenshots of docs/page.md, of a worker that serves the digits model with the adapter `stripes`.

diffusion-worker serve --model examples/digits/model --served-name digits --lora stripes=examples/digits/loras/stripes
python -m tools.page_screenshots http://127.0.0.1:8000 docs/images
"""

import re
import sys
from pathlib import Path

from playwright.sync_api import Page, expect

from tools import chromium

TIMEOUT_MS = 60_000


def take(page: Page, folder: Path) -> list[Path]:
    """Make an image of 200 steps with an adapter on the page, then ask for a width that the worker refuses.

    Return the paths of three screenshots (PNG) in `folder`: the preview with its progress, the finished image, and the error.
    """
    expect(page.locator("#state-text")).to_have_text(re.compile("^ready"), timeout=TIMEOUT_MS)
    page.get_by_label("Adapters", exact=True).select_option("stripes")
    page.locator("#prompt").fill("a yellow digit three")
    page.locator("#num_inference_steps").fill("200")
    page.locator("#seed").fill("4")
    page.get_by_role("button", name="Make an image").click()
    page.wait_for_selector("#image.preview", timeout=TIMEOUT_MS)
    expect(page.locator("#progress-text")).to_have_text(re.compile(r"Step 1[0-9][0-9] of 200"), timeout=TIMEOUT_MS)
    progress = _shot(page, folder / "page-progress.png")
    expect(page.locator("#progress-text")).to_have_text("Finished.", timeout=TIMEOUT_MS)
    image = _shot(page, folder / "page-image.png")
    page.locator("#width").fill("60")
    page.get_by_role("button", name="Make an image").click()
    page.wait_for_selector("#error:not([hidden])", timeout=TIMEOUT_MS)
    return [progress, image, _shot(page, folder / "page-error.png")]


def _shot(page: Page, path: Path) -> Path:
    page.screenshot(path=path, animations="disabled")
    return path


def main(url: str, folder: str = "docs/images") -> None:
    """Open the page at `url`, save the three screenshots in `folder`, and print each path with its size in bytes."""
    with chromium.browser() as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 880}, color_scheme="light")
        page.goto(url)
        for path in take(page, Path(folder)):
            print(path, path.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
