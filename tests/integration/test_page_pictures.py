"""The small pictures of the list of jobs, drawn by the page's own module in a real browser."""

from __future__ import annotations

import re

import pytest
from integration.browser import CHROMIUM, browsed
from integration.shown_job import training

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium (make packages)")

CURVE = """async (values) => {
    const { curve } = await import("/page/sparkline.js");
    const drawn = curve({ loss: values, every_seconds: 60 }, "loss");
    return [drawn.getAttribute("aria-label"), drawn.querySelector(".line").getAttribute("d")];
}"""
WORLD = """async ([active, wanted]) => {
    const { world } = await import("/page/sparkline.js");
    const drawn = world({ active, wanted, every_seconds: 60 });
    const path = (part) => drawn.querySelector(part).getAttribute("d");
    return [drawn.getAttribute("aria-label"), path(".area"), path(".wanted")];
}"""


def test_small_pictures_have_the_shape_of_their_numbers_and_gaps_where_nothing_is_known() -> None:
    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        seen.open()
        label, line = seen.page.evaluate(CURVE, [None, 4.0, 2.0, 3.0, None, None, 2.5, 2.0, 2.0])
        assert label == "loss over the last 6 minutes: from 4 to 2"
        assert points(line) == [[(0, 3), (17.1, 25), (34.3, 14)], [(85.7, 19.5), (102.9, 25), (120, 25)]]
        label, area, wanted = seen.page.evaluate(WORLD, [[None, 4, 4, 3, 3, 4, 4, 4, 4], [None, *[4] * 8]])
        assert label == "workers over the last 8 minutes: 3 to 4 workers"
        assert re.findall(r"V([\d.]+)h", area) == [f"{height:.1f}" for height in (3, 3, 9, 9, 3, 3, 3, 3)]
        assert re.findall(r"V([\d.]+)", wanted) == ["3.0"] * 7


def points(path: str) -> list[list[tuple[float, float]]]:
    """Where the lines of an SVG path go, one list for each that is drawn without a gap."""
    lines = [re.findall(r"([\d.]+) ([\d.]+)", line) for line in path.split("M")[1:]]
    return [[(float(x), float(y)) for x, y in line] for line in lines]
