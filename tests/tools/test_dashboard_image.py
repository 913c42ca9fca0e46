# SPDX-License-Identifier: Apache-2.0
"""The image of the dashboard: names of lines, values of axes, and each line in its panel."""

import pytest

from tools.dashboard import FLEET, ONE_MODEL, chosen
from tools.dashboard_image import COLOURS, HEIGHT, WIDTH, Line, draw, named, written


def test_a_line_is_named_by_the_labels_of_its_series() -> None:
    assert named("{{pod}} rank {{rank}}", {"pod": "digits-0-1", "rank": "1"}) == "digits-0-1 rank 1"
    assert named("being made", {"pod": "digits-0-1"}) == "being made"


@pytest.mark.parametrize(
    ("value", "unit", "says"), [(46_100_000, "bytes", "46.1 MB"), (1.5, "s", "1.5 s"), (0.25, "short", "0.25"), (1200, "short", "1.2 k")]
)
def test_a_value_of_an_axis_is_written_shortly(value: float, unit: str, says: str) -> None:
    assert written(value, unit) == says


def test_nothing_is_left_for_grafana_to_fill_in() -> None:
    asked = [chosen(expression, namespace="n", model="m") for panel in (*FLEET, *ONE_MODEL) for expression in panel.lines.values()]
    assert [expression for expression in asked if "$" in expression] == []


def test_each_panel_has_its_lines_and_a_row_has_a_height_of_its_own() -> None:
    lines = [Line("one", [(0.0, 1.0), (60.0, 3.0)]), Line("other", [(0.0, 2.0), (60.0, 2.0)])]
    image = draw([("All models", [(panel, lines if panel is FLEET[1] else []) for panel in FLEET[:4]])], 60.0)
    assert image.size == (3 * WIDTH, 40 + 2 * HEIGHT)
    colours = [tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in COLOURS[:2]]
    for number, seen in [(0, False), (1, True), (2, False)]:
        panel = image.crop((number * WIDTH, 40, (number + 1) * WIDTH, 40 + HEIGHT))
        pixels = {pixel for _, pixel in panel.getcolors(WIDTH * HEIGHT) or []}
        assert [colour in pixels for colour in colours] == [seen, seen]
