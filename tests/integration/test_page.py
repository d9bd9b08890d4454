"""The page in a real browser, on a real controller with real workers: what it shows is what REST says, what is pressed
is done, and nothing that a job says becomes more than text.
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from integration.browser import CHROMIUM, PHONE, REFUSED, Watched, browsed
from integration.cluster import Cluster, until
from integration.shown_job import LONG, PACE, Guarded, confirm, duration, preview, training, world_of
from matrices import shortened
from playwright.sync_api import Route, expect
from tiers import promise

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium (make packages)"),
    pytest.mark.usefixtures("browser"),
]

NEPAL = ZoneInfo("Asia/Kathmandu")
"""The reader's zone: no whole hours from UTC."""
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202eesrever\u2066"
SHOWN = "<script>alert(1)</script><img src=x onerror=alert(1)>⟨U+202E⟩esrever⟨U+2066⟩"
BAR_IS_OF = """(least) => Object.entries(least).every(([use, seconds]) => seconds === 0
    || Number(document.querySelector(`.use.${use}`)?.style.flexGrow) > seconds - 0.001)  // each goes on growing"""


# ---- what it shows


@promise("the page")
def test_after_a_kill_the_mark_the_reason_and_the_pause_are_those_of_rest() -> None:
    with training() as cluster, browsed(cluster.url, look={"timezone_id": NEPAL.key}) as seen:
        cluster.wait_step(5)
        seen.open_job()
        cluster.kill("w1")
        world = until("the loss in REST", lambda: world_of(cluster, "kill"))
        line = seen.page.locator(".changes tbody tr", has=seen.page.get_by_text("loss", exact=True))
        expect(line).to_contain_text(world["sentence"])
        seen.page.locator(".mark.bad").click()
        panel = seen.page.get_by_role("region", name="The chosen change")
        expect(panel).to_be_focused()
        expect(panel.locator("[data-role=sentence]")).to_have_text(world["sentence"])
        expect(panel.locator("[data-role=pause]")).to_have_text(duration(world["pause_seconds"]))
        rest = cluster._answer("GET", f"/jobs/job/worlds/{world['generation']}")
        expect(panel.locator(".entries li")).to_have_count(len(rest["timeline"]))
        for event, entry in zip(rest["timeline"], panel.locator(".entries li").all(), strict=True):
            expect(entry).to_contain_text(event["message"])
        assert panel.locator(".phases li").count() == sum(seconds > 0 for seconds in rest["phases"].values())
        began = datetime.fromtimestamp(world["began"], UTC)
        expect(panel.locator("h3 time")).to_have_text(re.compile(rf"{began.astimezone(NEPAL):%H:%M:%S}$"))
        expect(panel.locator("h3 time")).to_have_attribute("title", f"{began:%Y-%m-%d %H:%M:%S} UTC")
        seen.open()
        job = seen.page.locator(".job-line")
        expect(job).to_contain_text("2/3")
        expect(job).to_contain_text(cluster._answer("GET", "/jobs/job/summary")["last_resize"]["sentence"])


def test_every_part_of_a_job_shows_what_rest_says_and_all_pictures_one_time() -> None:
    with training(workers=2) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(3)
        held = until("all copies", lambda: copied(cluster))
        seen.open_job()
        for member in held["members"]:
            counts = [str(sum(end - first for first, end in member[kind])) for kind in ("owned", "mirrored")]
            cells = [member["worker"], member["domain"], "".join(map(str, member["lanes"])), *counts]
            row = seen.page.locator("#section-holdings tbody tr").filter(has_text=member["worker"])
            expect(row.locator("th, td")).to_have_text(cells)
            worker = cluster.workers()[member["worker"]]
            row = seen.page.locator(f"tr[data-worker={worker['worker']}]")
            expect(row.locator(".state")).to_have_text("active")
            expect(row.locator(".host")).to_contain_text(worker["host"])
            expect(row.locator(".memory")).to_contain_text("MB")
        filtered(seen, cluster.events())
        least = cluster._answer("GET", "/jobs/job/summary")["worker_seconds"]
        until("a bar of all seconds of workers", lambda: seen.page.evaluate(BAR_IS_OF, least))
        uses = seen.page.locator("#worker-seconds li")
        expect(uses).to_have_text([re.compile(r"^\s*[\d.]+ % \w")] * seen.page.locator(".use").count())
        for value in seen.page.locator(".chart .value").all():
            expect(value).not_to_have_text("–")
        seen.button("Closer").click()
        begin, end = seen.page.locator("#axis-range").inner_text().split(" – ")
        expect(seen.page.locator(".chart .unseen")).to_contain_text([f" from {begin} to {end}: "] * 4)
        picture = seen.page.get_by_role("img", name=f"The world from {begin} to {end}: 2 workers")
        expect(picture).to_be_visible()


