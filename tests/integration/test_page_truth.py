"""What the page must not say: zero for what is not known, gone for what may come back, done for what is undone since,
silent for who is on time, none for what it has not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.browser import CHROMIUM, REFUSED, Watched, browsed
from integration.cluster import Cluster
from integration.shown_job import LONG, PACE, confirm, duration, preview, training, world_of
from playwright.sync_api import Page, Route, expect
from shoal_controller.core.machine.event_kind import EventKind

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium (make packages)"),
    pytest.mark.usefixtures("browser"),
]


def altered(page: Page, url: str, change: Callable[[Json], Json]) -> None:
    """REST's answers at URLs that the pattern matches are changed on their way."""

    def on_answer(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=change(answer.json()))

    page.route(re.compile(url), on_answer)


def test_the_loss_of_an_evicted_worker_is_confirmed_and_the_job_resumed_while_it_stands_still(
    tmp_path: Path,
) -> None:
    """Whoever is evicted may come back: a job waits for it that nobody else has the blocks of."""
    options = {**LONG, "shoal": {"checkpoint": {"path": str(tmp_path)}, "mirrors": 0}}
    waits = {"stall_seconds": 600.0}
    with Cluster(workers=3, options=options, spec=waits, pace=PACE) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(3)
        cluster._answer("POST", "/jobs/job/checkpoints")
        cluster.until("a checkpoint", lambda job: job["last_checkpoint_step"] is not None)
        cluster.stop("w2")
        cluster.wait_phase("stalled")
        seen.open_job()
        expect(seen.page.locator("#section-workers .filters")).to_contain_text(
            "2 workers here, 1 evicted, which may come back, 0 gone"
        )
        expect(seen.page.locator("tr[data-worker=w2] .state")).to_have_text("lost")
        expect(seen.button("Drain w2")).to_be_hidden()
        seen.button("Pause…").click()
        confirm(seen, "Pause", preview(cluster, "pause"))
        expect(seen.button("Pause…")).to_be_hidden()
        assert cluster.job()["phase"] == "stalled"
        seen.button("Resume…").click()
        confirm(seen, "Resume", preview(cluster, "resume"))
        seen.button("Confirm that w2 is lost").click()
        confirm(seen, "It is dead", re.compile("blocks have no other copy"))
        cluster.wait_world(2)
        expect(seen.page.locator("tr[data-worker=w2]")).to_have_count(0)


def in_a_cell(found: Json) -> Json:
    """REST's workers, as of a job whose cells have two processes."""
    return {**found, "workers": [{**one, "cell": 0, "coordinate": {"tensor": 1}} for one in found["workers"]]}


def test_workers_are_shown_where_nobody_says_whether_a_lost_one_may_come_back() -> None:
    with training(workers=2) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        cluster.wait_step(3)
        seen.page.route("**/preview?act=lost*", lambda route: route.fulfill(status=503, json={"detail": "no leader"}))
        altered(seen.page, r"/jobs/job/workers$", in_a_cell)
        cluster.kill("w1")
        cluster.wait_world(1)
        with seen.page.expect_response("**/preview?act=lost*"):
            seen.open_job()
        expect(seen.page.locator("#section-workers .filters")).to_contain_text("1 worker here, 1 gone")
        expect(seen.page.locator("tr[data-worker=w0] .state")).to_have_text("active")
        place = seen.page.locator("tr[data-worker=w0] .seat")
        expect(place).to_have_text("0 · tensor 1")
        expect(place).to_have_css("display", "table-cell")


def test_a_job_whose_last_step_is_not_known_is_shown_as_open() -> None:
    def opened(row: Json) -> Json:
        return {**row, "job": {**row["job"], "max_steps": None}, "seconds_left": None}

    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(3)
        altered(seen.page, r"/v1/overview", lambda found: {**found, "jobs": [opened(one) for one in found["jobs"]]})
        altered(seen.page, r"/jobs/job/summary$", opened)
        seen.open()
        expect(seen.page.locator(".cell.step .big")).to_have_text(re.compile(r"^\d+/open$"))
        expect(seen.page.get_by_label("Steps done")).to_be_hidden()
        seen.open_job()
        expect(seen.page.locator(".tile.step")).to_contain_text("until its scripts end")


