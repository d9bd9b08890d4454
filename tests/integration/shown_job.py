"""A job for tests of the page: it trains until the test lets it go, and its acts are confirmed as a reader would."""

from __future__ import annotations

import re
from typing import Any

from integration.browser import Watched
from integration.cluster import Cluster
from playwright.sync_api import expect

Json = dict[str, Any]

PACE = 0.03
LONG = {"max_steps": 3000}


class Guarded(Cluster):
    """With a token, and others that it makes."""

    token = "operators-secret-of-the-page"

    def token_of(self, name: str, role: str) -> str:
        return str(self._answer("POST", "/tokens", {"name": name, "role": role})["token"])


def training(workers: int = 3, kind: type[Cluster] = Cluster, **more: Any) -> Cluster:
    """A job that goes on until the test lets it go."""
    return kind(workers=workers, options={**LONG, **more}, pace=PACE)


def worlds(cluster: Cluster) -> list[Json]:
    return list(cluster._answer("GET", f"/jobs/{cluster.job_name}/worlds")["worlds"])


def world_of(cluster: Cluster, reason: str) -> Json | None:
    """The last one of that reason whose pause is known."""
    found = [world for world in worlds(cluster) if world["reason"] == reason and world["phases"]]
    return found[-1] if found else None


def duration(seconds: float) -> str:
    """As the page writes one below ten seconds."""
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    milliseconds = 1000 * seconds
    return f"{float(f'{milliseconds:.2g}'):g} ms" if seconds < 0.01 else f"{round(milliseconds)} ms"


def confirm(seen: Watched, press: str, sentence: str | re.Pattern[str]) -> None:
    """The dialog says what will be done; do it."""
    expect(seen.dialog().locator("#act-sentence")).to_have_text(sentence)
    seen.dialog().get_by_role("button", name=press, exact=True).click()
    expect(seen.dialog()).to_have_count(0)


def preview(cluster: Cluster, act: str, **given: Any) -> re.Pattern[str]:
    """What the controller says of it, at whatever step: the dialog may have asked some steps earlier."""
    more = "".join(f"&{name}={value}" for name, value in given.items())
    sentence = str(cluster._answer("GET", f"/jobs/{cluster.job_name}/preview?act={act}{more}")["sentence"])
    return re.compile("^" + re.sub(r"step\\ \d+", r"step \\d+", re.escape(sentence)) + "$")
