"""What the page says of its connection, and how it goes on: a controller that is away, answers in part, or whose clock
is set back.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import etcd_cluster
from integration.browser import CHROMIUM, REFUSED, browsed
from integration.controllers import Controllers
from integration.shown_job import LONG, PACE, confirm, training
from playwright.sync_api import Route, expect

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium (make packages)"),
    pytest.mark.usefixtures("browser"),
]

BANNERS = """() => {
    const banner = document.getElementById("banner");
    window.banners = [];
    new MutationObserver(() => window.banners.push(banner.hidden ? "" : banner.textContent.split(":")[0]))
        .observe(banner, { attributes: true, childList: true, characterData: true, subtree: true });
}"""
"""Keeps what the banner says, whenever that changes."""


def test_a_lost_connection_is_said_and_caught_up_with() -> None:
    with training(workers=2) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        cluster.wait_step(3)
        seen.open_job()
        history = seen.page.locator("#section-curves .note")
        expect(history).to_contain_text("recorded since")
        before = history.inner_text()
        cluster.kill_controller()
        banner = seen.page.locator("#banner")
        expect(banner).to_contain_text("No connection to the controller")
        cluster.start_controller()
        expect(banner).to_be_hidden()
        expect(history).not_to_have_text(before)
        expect(history).to_contain_text("begins anew")
        cluster.wait_phase("running")
        step = cluster.job()["step"] + 10
        cluster.wait_step(step)
        cluster.kill("w1")
        expect(seen.page.locator(".events [data-kind=lost]")).to_have_count(1)
        expect(seen.page.locator("[data-fact=world]")).to_have_text("1 of 2 workers")
        assert int(re.sub(r"\D", "", seen.page.locator("[data-fact=step]").inner_text().partition(" of ")[0])) >= step


def test_events_that_do_not_come_are_asked_for_and_one_steady_sentence_says_so() -> None:
    with training(workers=2) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        cluster.wait_step(3)
        refusals: list[str] = []

        def refuse(route: Route) -> None:
            """As a controller that does not lead, or one with too many readers."""
            if "text/event-stream" not in route.request.headers.get("accept", ""):
                return route.continue_()
            refusals.append(route.request.url)
            problem = {"status": 503, "code": "too_many_readers", "detail": "256 readers follow events already."}
            return route.fulfill(status=503, content_type="application/problem+json", json=problem)

        seen.page.route("**/v1/jobs/job/events*", refuse)
        seen.open_job()
        seen.page.evaluate(BANNERS)
        banner = seen.page.locator("#banner")
        expect(banner).to_contain_text("a part of this page is not up to date: 256 readers follow events already. It")
        cluster.kill("w1")
        expect(seen.page.locator(".events [data-kind=lost]")).to_have_count(1)
        assert len(refusals) >= 3
        seen.as_answered()
        expect(banner).to_be_hidden()
        sentences = {one for one in seen.page.evaluate("window.banners") if one.startswith("Since")}
        assert len(sentences) == 1, "one sentence, all the time that events did not come; others are of a busy machine"


def test_a_controller_that_follows_shows_the_page_of_the_one_that_leads_and_goes_on_with_the_next(
    tmp_path: Path,
) -> None:
    with etcd_cluster(tmp_path) as etcd, Controllers(etcd, workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        leader, follower = cluster.leader(), cluster.others()[0]
        with browsed(follower.url, allowed=REFUSED) as seen:
            seen.open_job()
            history = seen.page.locator("#section-curves .note")
            expect(history).to_contain_text("recorded since")
            before = history.inner_text()
            for press, name, phase in (("Pause", "Pause…", "paused"), ("Resume", "Resume…", "running")):
                seen.button(name).click()
                confirm(seen, press, re.compile(f"^{press.lower()}: "))
                expect(seen.page.locator("#phase")).to_have_text(phase)
            expect(seen.page.locator(".events [data-kind=paused]")).to_have_count(1)
            cluster.kill_one(leader)
            cluster.wait_leader(but=leader)
            cluster.kill("w1")
            expect(seen.page.locator(".events [data-kind=lost]")).to_have_count(1)
            expect(seen.page.locator("[data-fact=world]")).to_have_text("1 of 2 workers")
            expect(seen.page.locator("#banner")).to_be_hidden()
            expect(history).to_contain_text("recorded since")
            expect(history).not_to_have_text(before)


CONNECTION = """async (story) => {
    const { Connection } = await import("/page/connection.js");
    let now = 0;
    const connection = new Connection({ now: () => now, clock: () => now / 1000 });
    const ways = {}, said = [];
    const words = (state) => (state ? `${state.kind} since ${state.since}` : "fine");
    connection.listeners.add((state) => said.push(`${now / 1000} ${words(state)}`));
    for (const [seconds, name, outcome] of story) {
        for (; now < 1000 * seconds; now += 500) connection.update();
        ways[name] ??= { end: new AbortController() };
        const way = (ways[name].way ??= connection.way(ways[name].end.signal, name.startsWith("stream")));
        if (outcome === "ends") ways[name].end.abort();
        else if (outcome === 200) connection.answered(way);
        else connection.failed(way, { status: outcome, message: `${outcome}` });
    }
    clearTimeout(connection.timer);
    return said;
}"""
Story = list[tuple[float, str, int | str]]
STORIES: dict[str, tuple[Story, list[str]]] = {
    "a loss is said at once, and is over once all have an answer": (
        [(0, "poll", 200), (5, "poll", 0), (6, "stream", 0), (9, "poll", 0), (12, "poll", 200), (12.5, "stream", 200)],
        ["5 lost since 5", "12.5 fine"],
    ),
    "a loss may end in part": (
        [(0, "poll", 200), (5, "poll", 0), (6, "stream", 0), *((second, "poll", 200) for second in range(9, 30))],
        ["5 lost since 5", "11 partly since 6"],
    ),
    "a stream that breaks off and comes again is nothing": (
        [(0, "poll", 200), (5, "stream", 0), (6, "stream", 200), (20, "poll", 200)],
        [],
    ),
    "what is refused while the rest is answered is one thing": (
        [(0, "poll", 200), *((second, *one) for second in range(2, 40) for one in (("stream", 503), ("poll", 200)))],
        ["4 partly since 2"],
    ),
    "what comes and goes is one thing, too": (
        [(second, "poll", 502 if second % 8 < 4 else 200) for second in range(40)],
        ["2 partly since 0", "4 fine", "10 unsteady since 8"],
    ),
    "what stays wrong after it came and went is said": (
        [
            *((second, "poll", 502 if second < 4 else 200) for second in range(8)),
            *((second, *one) for second in range(8, 30) for one in (("stream", 503), ("poll", 200))),
        ],
        ["2 partly since 0", "4 fine", "10 unsteady since 8", "18 partly since 8"],
    ),
    "another view takes over what was wrong": (
        [(0, "poll", 200), (5, "poll", 0), (6, "poll", "ends"), (7, "poll of another view", 0), (9, "stream", 0)],
        ["5 lost since 5"],
    ),
}  # fmt: skip


UNANSWERED = """async () => {
    const { poll } = await import("/page/poll.js");
    const never = { ask: () => new Promise(() => {}), seconds: () => 1, onProblem: () => {} };
    poll({ ...never, signal: new AbortController().signal });
}"""
"""A question beside those of the view."""


SERIES = """async () => {
    const { Series } = await import("/page/series.js");
    const series = new Series("job"), found = [];
    for (let at = 0; at < 4; at += 1) {
        await series.refresh("hour");
        found.push([series.hour.times.filter((_, index) => series.hour.step[index] !== null), series.sentence]);
    }
    return found;
}"""


def test_the_page_goes_on_where_a_clock_was_set_back_and_says_what_it_waits_for() -> None:
    """Of the connection each story in a moment; of series what a controller would answer, one after the other."""
    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        seen.open()
        expect(seen.page.locator(".job-line")).to_be_visible()
        states = {name: seen.page.evaluate(CONNECTION, story) for name, (story, _) in STORIES.items()}
        assert states == {name: expected for name, (_, expected) in STORIES.items()}
        seen.page.route(re.compile(r"/v1/jobs/job/series"), Recorder().answer)
        first, same, back, later = seen.page.evaluate(SERIES)
        assert first == [[1000, 1001, 1002], "recorded"]
        assert same == [[1000, 1001, 1002], "nobody leads"]
        assert back == [[998, 999], "recorded"], "what was later than that is measured once more"
        assert later == [[998, 999, 1000], "recorded"]
        seen.as_answered()
        seen.page.clock.set_system_time("2020-02-02T02:02:02Z")
        seen.page.route(re.compile(r"/v1/(?!.*events)"), answer_on_another_date)
        cluster.wait_step(2)
        seen.open_job()
        expect(seen.page.locator("#axis-range")).to_contain_text("following")
        expect(seen.page.locator("#axis-range")).not_to_contain_text(re.compile("2015|2020"))
        seen.as_answered()
        seen.page.evaluate(UNANSWERED)
        seen.page.clock.fast_forward(5000)
        expect(seen.page.locator("#banner")).to_contain_text("The controller takes long to answer")


def answer_on_another_date(route: Route) -> None:
    """As a controller whose machine's clock was set since it leads."""
    answer = route.fetch()
    route.fulfill(response=answer, headers={**answer.headers, "date": "Thu, 01 Jan 2015 00:00:00 GMT"})


class Recorder:
    """A controller that records a point every second, follows for a moment, and whose clock is set back then."""

    def __init__(self) -> None:
        self._answers = [
            self._points(1002.5, [1000.0, 1001.0, 1002.0]),
            {**self._points(5000.0, []), "since": None, "sentence": "nobody leads"},
            self._points(999.5, []),
            self._points(999.5, [998.0, 999.0]),
            self._points(1000.5, [1000.0]),
        ]

    def _points(self, time: float, times: list[float]) -> Json:
        columns = ("step", "loss", "step_seconds", "samples_per_second", "goodput_ratio", "active", "wanted")
        return {
            "time": time, "run": "1", "since": 900.0, "sentence": "recorded", "every_seconds": 1, "times": times,
            **{name: [1] * len(times) for name in columns},
        }  # fmt: skip

    def answer(self, route: Route) -> None:
        route.fulfill(json=self._answers.pop(0))