def test_a_cost_that_is_not_reported_is_not_zero_and_the_open_timeline_goes_on() -> None:
    with training() as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(5)
        held = True

        def unreported(world: Json) -> Json:
            nothing = {"pause": 0, "fill": 0, "checkpoint": 0}
            known: Json = {"phases": {}, "pause_seconds": 0.0, "bytes": nothing, "ended": None}
            if "timeline" in world:
                known["timeline"] = [one for one in world["timeline"] if one["kind"] not in ("trains", "resized")]
            return {**world, **known}

        def worlds(answer: Json) -> Json:
            return {**answer, "worlds": [unreported(one) for one in answer["worlds"]]} if held else answer

        def summary(row: Json) -> Json:
            change = row["last_resize"]
            return {**row, "last_resize": {**change, "pause_seconds": 0.0}} if held and change else row

        altered(seen.page, r"/jobs/job/worlds$", worlds)
        altered(seen.page, r"/jobs/job/worlds/\d+$", lambda world: unreported(world) if held else world)
        altered(seen.page, r"/jobs/job/summary$", summary)
        seen.open_job()
        cluster.kill("w1")
        seen.page.locator(".mark.bad").click()
        panel = seen.page.get_by_role("region", name="The chosen change")
        expect(panel.locator("[data-role=pause]")).to_have_text("not known")
        expect(panel).to_contain_text("How long its phases took is not known")
        expect(seen.page.locator(".tile.change")).to_contain_text("pause not known, no step lost")
        line = seen.page.locator(".changes tbody tr", has=seen.page.get_by_text("loss", exact=True))
        expect(line.locator("td").nth(2)).to_have_text("not known")
        expect(line.locator("td").nth(3)).to_have_text("not known")
        cluster.until("its cost", lambda _: world_of(cluster, "kill"))
        world = world_of(cluster, "kill")
        assert world is not None
        held = False
        expect(panel.locator("[data-role=pause]")).to_have_text(duration(world["pause_seconds"]))
        expect(panel.locator(".entries li")).to_have_count(
            len(cluster._answer("GET", f"/jobs/job/worlds/{world['generation']}")["timeline"])
        )
        expect(seen.page.locator(".tile.change")).to_contain_text(f"{duration(world['pause_seconds'])} pause")


def test_what_was_done_or_refused_is_said_no_longer_than_it_holds() -> None:
    with training(workers=2) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        cluster.wait_step(3)
        seen.open_job()
        seen.button("Pause…").click()
        confirm(seen, "Pause", preview(cluster, "pause"))
        expect(seen.page.locator(".done")).to_have_text("The job is being paused.")
        cluster.resume()
        expect(seen.page.locator(".done")).to_be_empty()
        seen.button("Scale…").click()
        number, press = seen.dialog().get_by_label("Workers wanted"), seen.dialog().get_by_role("button", name="Scale")
        number.fill("9999999")
        expect(seen.dialog().get_by_role("alert")).not_to_be_empty()
        number.fill("3")
        expect(press).to_be_enabled()
        expect(seen.dialog().locator(".problem")).to_be_empty()
        seen.page.route("**/v1/jobs/job/scale", lambda route: route.abort("connectionrefused"))
        press.click()
        expect(seen.dialog().get_by_role("alert")).to_contain_text("The controller does not answer")
        seen.as_answered()
        confirm(seen, "Scale", preview(cluster, "scale", workers=3))
        cluster.until("3 wanted", lambda job: job["workers"]["wanted"] == 3)


def test_lists_say_what_they_leave_out_workers_go_by_their_heartbeats_and_times_have_utc() -> None:
    with training(workers=2) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(3)
        saved = {"generation": 1, "path": "/somewhere", "bytes": 5, "saved": None, "verified": True}
        altered(
            seen.page, r"/jobs/job/checkpoints$",
            lambda answer: {**answer, "checkpoints": [{**saved, "step": step} for step in range(25)]},
        )  # fmt: skip
        altered(
            seen.page, r"/jobs/job/holdings$",
            lambda held: {**held, "members": [{**held["members"][0], "worker": f"w{at}"} for at in range(201)]},
        )  # fmt: skip
        altered(seen.page, r"/jobs/job/spec$", lambda spec: {**spec, "heartbeat_seconds": 10.0})
        altered(
            seen.page, r"/jobs/job/workers$",
            lambda answer: {
                **answer,
                "workers": [
                    {**one, "heartbeat_age_seconds": 7.0 if one["worker"] == "w0" else 27.0}
                    for one in answer["workers"]
                ],
            },
        )  # fmt: skip
        seen.open_job()
        expect(seen.page.locator("tr[data-worker=w0] .heartbeat")).to_have_text("fresh")
        expect(seen.page.locator("tr[data-worker=w1] .heartbeat.warn")).to_have_text("27 s ago")
        rows = seen.page.locator("#section-checkpoints tbody tr")
        expect(rows).to_have_count(20)
        seen.button("Show all 25 checkpoints").click()
        expect(rows).to_have_count(25)
        expect(seen.page.locator("#section-holdings")).to_contain_text("200 of 201 workers are drawn")
        moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        expect(seen.page.locator("#axis-range")).to_have_attribute("title", re.compile(f"^{moment} – {moment}$"))
        expect(seen.page.locator(".mark").first).to_have_attribute("title", re.compile(rf"\({moment}\)$"))


