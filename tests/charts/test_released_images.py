"""Images of others in the chart and in Compose: each is on a list with the day of its release, and of the list's year.

The list is kept by hand: no registry is asked here.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import yaml
from charts.rendering import ALL_VALUES, ROOT, Json, rendered

LIST: Json = yaml.safe_load((Path(__file__).parent / "released_images.yaml").read_text())
RELEASED: dict[str, datetime.date] = LIST["images"]
OWN = ("shoal-controller", "shoal-worker")
PODS = ("StatefulSet", "Deployment", "Job", "Pod")


def of_the_chart() -> Iterator[str]:
    """All images of its pods, with the default values."""
    for item in rendered(ALL_VALUES[0]):
        if item["kind"] in PODS:
            body = item["spec"] if item["kind"] == "Pod" else item["spec"]["template"]["spec"]
            yield from (one["image"] for one in [*body["containers"], *body.get("initContainers", [])])


def of_compose() -> Iterator[str]:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    yield from (service["image"] for service in services.values())


def test_every_image_of_others_is_on_the_list_and_nothing_else_is() -> None:
    chart, compose = set(of_the_chart()), set(of_compose())
    others = {image for image in chart | compose if image.partition(":")[0].rpartition("/")[2] not in OWN}
    assert others == set(RELEASED)
    assert len(chart & compose & others) == 1, "etcd is the same in both"


def test_every_image_on_the_list_is_of_the_lists_year() -> None:
    assert {image: day for image, day in RELEASED.items() if day.year != LIST["year"]} == {}
