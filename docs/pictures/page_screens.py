"""Takes the two pictures of the page in these documents, of a real run with a kill in it: `make page-pictures`.

A controller and three workers run as in the tests of the page; one is killed, another one comes, the job is scaled.
Beside it stand jobs that wait for workers and one that was cancelled. Needs chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from integration.browser import CHROMIUM, Watched, browsed, one_browser  # noqa: E402
from integration.cluster import Cluster, warmed  # noqa: E402
from playwright.sync_api import expect  # noqa: E402

STEPS = 400
PACE = 0.08
BESIDE = {"tide": 4, "reef": 2, "kelp": 1}
"""Jobs that have no workers, and how many they want; the last one is cancelled."""
LOOK = {"viewport": {"width": 1440, "height": 1180}, "device_scale_factor": 1, "color_scheme": "light"}


class Shown(Cluster):
    def submit_beside(self) -> None:
        for name, wanted in BESIDE.items():
            self._answer("POST", "/jobs", {"job": name, "workers": {"wanted": wanted}, "launcher": "none"})
        self._answer("DELETE", f"/jobs/{name}")


def disturbed(cluster: Shown) -> None:
    """A loss, a joiner and a larger job, each with some steps after it."""
    cluster.wait_step(150)
    cluster.kill("w1")
    cluster.wait_world(2)
    cluster.wait_step(cluster.job()["step"] + 60)
    cluster.add()
    cluster.wait_world(3)
    cluster.wait_step(cluster.job()["step"] + 150)
    cluster.scale(4)
    cluster.add()
    cluster.wait_world(4)
    cluster.wait_step(cluster.job()["step"] + 150)


def main() -> int:
    if not CHROMIUM.exists():
        sys.stderr.write(f"pictures of the page need {CHROMIUM}; install it with your system's packages\n")
        return 2
    with tempfile.TemporaryDirectory() as folder, warmed(), one_browser():
        options = {
            "max_steps": 4 * STEPS,
            "shoal": {"checkpoint": {"path": f"{folder}/checkpoints", "every_steps": 50}},
        }
        with Shown(workers=3, options=options, pace=PACE) as cluster, browsed(cluster.url, look=LOOK) as seen:
            cluster.submit_beside()
            disturbed(cluster)
            take(seen, "page-jobs", "", ".job-line")
            seen.page.set_viewport_size({"width": 1920, "height": 1640})
            seen.open_job()
            seen.page.locator(".mark.bad").click()
            expect(seen.page.locator(".phases li").first).to_be_visible()
            take(seen, "page-job", None, ".chart canvas")
    return 0


def take(seen: Watched, name: str, fragment: str | None, awaited: str) -> None:
    """One picture, of the whole window, once `awaited` is there."""
    if fragment is not None:
        seen.open(fragment)
        seen.page.set_viewport_size({"width": 1440, "height": 640})
    expect(seen.page.locator(awaited).first).to_be_visible()
    seen.page.evaluate("scrollTo(0, 0)")
    seen.page.screenshot(path=HERE / f"{name}.png")
    sys.stdout.write(f"{HERE / name}.png\n")


if __name__ == "__main__":
    raise SystemExit(main())