def copied(cluster: Cluster) -> Json | None:
    """Who holds what, once every block has its copies."""
    held = cluster._answer("GET", "/jobs/job/holdings")
    return held if held["members"] and not held["missing"] and not held["fills"] else None


def filtered(seen: Watched, events: list[Json]) -> None:
    """Events by kind, by worker and by both are those of REST."""
    lines = seen.page.locator(".events li")
    expect(lines).to_have_count(len(events))
    for kind, worker in (("open", ""), ("", "w1"), ("open", "w1"), ("", "")):
        seen.page.get_by_label("Kind", exact=True).select_option(kind)
        seen.page.get_by_label("Worker", exact=True).select_option(worker)
        fitting = [one for one in events if kind in ("", one["kind"]) and worker in ("", one["worker"])]
        expect(lines.locator(".message")).to_contain_text([one["message"] for one in reversed(fitting)])


LOOKS: dict[str, Json] = {
    "a phone in the dark": {**PHONE, "color_scheme": "dark"},
    "a laptop by day": {"color_scheme": "light"},
    "a wall screen": {"viewport": {"width": 2560, "height": 1440}, "reduced_motion": "reduce"},
    "a laptop in the dark": {"color_scheme": "dark"},
    "a phone by day": {**PHONE, "color_scheme": "light"},
}


@pytest.mark.parametrize("look", shortened(LOOKS, "a phone in the dark"))
def test_axe_finds_nothing_serious_and_nothing_is_cut_off_by_the_window(look: str) -> None:
    with training(workers=2) as cluster, browsed(cluster.url, allowed=REFUSED, look=LOOKS[look]) as seen:
        cluster.wait_step(3)
        seen.open()
        expect(seen.page.locator(".job-line")).to_be_visible()
        assert seen.accessibility_faults() == []
        seen.open_job()
        expect(seen.page.locator(".chart canvas")).to_have_count(4)
        assert seen.accessibility_faults() == []
        seen.page.locator(".mark").first.click()
        seen.button("Log of w0").click()
        expect(seen.page.get_by_role("region", name="Log of a worker").locator(".note")).not_to_have_text("Reading…")
        assert seen.accessibility_faults() == []
        assert seen.overflow() == 0
        assert seen.cut_off_rows() == []
        seen.button("Scale…").click()
        expect(seen.dialog().get_by_role("button", name="Scale")).to_be_enabled()
        assert seen.accessibility_faults() == []


@promise("the page")
def test_what_others_have_written_is_shown_as_text() -> None:
    """Names and texts that no controller lets in are put into its answers on the way."""
    with training(workers=2) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(3)
        long = HOSTILE + "n" * 10_000

        def altered(route: Route) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json=hostile(answer.json(), long))

        seen.page.route(
            re.compile(r"/v1/(overview|jobs/job/(summary|workers|worlds|holdings|checkpoints))(\?.*)?$"), altered
        )
        seen.page.route(re.compile(r"/v1/jobs/job/events\?"), altered)
        seen.open()
        expect(seen.page.locator(".job-name")).to_have_text(SHOWN)
        expect(seen.page.locator(".job-line .why")).to_contain_text(SHOWN)
        seen.open_job()
        expect(seen.page.locator(".workers tbody th").first).to_have_text(SHOWN)
        expect(seen.page.locator(".events .message").first).to_contain_text(SHOWN)
        expect(seen.page.locator("#reason")).to_contain_text("more characters")
        assert seen.page.locator("main script, main img").count() == 0
        assert seen.overflow() == 0