COARSE = """async ([hour, day, begin]) => {
    const { Series } = await import("/page/series.js");
    const series = new Series("job");
    series.hour.times = hour;
    series.day.times = day;
    return series.from(begin).span;
}"""
ENDED = """async () => {
    const { curve } = await import("/page/sparkline.js");
    const loss = Array.from({ length: 60 }, (_, minute) => (minute >= 10 && minute < 20 ? 1 : null));
    return curve({ loss, every_seconds: 60 }, "loss").getAttribute("aria-label");
}"""


def test_curves_are_as_fine_as_what_is_known_and_events_go_back_to_the_first() -> None:
    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        long = past(cluster)
        altered(seen.page, r"/v1/events\?job=long$", lambda answer: {**answer, "events": []})  # the feed has forgotten
        seen.open("#/jobs/long")
        lines = seen.page.locator(".events li")
        expect(lines.locator(".message").first).to_have_text(long[-1]["message"])
        kind = seen.page.get_by_label("Kind", exact=True)
        assert sorted(kind.locator("option").evaluate_all("all => all.map((one) => one.value).filter(Boolean)")) == (
            sorted(one.value for one in EventKind)
        )
        kind.select_option("scaled")
        expect(lines.locator(".message")).to_have_text([one["message"] for one in long if one["kind"] == "scaled"])
        kind.select_option("corrupt_block")
        expect(seen.page.get_by_text("No event is like that.")).to_be_visible()
        kind.select_option("")
        widened(seen, len(long))
        assert seen.page.evaluate(COARSE, [[1000], [990], 400]) == "hour", "young: nothing coarser goes back further"
        assert seen.page.evaluate(COARSE, [[1000], [400], 500]) == "day"
        assert seen.page.evaluate(COARSE, [[1000], [400], 1001]) == "hour"
        assert seen.page.evaluate(ENDED) == "loss over 10 minutes until 40 minutes ago: from 1 to 1"
        cluster._answer("DELETE", "/jobs/long")


def past(cluster: Cluster) -> list[Json]:
    """The events of a job whose first ones are long ago."""
    cluster._answer("POST", "/jobs", {"job": "long", "launcher": "none", "workers": {"wanted": 1}})
    cluster._answer("POST", "/jobs/long/scale", {"workers": 2})
    for _ in range(155):
        cluster._answer("POST", "/jobs/long/pause")
        cluster._answer("POST", "/jobs/long/resume")
    found = list(cluster._answer("GET", "/jobs/long/events?after=0")["events"])
    assert len(found) > 605, "so that the search for the newest ends after the first ones"
    return found


def widened(seen: Watched, count: int) -> None:
    """Press the button for older ones until there are none."""
    lines, more = seen.page.locator(".events li"), seen.button("Show older ones")
    for shown in range(60, count, 240):
        expect(lines).to_have_count(shown)
        more.click()
    expect(lines).to_have_count(count)
    expect(more).to_be_hidden()


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
        assert label == "loss over the last 8 minutes: from 4 to 2"
        assert points(line) == [[(0, 3), (17.1, 25), (34.3, 14)], [(85.7, 19.5), (102.9, 25), (120, 25)]]
        label, area, wanted = seen.page.evaluate(WORLD, [[None, 4, 4, 3, 3, 4, 4, 4, 4], [None, *[4] * 8]])
        assert label == "workers over the last 8 minutes: 3 to 4 workers"
        assert re.findall(r"V([\d.]+)h", area) == [f"{height:.1f}" for height in (3, 3, 9, 9, 3, 3, 3, 3)]
        assert re.findall(r"V([\d.]+)", wanted) == ["3.0"] * 7


def points(path: str) -> list[list[tuple[float, float]]]:
    """Where the lines of an SVG path go, one list for each that is drawn without a gap."""
    lines = [re.findall(r"([\d.]+) ([\d.]+)", line) for line in path.split("M")[1:]]
    return [[(float(x), float(y)) for x, y in line] for line in lines]


SOONER = """(() => {
    const every = window.setInterval;
    window.setInterval = (act, milliseconds) => every(act, milliseconds === 60000 ? 300 : milliseconds);
})()"""
"""What is looked at once a minute is looked at at once."""


def test_a_controller_that_was_replaced_between_two_requests_is_noticed() -> None:
    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        seen.page.add_init_script(SOONER)
        seen.open()
        expect(seen.page.locator(".job-line")).to_be_visible()
        altered(seen.page, r"/v1/about$", lambda about: {**about, "page": "another"})
        seen.page.wait_for_event("load")
        expect(seen.page.locator(".job-line")).to_be_visible()
