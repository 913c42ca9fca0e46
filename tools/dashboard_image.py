# SPDX-License-Identifier: Apache-2.0
"""Draws the dashboard's panels from the data of a Prometheus that has ended: the image of docs/operations.md.

python -m tools.dashboard_image DATA NAMESPACE MODEL docs/images/dashboard.png

DATA is the folder of its data. `pytest --basetemp=F tests/cluster/test_digits_on_a_cluster.py` leaves one, F/prometheus0/data. It has the
model `digits` in the namespace `diffusion-tests`. Expressions, units and names of lines are the dashboard's. The drawing is not Grafana's.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image, ImageDraw, ImageFont

from tools import dashboard
from tools.dashboard import Panel
from tools.devcluster import programs

READY_S, POINTS = 30.0, 150
WIDTH, HEIGHT, COLUMNS = 400, 250, 3
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 92
COLOURS = ("#1565c0", "#2e7d32", "#ef6c00", "#6a1b9a", "#c62828", "#00838f", "#5d4037", "#546e7a")
SYMBOLS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


class Line(msgspec.Struct, frozen=True):
    """A curve in a panel, with the name in its legend. Each value is a pair: seconds from the start of the data, and the number."""

    name: str
    values: list[tuple[float, float]]


class Source:
    """A running Prometheus that is asked for all data it has; `began` and `ended` are the times of the first and the last value."""

    def __init__(self, url: str) -> None:
        self._url = url
        head = self._ask("status/tsdb")["headStats"]
        self.began, self.ended = head["minTime"] / 1000, head["maxTime"] / 1000
        self.step = max(1.0, (self.ended - self.began) / POINTS)

    def lines(self, panel: Panel, *, namespace: str, model: str) -> list[Line]:
        """Return a line for each series that the panel's expressions find and that has a value; values that are no number are left out."""
        found = []
        for name, expression in panel.lines.items():
            query = dashboard.chosen(expression, namespace=namespace, model=model)
            about = {"query": query, "start": self.began, "end": self.ended, "step": self.step}
            for series in self._ask(f"query_range?{urllib.parse.urlencode(about)}")["result"]:
                values = [(at - self.began, float(value)) for at, value in series["values"]]
                found.append(Line(named(name, series["metric"]), [(at, value) for at, value in values if value == value]))
        return [line for line in found if line.values]

    def _ask(self, what: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/api/v1/{what}", timeout=30) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data


def named(name: str, labels: dict[str, str]) -> str:
    """Return the name of a line, each `{{label}}` in it replaced by the series' value of that label, or by nothing if it has none."""
    return re.sub(r"{{(\w+)}}", lambda place: labels.get(place[1], ""), name)


@contextmanager
def answering(data: Path) -> Iterator[Source]:
    """Start a Prometheus on a folder of data and yield it when it answers; end it with the block. It reads no new metrics.

    Raises:
        SystemExit: it does not answer within 30 s, for instance because the folder holds no data.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text("{}\n")
        words = [str(programs.prometheus()), f"--config.file={config}", f"--storage.tsdb.path={data}", f"--web.listen-address={address}"]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                yield _ready(f"http://{address}", process)
            finally:
                process.terminate()


def _ready(url: str, process: subprocess.Popen[bytes]) -> Source:
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return Source(url)
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"Prometheus did not answer at {url} within {READY_S:g} s; is the first argument the folder of its data?")


def draw(rows: Sequence[tuple[str, Sequence[tuple[Panel, list[Line]]]]], length_s: float) -> Image.Image:
    """Draw an image with the panels of all rows, each row below its title; the time axis of each panel is `length_s` seconds."""
    heights = [40 + HEIGHT * -(-len(panels) // COLUMNS) for _, panels in rows]
    image = Image.new("RGB", (WIDTH * COLUMNS, sum(heights)), "white")
    pen, y = ImageDraw.Draw(image), 0
    for (title, panels), height in zip(rows, heights, strict=True):
        pen.text((12, y + 10), title, fill="black", font=ImageFont.load_default(size=18))
        for number, (panel, lines) in enumerate(panels):
            _draw_panel(pen, (number % COLUMNS * WIDTH, y + 40 + number // COLUMNS * HEIGHT), panel, lines, length_s)
        y += height
    return image


def _draw_panel(pen: ImageDraw.ImageDraw, corner: tuple[int, int], panel: Panel, lines: list[Line], length_s: float) -> None:
    small = ImageFont.load_default(size=11)
    left, top = corner[0] + LEFT, corner[1] + TOP
    right, bottom = corner[0] + WIDTH - RIGHT, corner[1] + HEIGHT - BOTTOM
    pen.text((corner[0] + 12, corner[1] + 6), panel.title, fill="black", font=ImageFont.load_default(size=14))
    pen.line([(left, top), (left, bottom), (right, bottom)], fill="gray")
    highest = max((value for line in lines for _, value in line.values), default=0.0) or 1.0
    for share in (0.0, 0.5, 1.0):
        pen.text((corner[0] + 8, bottom - share * (bottom - top) - 7), written(share * highest, panel.unit), fill="dimgray", font=small)
    for share in (0.0, 0.5, 1.0):
        pen.text((left + share * (right - left - 24), bottom + 3), f"{share * length_s:.0f} s", fill="dimgray", font=small)
    across, row = 0.0, 0
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = [(left + at / length_s * (right - left), bottom - value / highest * (bottom - top)) for at, value in line.values]
        pen.line(points, fill=colour, width=2)
        wide = pen.textlength(line.name, font=small) + 24
        if across and across + wide > right - left:
            across, row = 0.0, row + 1
        pen.line([(left + across, bottom + 26 + 13 * row), (left + across + 10, bottom + 26 + 13 * row)], fill=colour, width=3)
        pen.text((left + across + 14, bottom + 19 + 13 * row), line.name, fill="black", font=small)
        across += wide


def written(value: float, unit: str) -> str:
    """Format a value for an axis with three significant digits and a prefix such as k or M: `46 MB`, `1.5 s`, `0.25`."""
    size, symbol = next(((size, symbol) for size, symbol in SYMBOLS if value >= size), (1.0, ""))
    return f"{value / size:.3g} {symbol}{ {'bytes': 'B', 's': 's'}.get(unit, '') }".rstrip()


def main(data: str, namespace: str, model: str, target: str) -> None:
    """Draw the dashboard's panels for one model from the Prometheus folder `data`, write the image to `target`, and print a summary."""
    with answering(Path(data)) as source:
        rows = [
            (title, [(panel, source.lines(panel, namespace=namespace, model=model)) for panel in panels])
            for title, panels in (("All models", dashboard.FLEET), (model, dashboard.ONE_MODEL))
        ]
        length_s = source.ended - source.began
    draw(rows, length_s).quantize(colors=64).save(target, optimize=True)
    print(f"{sum(bool(lines) for _, panels in rows for _, lines in panels)} panels with data over {length_s:.0f} s -> {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