SHOUTS = "import sys, time; print(sys.argv[1]); print('n' * 10_000, 'end', flush=True); time.sleep(600)"


def test_a_log_is_shown_as_text() -> None:
    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        command = [sys.executable, "-c", SHOUTS, HOSTILE]
        spec = {"job": "shouts", "launcher": "local", "command": command, "workers": {"wanted": 1}}
        cluster._answer("POST", "/jobs", spec)
        pid = until("its worker", lambda: pid_of(cluster, "shouts"))
        try:
            seen.open("#/jobs/shouts/w0")
            log = seen.page.get_by_role("region", name="Log", exact=True)
            expect(log).to_contain_text(SHOWN)
            expect(log).to_contain_text("n end")
            assert log.locator("*").count() == 0
            assert seen.overflow() == 0
        finally:
            cluster._answer("DELETE", "/jobs/shouts")
            until("it to end", lambda: not Path(f"/proc/{pid}").exists())


def pid_of(cluster: Cluster, job: str) -> int | None:
    """Of its first worker."""
    listed = cluster._answer("GET", f"/jobs/{job}/workers")["workers"]
    return listed[0]["pid"] if listed else None


def hostile(answer: Json, long: str) -> Json:
    """The answer, in which every name and text of a job is somebody's attempt."""
    texts = {"reason": long, "sentence": HOSTILE, "message": HOSTILE, "text": HOSTILE, "why": HOSTILE, "path": HOSTILE}

    def changed(part: Any, key: str = "") -> Any:
        if isinstance(part, list):
            return [changed(one, key) for one in part]
        if isinstance(part, dict):
            return {name: changed(one, name) for name, one in part.items()}
        names = key in ("job", "worker", "host", "domain") and isinstance(part, str)
        return HOSTILE if names else texts.get(key, part) if isinstance(part, str) else part

    return dict(changed(answer))


# ---- what is pressed


@promise("the page")
def test_save_confirm_a_loss_scale_and_drain_by_clicking(tmp_path: Path) -> None:
    options = {**LONG, "shoal": {"checkpoint": {"path": str(tmp_path)}}}
    asked_only = {"suspect_after": 1000}  # whoever is silent counts as lost only when somebody says so
    with (
        Cluster(workers=4, options=options, spec=asked_only, pace=PACE) as cluster,
        browsed(cluster.url) as seen,
    ):
        cluster.wait_step(3)
        seen.open_job()
        seen.button("Save a checkpoint…").click()
        confirm(seen, "Save a checkpoint", preview(cluster, "checkpoint"))
        expect(seen.page.locator("#section-checkpoints tbody tr")).to_have_count(1)
        assert [saved["verified"] for saved in cluster._answer("GET", "/jobs/job/checkpoints")["checkpoints"]] == [True]
        expect(seen.page.locator("#section-checkpoints tbody td:nth-child(4)")).to_have_text("verified")
        cluster.stop("w3")
        until("its silence", lambda: cluster._answer("GET", "/jobs/job/preview?act=lost&worker=w3")["possible"])
        seen.button("Confirm that w3 is lost").click()
        confirm(seen, "It is dead", preview(cluster, "lost", worker="w3"))
        cluster.wait_world(3)
        expect(seen.page.locator("tr[data-worker=w3]")).to_have_count(0)
        expect(seen.page.locator(".events [data-kind=lost]")).to_contain_text("w3")
        cluster.wait_step(cluster.job()["step"] + 2)
        seen.button("Scale…").click()
        seen.dialog().get_by_label("Workers wanted").fill("2")
        confirm(seen, "Scale", preview(cluster, "scale", workers=2))
        cluster.wait_world(2)
        expect(seen.page.locator("[data-fact=world]")).to_have_text("2 of 2 workers")
        cluster.wait_step(cluster.job()["step"] + 2)
        there = [name for name, worker in cluster.workers().items() if worker["state"] == "active"]
        seen.button(f"Drain {there[-1]}").click()
        confirm(seen, "Drain", preview(cluster, "drain", worker=there[-1]))
        cluster.wait_state(there[-1], "left")
        expect(seen.page.locator(f"tr[data-worker={there[-1]}]")).to_have_count(0)
        asked = [event["data"]["action"] for event in cluster.events() if event["kind"] == "audit"]
        assert asked == ["create", "checkpoint", "lost", "scale", "drain"]


