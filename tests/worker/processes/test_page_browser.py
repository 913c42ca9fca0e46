# SPDX-License-Identifier: Apache-2.0
"""The page as a person uses it: a real Chromium, the real worker with the digits model, and its server over fake ranks."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from support.worker.process import FAKE_PROGRAM, WorkerProcess
from tools import chromium
from tools.devcluster.errors import PrerequisiteMissing

# Chromium takes a second to start, the worker ten.
pytestmark = pytest.mark.slow

DEADLINE_MS = 30_000
# A record of the text and the previews that a person sees while an image is made. The page itself keeps none.
WATCH = """() => {
  window.seen = {steps: [], previews: 0};
  const text = document.getElementById("progress-text"), image = document.getElementById("image");
  new MutationObserver(() => window.seen.steps.push(text.textContent)).observe(text, {childList: true});
  new MutationObserver(() => { window.seen.previews += image.classList.contains("preview"); })
    .observe(image, {attributes: true, attributeFilter: ["src"]});
}"""
# The page's policy lets scripts reach only its worker, so the image is read from the screen.
PIXELS = """() => {
  const image = document.getElementById("image"), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return [canvas.width, canvas.height, [...context.getImageData(0, 0, canvas.width, canvas.height).data]];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium for the module, or skip its tests if it cannot be had.

    Playwright's event loop occupies the thread, so no test here can be async.
    """
    try:
        chromium.program()
    except PrerequisiteMissing as missing:
        pytest.skip(str(missing))
    with chromium.browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Provide a function that opens a worker's page in a new browser context.

    At the end the test fails for errors in the console that were not expected, and for requests to other servers.
    """
    problems: list[str] = []
    contexts = []

    def open_it(worker: WorkerProcess, *, expected_errors: str = "(?!)") -> Page:
        context = browser.new_context(viewport={"width": 1100, "height": 760}, accept_downloads=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(DEADLINE_MS)

        def on_request(request: Request) -> None:
            if not request.url.startswith((worker.url + "/", "data:", f"blob:{worker.url}/")):
                problems.append(f"a request to {request.url}")

        def on_console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning") and not re.search(expected_errors, message.text):
                problems.append(f"in the console: {message.text}")

        page.on("request", on_request)
        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(f"an error of the page: {error}"))
        page.goto(worker.url + "/")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def fake_worker() -> Iterator[WorkerProcess]:
    """Provide a server process with fake ranks for the module, once it can answer."""
    with WorkerProcess(program=FAKE_PROGRAM) as worker:
        worker.wait_ready()
        yield worker


def fill(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        page.locator(f"#{name}").fill(value)


def make(page: Page, **fields: str) -> None:
    """Wait until the page shows a ready worker, enter `fields`, and press Enter on the button that makes an image.

    From then on `window.seen` on the page records steps and previews.
    """
    expect(page.locator("#state-text")).to_have_text(re.compile("^ready"), timeout=DEADLINE_MS)
    fill(page, **fields)
    page.evaluate(WATCH)
    page.get_by_role("button", name="Make an image").press("Enter")


def finished(page: Page) -> dict[str, str]:
    """Wait until the page shows the finished image; return the page's description of it, by term."""
    expect(page.locator("#progress-text")).to_have_text("Finished.", timeout=DEADLINE_MS)
    expect(page.locator("#caption")).to_be_visible()
    return dict(zip(page.locator("#provenance dt").all_inner_texts(), page.locator("#provenance dd").all_inner_texts(), strict=True))


def image_of(page: Page) -> Image.Image:
    width, height, pixels = page.evaluate(PIXELS)
    return Image.frombytes("RGBA", (width, height), bytes(pixels)).convert("RGB")


def test_an_image_is_made_with_progress_and_shown_with_what_made_it(worker: WorkerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(worker)
    make(page, prompt="a red digit seven", num_inference_steps="12", guidance_scale="3", seed="7")
    made_by = finished(page)
    assert {name: made_by[name] for name in ("model", "adapters", "steps", "guidance scale", "seed", "width", "height")} == {
        "model": "digits",
        "adapters": "none",
        "steps": "12",
        "guidance scale": "3",
        "seed": "7",
        "width": "64",
        "height": "64",
    }
    assert float(made_by["seconds"]) > 0
    seen = page.evaluate("window.seen")
    steps = [int(found[1]) for text in seen["steps"] if (found := re.fullmatch(r"Step (\d+) of 12", text))]
    assert steps == sorted(steps) and len(steps) >= 6
    assert seen["previews"] >= 1
    expected = worker.image(prompt="a red digit seven", num_inference_steps=12, guidance_scale=3.0, seed=7)
    assert image_of(page).tobytes() == expected.tobytes()


def test_the_image_is_downloaded_in_the_format_that_was_asked_for(
    fake_worker: WorkerProcess, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    page = open_page(fake_worker)
    page.locator("#output_format").select_option("webp")
    make(page, prompt="a red digit seven", seed="9223372036854775000", width="96", height="64")
    assert finished(page)["seed"] == "9223372036854775000"
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == "digits-9223372036854775000.webp"
    download.value.save_as(tmp_path / "image.webp")
    with Image.open(tmp_path / "image.webp") as image:
        assert (image.format, image.size) == ("WEBP", (96, 64))
        assert json.loads(image.getexif()[0x010E])["model"] == "digits"


def test_an_image_by_an_adapter_is_the_adapters_and_says_so(worker: WorkerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(worker)
    expect(page.locator("#add_adapter option")).to_have_text(["none (base model)", "frame", "stripes"])
    page.get_by_label("Adapters", exact=True).select_option("stripes")
    make(page, prompt="a blue digit four", num_inference_steps="6", seed="3")
    assert re.match(r"stripes × 1 \(sha256:[0-9a-f]{12}…\)", finished(page)["adapters"])
    request = {"prompt": "a blue digit four", "num_inference_steps": 6, "seed": 3}
    assert image_of(page).tobytes() == worker.image(**request, model="stripes").tobytes() != worker.image(**request).tobytes()


def test_several_adapters_are_chosen_with_a_strength_each_and_taken_away_again(
    worker: WorkerProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(worker, expected_errors="400")
    for name in ("stripes", "frame"):
        page.get_by_label("Adapters", exact=True).select_option(name)
    expect(page.locator("#add_adapter option")).to_have_text(["add another one …"])
    expect(page.get_by_label("frame", exact=True)).to_have_attribute("placeholder", "1")
    page.get_by_label("stripes", exact=True).fill("0.5")
    make(page, prompt="a blue digit four", num_inference_steps="6", seed="3")
    assert re.match(r"stripes × 0\.5 \(.*\), frame × 1 \(", finished(page)["adapters"])
    request = {"prompt": "a blue digit four", "num_inference_steps": 6, "seed": 3}
    both = [{"name": "stripes", "scale": 0.5}, {"name": "frame"}]
    assert image_of(page).tobytes() == worker.image(**request, lora=both).tobytes()
    page.get_by_label("frame", exact=True).fill("9")
    page.get_by_role("button", name="Make an image").click()
    expect(page.get_by_role("alert")).to_contain_text("lora[1].scale")
    expect(page.get_by_label("frame", exact=True)).to_be_focused()
    for name in ("frame", "stripes"):
        page.get_by_role("button", name=f"Remove {name}").click()
    make(page, prompt="a blue digit four", num_inference_steps="6", seed="3")
    assert finished(page)["adapters"] == "none"
    assert image_of(page).tobytes() == worker.image(**request).tobytes()


def test_an_error_is_told_with_its_field_its_code_and_what_to_do(worker: WorkerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(worker, expected_errors="400")
    make(page, prompt="a red digit seven", width="60")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("size: expected width and height that are multiples of 8, found 60x64")
    expect(alert).to_contain_text("Code: InvalidRequest")
    expect(alert).to_contain_text("Change the field named above")
    expect(page.locator("#size")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#width")).to_be_focused()
    expect(page.locator("#figure")).to_be_hidden()
    make(page, width="64", height="64", num_inference_steps="1")
    finished(page)
    expect(alert).to_be_hidden()


def test_a_cancelled_image_leaves_the_ranks_free(worker: WorkerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(worker)
    make(page, prompt="a red digit seven", num_inference_steps="200")
    expect(page.locator("#progress-text")).to_have_text(re.compile(r"Step \d+ of 200"), timeout=DEADLINE_MS)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#progress-text")).to_have_text("Cancelled.")
    expect(page.locator("#news")).to_have_text("Cancelled.")
    expect(page.get_by_role("button", name="Make an image")).to_be_focused()
    expect(page.get_by_role("button", name="Make an image")).to_be_enabled()
    worker.wait_for(lambda: worker.state()["inFlight"] == 0, what="free", timeout_s=60)


def test_the_state_of_the_ranks_and_of_sleep_is_shown_live(fake_worker: WorkerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(fake_worker, expected_errors="503")
    expect(page.locator("#ranks li")).to_have_text(["rank 0: ready"])
    fake_worker.sleep()
    expect(page.locator("#state-text")).to_have_text(re.compile("^asleep: .*wake"), timeout=DEADLINE_MS)
    expect(page.locator("#ranks li")).to_have_text(["rank 0: asleep"])
    fill(page, prompt="a red digit seven")
    page.get_by_role("button", name="Make an image").click()
    expect(page.get_by_role("alert")).to_contain_text("Code: Asleep")
    fake_worker.wake()
    expect(page.locator("#state-text")).to_have_text("ready", timeout=DEADLINE_MS)


def test_a_model_that_a_request_wakes_says_so_and_what_is_waited_for(open_page: Callable[..., Page], tmp_path: Path) -> None:
    desired = tmp_path / "desired.json"
    desired.write_text(json.dumps({"sleep": {"policy": "OnIdle"}}))
    env = {"FAKE_WORKER": json.dumps({"wakeSeconds": 2.0})}
    with WorkerProcess(program=FAKE_PROGRAM, env=env, options=(f"--desired={desired}",)) as worker:
        worker.wait_ready()
        worker.sleep()
        page = open_page(worker)
        expect(page.locator("#state-text")).to_have_text(re.compile("^asleep: the next request wakes the model"), timeout=DEADLINE_MS)
        fill(page, prompt="a red digit seven")
        page.evaluate(WATCH)
        page.get_by_role("button", name="Make an image").press("Enter")
        expect(page.locator("#state-text")).to_have_text(re.compile("^waking up, 1 held until the model serves"), timeout=DEADLINE_MS)
        finished(page)
        assert any(re.match("Waiting: the model is (asleep|waking)", step) for step in page.evaluate("window.seen.steps"))
        page.close()  # it asks for the state every two seconds, and the worker ends next


def test_while_the_model_loads_the_page_says_how_far_it_is(open_page: Callable[..., Page]) -> None:
    with WorkerProcess(program=FAKE_PROGRAM, env={"FAKE_WORKER": json.dumps({"loadSeconds": 3})}) as worker:
        page = open_page(worker)
        expect(page.locator("#state-text")).to_have_text("the model is loading, 0 %")
        expect(page.locator("#state-text")).to_have_text("ready", timeout=DEADLINE_MS)
        page.close()  # it asks for the state every two seconds, and the worker ends next


def test_a_key_is_asked_for_and_kept_in_the_tab_only(open_page: Callable[..., Page], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the-key\n")
    with WorkerProcess(program=FAKE_PROGRAM, options=(f"--api-key-file={key}",)) as worker:
        worker.wait_ready()
        page = open_page(worker, expected_errors="401")
        page.get_by_label("API key").fill("another")
        page.get_by_role("button", name="Use the key").click()
        expect(page.locator("#state-text")).to_have_text(re.compile("expected the API key"))
        page.get_by_label("API key").fill("the-key")
        page.get_by_role("button", name="Use the key").click()
        make(page, prompt="a red digit seven")
        assert finished(page)["model"] == "digits"
        expect(page.locator("#key-section")).to_be_hidden()
        kept: Any = page.evaluate("[Object.values({...sessionStorage}), Object.keys({...localStorage}), document.cookie]")
        assert kept == [["the-key"], [], ""]
        page.close()


def test_a_worker_that_is_gone_is_told_as_such(open_page: Callable[..., Page]) -> None:
    with WorkerProcess(program=FAKE_PROGRAM) as worker:
        worker.wait_ready()
        page = open_page(worker, expected_errors="ERR_CONNECTION_REFUSED")
        expect(page.locator("#state-text")).to_have_text("ready")
        fill(page, prompt="a red digit seven")
    page.get_by_role("button", name="Make an image").click()
    expect(page.get_by_role("alert")).to_contain_text("Code: Unreachable")
    expect(page.locator("#state-text")).to_have_text("the worker does not answer")


def test_where_there_is_no_chromium_its_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chromium.checks, "SYSTEM_PATH", str(tmp_path))
    with pytest.raises(PrerequisiteMissing, match="apt-get install chromium"):
        chromium.program()


def test_the_page_fits_a_phone(fake_worker: WorkerProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(fake_worker)
    page.set_viewport_size({"width": 360, "height": 640})
    make(page, prompt="a red digit seven", width="512", height="512")
    finished(page)
    expect(page.locator("#progress-text")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
