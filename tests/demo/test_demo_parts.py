# SPDX-License-Identifier: Apache-2.0
"""The parts of the demo that judge its results: the kernel's account of memory, conditions, the table, the images."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tools.demo.errors import DemoFailed, TookTooLong
from tools.demo.images import DemoImage, contact_sheet, mean_difference, same_bits
from tools.demo.installation import ROOT
from tools.demo.kubectl import Kubectl, Wanted, wait_for
from tools.demo.story import Story
from tools.demo.weights_memory import RankMemory, check_given_back, parse_range, resident_bytes
from tools.devcluster.cache import locked

SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                4096 kB
VmFlags: rd wr mr mw me ac hg
7f0000400000-7f0000600000 rw-p 00000000 00:00 0
Size:               2048 kB
Rss:                 100 kB
7f0000800000-7f0000900000 r--p 00000000 fe:00 1234   /usr/lib/libexample.so: with a colon
Size:               1024 kB
Rss:                 512 kB
"""


def test_a_second_demo_is_refused_before_it_changes_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with locked("demo"):
        second = subprocess.run([sys.executable, "-m", "tools.demo"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "another `make demo` runs on this machine, and both would change the same model" in second.stdout


@pytest.mark.parametrize(
    ("ranges", "kilobytes"),
    [
        (["7f0000000000-7f0000400000"], 4096),
        (["7f0000400000-7f0000500000"], 100),
        (["7f0000000000-7f0000600000"], 4196),
        (["7f0000600000-7f0000800000"], 0),
    ],
)
def test_only_mappings_that_hold_weights_are_counted(ranges: list[str], kilobytes: int) -> None:
    assert resident_bytes(SMAPS, [parse_range(text) for text in ranges]) == kilobytes * 1024


def memory(resident: int, reported: int | None = None) -> list[RankMemory]:
    return [RankMemory(rank=0, pid=7, weights=1000, resident=resident, reported=resident if reported is None else reported)]


def test_a_sleep_that_gives_the_memory_back_is_believed() -> None:
    assert "98.0% less" in check_given_back(memory(1000), memory(20))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (memory(1000), memory(21), "at most 2%"),
        (memory(999), memory(0), "less than the weights have"),
        (memory(1000), memory(10, reported=0), "the kernel says 10"),
    ],
)
def test_a_sleep_that_only_says_so_is_not(before: list[RankMemory], after: list[RankMemory], message: str) -> None:
    with pytest.raises(DemoFailed, match=message):
        check_given_back(before, after)


def resource(status: str, reason: str, *, observed: int = 3) -> dict[str, Any]:
    condition = {"type": "Ready", "status": status, "reason": reason, "message": "", "observedGeneration": observed}
    return {"metadata": {"generation": 3}, "status": {"conditions": [condition]}}


def test_a_condition_about_an_older_spec_does_not_count() -> None:
    wanted = Wanted("Ready", "True", ["Serving"])
    assert wanted.holds(resource("True", "Serving"))
    assert not wanted.holds(resource("True", "Serving", observed=2))
    assert not wanted.holds(resource("True", "AsleepWakeable"))
    assert not wanted.holds({"metadata": {"generation": 1}})


class SeenKubectl(Kubectl):
    """A kubectl whose `get` returns the objects of a list one after another, and the last one again and again."""

    seen: list[dict[str, Any]]

    def get(self, *_: str) -> dict[str, Any]:
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]


def seen_kubectl(*seen: dict[str, Any]) -> Kubectl:
    kubectl = SeenKubectl((), "default")
    object.__setattr__(kubectl, "seen", list(seen))
    return kubectl


def test_a_wait_tells_every_change_once_and_gives_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.demo.kubectl.POLL_S", 0)
    told: list[str] = []
    kubectl = seen_kubectl({"metadata": {"generation": 3}}, *[resource("False", "Starting")] * 2, resource("True", "Serving"))
    assert wait_for(kubectl, "dd/digits", Wanted("Ready", "True"), deadline_s=5, tell=told.append) == resource("True", "Serving")
    assert told == ["dd/digits Ready: not reported yet", "dd/digits Ready=False Starting", "dd/digits Ready=True Serving"]


def test_a_wait_that_ends_says_what_was_there_instead() -> None:
    with pytest.raises(TookTooLong, match=r"dd/digits is not Ready=True within 0 s; it is Ready=False ModelError"):
        wait_for(seen_kubectl(resource("False", "ModelError")), "dd/digits", Wanted("Ready", "True"), deadline_s=0)


def test_a_wait_does_not_outlast_a_hopeless_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.demo.kubectl.PATIENCE_S", 0)
    with pytest.raises(TookTooLong, match="it is Ready=False ImagePullError"):
        wait_for(seen_kubectl(resource("False", "ImagePullError")), "dd/digits", Wanted("Ready", "True"), deadline_s=3600)


def test_the_table_has_every_step_with_its_time_and_the_failed_one() -> None:
    times = iter([0.0, 0.0, 2.5, 3.0, 4.0, 65.0])
    story = Story(out=io.StringIO(), clock=lambda: next(times))
    with story.step("First") as step:
        step.result = "well"
    with pytest.raises(DemoFailed), story.step("Second"):
        raise DemoFailed("no")
    table = [line.split() for line in story.table().splitlines()]
    assert table[2] == ["First", "2.5", "well"]
    assert table[3] == ["Second", "1.0", "FAILED"]
    assert table[-1] == ["in", "all", "65.0"]


def image(colour: str) -> DemoImage:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return DemoImage(buffer.getvalue())


def test_images_are_compared_by_bits_and_by_eye() -> None:
    assert same_bits(image("red"), image("red")) and not same_bits(image("red"), image("#fe0000"))
    assert mean_difference(image("black"), image("white")) == 255


def test_the_contact_sheet_shows_every_image() -> None:
    sheet = contact_sheet([("base", [image("red")] * 2), ("adapter", [image("blue")] * 2)], ["one", "two"])
    colours = {colour for _, colour in sheet.getcolors(maxcolors=10_000) or []}
    assert {(255, 0, 0), (0, 0, 255)} <= colours