def test_a_checkpoint_that_has_no_copies_to_compare_is_not_verified_and_not_called_damaged(tmp_path: Path) -> None:
    options = {**LONG, "shoal": {"checkpoint": {"path": str(tmp_path)}, "mirrors": 0}}
    with Cluster(workers=1, options=options, pace=PACE) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(3)
        seen.open_job()
        seen.button("Save a checkpoint…").click()
        confirm(seen, "Save a checkpoint", preview(cluster, "checkpoint"))
        expect(seen.page.locator("#section-checkpoints tbody td:nth-child(4)")).to_have_text("not verified")


def test_without_the_right_nothing_can_be_pressed() -> None:
    with training(2, Guarded) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        assert isinstance(cluster, Guarded)
        cluster.wait_step(3)
        seen.open("#/jobs/job")
        sign_in(seen, cluster.token_of("reader", "view"))
        expect(seen.page.locator("#caller")).to_contain_text("reader · view")
        expect(seen.page.locator("tr[data-worker=w0]")).to_be_visible()
        expect(seen.button("Log of w0")).to_be_visible()
        for name in (
            re.compile("Scale"),
            re.compile("Drain"),
            re.compile("Lost"),
            re.compile("Pause"),
            re.compile("Cancel"),
        ):
            expect(seen.page.get_by_role("button", name=name)).to_have_count(0)
        seen.button("Forget the token").click()
        sign_in(seen, cluster.token)
        expect(seen.button("Scale…")).to_be_visible()


def sign_in(seen: Watched, token: str) -> None:
    seen.page.get_by_label("Token", exact=True).fill(token)
    seen.button("Show the jobs").click()


def test_a_wrong_token_gets_one_sentence_and_a_right_one_is_kept_for_the_tab() -> None:
    with training(2, Guarded) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        seen.open()
        sign_in(seen, "not-a-token-that-opens-anything")
        problem = seen.page.get_by_role("alert")
        expect(problem).not_to_be_empty()
        assert len(problem.inner_text().splitlines()) == 1
        sign_in(seen, cluster.token)
        expect(seen.page.locator(".job-line")).to_be_visible()
        seen.page.reload()
        expect(seen.page.locator(".job-line")).to_be_visible()
        kept = seen.page.evaluate("[Object.values(sessionStorage), Object.keys(localStorage), document.cookie]")
        assert kept == [[cluster.token], [], ""]
        other = seen.page.context.new_page()
        other.goto(cluster.url)
        expect(other.get_by_label("Token", exact=True)).to_be_visible()


def test_a_token_that_no_request_can_carry_is_refused_where_it_is_typed() -> None:
    """A browser sends nothing with such a header, which looks like a controller that does not answer."""
    with training(1, Guarded) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        seen.open()
        sign_in(seen, f"{cluster.token}\u2026")
        expect(seen.page.get_by_role("alert")).to_contain_text("No token has the character \u2026 in it")
        expect(seen.page.locator("#banner")).to_be_hidden()
        sign_in(seen, cluster.token)
        expect(seen.page.locator(".job-line")).to_be_visible()


def test_what_is_confirmed_is_what_the_sentence_said() -> None:
    """Of a number that has been typed since, an answer that was under way says nothing; half a worker is none."""
    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(2)
        seen.open_job()
        seen.button("Scale\u2026").click()
        number, press = seen.dialog().get_by_label("Workers wanted"), seen.dialog().get_by_role("button", name="Scale")
        expect(press).to_be_enabled()
        late: list[Route] = []
        seen.page.route("**/preview?act=scale&workers=2", lambda route: late.append(route))
        with seen.page.expect_request("**/preview?act=scale&workers=2"):
            number.fill("2")
        typed = """([number, sentence]) => new Promise((resolve) => {
            const before = sentence.textContent;
            number.value = "2.5";
            number.dispatchEvent(new Event("input"));
            new MutationObserver(() => sentence.textContent === before || resolve(sentence.textContent))
                .observe(sentence, { childList: true, characterData: true, subtree: true });
            window.isTyped = true;
        })"""
        seen.page.evaluate(
            f"() => {{ window.said = ({typed})([document.querySelector('#act-workers'), "
            "document.querySelector('#act-sentence')]); }"
        )
        late[0].continue_()
        assert seen.page.evaluate("window.said") == "Give a whole number of workers, 1 or more."
        expect(press).to_be_disabled()


def test_a_job_that_is_made_after_its_page_was_opened_has_its_events() -> None:
    with training(workers=1) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        seen.open("#/jobs/later")
        expect(seen.page.get_by_role("alert").first).to_contain_text("There is no job later here")
        cluster._answer("POST", "/jobs", {"job": "later", "launcher": "none", "workers": {"wanted": 1}})
        expect(seen.page.locator("#phase")).to_have_text("waiting")
        expect(seen.page.locator(".events [data-kind=audit]")).to_have_count(1)
        cluster._answer("DELETE", "/jobs/later")


def test_an_answer_that_breaks_off_is_a_lost_connection_and_asked_for_again() -> None:
    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(2)
        cut: list[str] = []

        def half(route: Route) -> None:
            """The first answer to each."""
            if route.request.url in cut:
                return route.continue_()
            cut.append(route.request.url)
            return route.fulfill(status=200, content_type="application/json", body='{"version": ')

        seen.page.route(re.compile(r"/v1/(about|events\?job=.*)$"), half)
        seen.open_job()
        expect(seen.page.locator("tr[data-worker=w0]")).to_be_visible()
        expect(seen.page.locator(".events [data-kind=open]")).to_have_count(1)
        expect(seen.page.locator("#banner")).to_be_hidden()
        assert len(cut) == 2


@pytest.mark.parametrize("width", shortened([1920, 1760, 1500], 1500))
def test_every_act_on_a_worker_is_in_reach(width: int) -> None:
    with (
        training(workers=2) as cluster,
        browsed(cluster.url, look={"viewport": {"width": width, "height": 900}}) as seen,
    ):
        cluster.wait_step(2)
        seen.open_job()
        expect(seen.button("Confirm that w1 is lost")).to_be_visible()
        table = seen.page.get_by_role("region", name="Workers", exact=True).locator(".wide")
        assert table.evaluate("one => one.scrollWidth - one.clientWidth") == 0


def test_a_change_meanwhile_is_shown_and_not_overridden() -> None:
    with training() as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        cluster.wait_step(3)
        seen.open_job()
        seen.button("Scale…").click()
        seen.dialog().get_by_label("Workers wanted").fill("2")
        expect(seen.dialog().locator("#act-sentence")).to_have_text(preview(cluster, "scale", workers=2))
        cluster.scale(4)
        seen.dialog().get_by_role("button", name="Scale", exact=True).click()
        expect(seen.dialog().get_by_role("alert")).to_contain_text("The job has changed since")
        assert cluster.job()["workers"]["wanted"] == 4
        confirm(seen, "Scale", preview(cluster, "scale", workers=2))
        cluster.until("2 wanted", lambda job: job["workers"]["wanted"] == 2)


def test_all_of_it_by_keyboard() -> None:
    with training(workers=2) as cluster, browsed(cluster.url) as seen:
        cluster.wait_step(3)
        seen.open()
        expect(seen.page.locator(".job-line")).to_be_visible()
        tab_to(seen, "a.job-name")
        seen.page.keyboard.press("Enter")
        expect(seen.page.locator(".marks .mark").first).to_be_visible()
        tab_to(seen, ".mark")
        seen.page.keyboard.press("Enter")
        expect(seen.page.get_by_role("region", name="The chosen change")).to_be_focused()
        seen.page.locator("body").evaluate("() => document.activeElement.blur()")
        tab_to(seen, "[data-act=pause]")
        seen.page.keyboard.press("Enter")
        expect(seen.dialog().get_by_role("button", name="Pause")).to_be_focused()
        seen.page.keyboard.press("Escape")
        expect(seen.dialog()).to_have_count(0)
        expect(seen.page.locator("[data-act=pause]")).to_be_focused()
        seen.page.keyboard.press("Enter")
        expect(seen.dialog().get_by_role("button", name="Pause")).to_be_focused()
        seen.page.keyboard.press("Enter")
        cluster.wait_phase("paused")
        expect(seen.page.locator("[data-act=resume]")).to_be_visible()


def tab_to(seen: Watched, place: str) -> None:
    """Press Tab until it has the focus."""
    for _ in range(80):
        seen.page.keyboard.press("Tab")
        if seen.page.evaluate("place => document.activeElement.matches(place)", place):
            return
    raise AssertionError(f"no number of tabs leads to {place}")


# ---- what goes wrong


def test_a_job_that_is_gone_is_said_to_be() -> None:
    with training(workers=1) as cluster, browsed(cluster.url, allowed=REFUSED) as seen:
        cluster.wait_step(2)
        seen.open_job()
        seen.button("Cancel…").click()
        confirm(seen, "Cancel the job", preview(cluster, "cancel"))
        expect(seen.page.locator("#phase")).to_have_text("cancelled")
        expect(seen.button("Cancel…")).to_be_hidden()
        cluster.cancel()
        expect(seen.page.get_by_role("alert").first).to_contain_text("There is no job job any more")
        seen.page.get_by_role("link", name="All jobs").click()
        expect(seen.page.locator("#jobs-summary")).to_contain_text("No jobs yet")


def test_a_controller_of_another_version_makes_the_page_load_itself_once() -> None:
    with training(workers=1) as cluster, browsed(cluster.url) as seen:

        def another(route: Route) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json={**answer.json(), "page": "another"})

        loads: list[str] = []
        seen.page.on("domcontentloaded", lambda page: loads.append(page.url))
        seen.page.route("**/v1/about", another)
        with seen.page.expect_event("load", lambda _: len(loads) == 2):
            seen.open()
        expect(seen.page.locator(".job-line")).to_be_visible()
        assert len(loads) == 2
        seen.page.reload()
        expect(seen.page.locator(".job-line")).to_be_visible()
        assert len(loads) == 3


def test_an_old_browser_is_told_what_it_lacks() -> None:
    with training(workers=1) as cluster, browsed(cluster.url) as seen:
        seen.page.add_init_script(
            "delete window.TextDecoderStream; delete AbortSignal.any; delete window.HTMLDialogElement;"
        )
        seen.open()
        for lack in ("streams of requests", "AbortSignal.any", "dialogs"):
            expect(seen.page.locator("#view")).to_contain_text(lack)
        assert not [url for url in seen.asked if "/v1/" in url]


def test_the_policy_lets_nothing_in_but_the_controllers_own_files() -> None:
    with training(workers=1) as cluster, browsed(cluster.url, allowed="Content Security Policy") as seen:
        answer = seen.page.goto(seen.url)
        assert answer is not None
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        broken = """() => {
            const found = new Promise((resolve) => {
                document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
            });
            const script = document.createElement("script");
            script.textContent = "window.broken = true";
            document.head.append(script);
            return found.then((directive) => [directive, window.broken === undefined]);
        }"""
        assert seen.page.evaluate(broken) == ["script-src-elem", True]
