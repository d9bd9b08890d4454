"""What the page is served and what it asks for, on a real port: files, rights, series, the overview; and bad input."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_port import TRAIN, Api, serving
from asynchronous import asynchronous
from machine_driver import training
from shoal_controller.access.callers import Role
from shoal_controller.api.app import ApiSettings
from shoal_controller.core.machine.effects import Note
from shoal_controller.core.machine.spec import Phase, ResizeView, State, WorkerView
from shoal_controller.core.machine.view import Sample
from shoal_controller.jobs.records import JobEvent
from shoal_controller.page.site import DIGEST_PLACE, FOLDER, Site
from shoal_protos.acts import Pause, Resume
from shoal_protos.release import RELEASE
from small_machine import SmallMachine
from tiers import check

pytestmark = check("serves REST on real ports")

WITH_PAGE = ApiSettings(default_workers=2, page=True)
SECRET = "secret"
BEARER = {"Authorization": f"Bearer {SECRET}"}


@asynccontextmanager
async def with_page(folder: Path, **given: object) -> AsyncIterator[Api]:
    async with serving(folder, given.pop("settings", WITH_PAGE), **given) as api:
        yield api


# ---- files


@asynchronous
async def test_the_page_needs_no_token_and_what_it_shows_does(tmp_path: Path) -> None:
    async with with_page(tmp_path, token=SECRET) as api:
        page = await api.client.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        for path in ("/v1/about", "/v1/overview", "/v1/jobs/train/series", "/v1/jobs/train/summary"):
            problem = await api.ask("GET", path, 401)
            assert problem["code"] == "unauthorized"


@asynchronous
async def test_every_file_is_answered_with_its_type_and_a_policy_that_lets_nothing_else_in(tmp_path: Path) -> None:
    async with with_page(tmp_path) as api:
        for file in FOLDER.rglob("*"):
            name = file.relative_to(FOLDER).as_posix()
            if not file.is_file() or name == "index.html":
                continue
            answer = await api.client.get(f"/page/{name}")
            assert answer.status_code == 200 and answer.content == file.read_bytes(), name
            assert answer.headers["x-content-type-options"] == "nosniff"
        page = await api.client.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "*" not in policy


@asynchronous
async def test_a_browser_that_has_a_file_is_not_sent_it_again(tmp_path: Path) -> None:
    async with with_page(tmp_path) as api:
        first = await api.client.get("/")
        tag = first.headers["etag"]
        for named in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = await api.client.get("/", headers={"If-None-Match": named})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await api.client.get("/", headers={"If-None-Match": '"other"'})).status_code == 200
        assert (await api.client.head("/")).headers["etag"] == tag


@asynchronous
async def test_a_page_knows_its_own_digest_and_the_controller_tells_it(tmp_path: Path) -> None:
    async with with_page(tmp_path) as api:
        digest = (await api.ask("GET", "/v1/about"))["page"]
        page = (await api.client.get("/")).content
        assert digest.encode() in page and DIGEST_PLACE not in page


def test_another_file_is_another_page(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("SHOAL_PAGE_DIGEST")
    (tmp_path / "app.js").write_text("1")
    before = Site(tmp_path)
    (tmp_path / "app.js").write_text("2")
    assert Site(tmp_path).digest != before.digest and Site(tmp_path).digest == Site(tmp_path).digest


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/index.html", "/page/site.py", "/page/../site.py", "/page/%2e%2e/site.py", "/page//etc/passwd",
     "/page/..%2f..%2fsettings.py", "/page/a%00b", "/page/" + "x" * 10_000, "/page/.hidden.js"],
)  # fmt: skip
@asynchronous
async def test_nothing_but_the_files_is_served(tmp_path: Path, path: str) -> None:
    async with with_page(tmp_path) as api:
        answer = await api.client.get(path)
        assert answer.status_code == 404 and answer.json()["code"] == "path_unknown", answer.text[:300]


@asynchronous
async def test_a_controller_without_a_page_serves_none_and_says_so(tmp_path: Path) -> None:
    async with with_page(tmp_path, settings=ApiSettings(default_workers=2)) as api:
        for path in ("/", "/page/app.js"):
            assert (await api.ask("GET", path, 404))["code"] == "path_unknown"
        assert (await api.ask("GET", "/v1/about"))["page"] == ""


@asynchronous
async def test_nothing_is_sent_to_a_file(tmp_path: Path) -> None:
    async with with_page(tmp_path) as api:
        assert (await api.ask("POST", "/", 405))["code"] == "method_not_allowed"


# ---- what a token may


@asynchronous
async def test_a_token_is_told_its_name_and_role(tmp_path: Path) -> None:
    async with with_page(tmp_path, token=SECRET) as api:
        api.client.headers.update(BEARER)
        made = await api.ask("POST", "/v1/tokens", 201, json={"name": "ann", "role": "view"})
        about = await api.ask("GET", "/v1/about")
        assert (about["role"], about["token_required"], about["version"]) == ("admin", True, RELEASE)
        about = await api.ask("GET", "/v1/about", headers={"Authorization": f"Bearer {made['token']}"})
        assert (about["role"], about["token"]) == (Role.VIEW, "ann")


@asynchronous
async def test_without_tokens_everybody_may_everything(tmp_path: Path) -> None:
    async with with_page(tmp_path) as api:
        about = await api.ask("GET", "/v1/about")
        assert (about["role"], about["token"], about["token_required"]) == ("admin", "", False)
        assert about["leads"] and about["history_since"] == api.shell.since and "begins anew" in about["history"]


# ---- the overview


@asynchronous
async def test_the_overview_lists_jobs_by_who_needs_attention(tmp_path: Path, unrecorded: None) -> None:
    phases = {"good": Phase.RUNNING, "bad": Phase.STALLED, "slow": Phase.RESIZING, "done": Phase.SUCCEEDED}
    machine = SmallMachine()
    shown = machine.view
    machine.view = lambda job, now: replace(shown(job, now), phase=phases[job.spec.job], reason="")
    async with with_page(tmp_path, machine=machine) as api:
        for name in phases:
            await api.ask("POST", "/v1/jobs", 202, json={"job": name})
        overview = await api.ask("GET", "/v1/overview")
        assert [row["job"]["job"] for row in overview["jobs"]] == ["bad", "slow", "good", "done"]
        assert [row["attention"]["level"] for row in overview["jobs"]] == ["act", "watch", "watch", "over"]
        assert overview["more"] == 0 and overview["jobs"][0]["hour"]["active"] == [None] * 60
        part = await api.ask("GET", "/v1/overview?limit=1&series=false")
        assert (len(part["jobs"]), part["more"], part["jobs"][0]["hour"]) == (1, 3, None)


@asynchronous
async def test_a_row_tells_the_last_resize_and_the_last_checkpoint_as_sentences(tmp_path: Path) -> None:
    resize = ResizeView(
        generation=2, workers=2, reason="kill", from_step=40, pause_seconds=0.063, phases={"plan": 0.1},
        promoted_blocks=5, pause_bytes=0, fill_bytes=100, checkpoint_bytes=0, lost_steps=0, began_at=5.0,
    )  # fmt: skip
    balance = replace(resize, generation=3, reason="balance", pause_seconds=0.0, began_at=6.0)
    machine = SmallMachine(shown={"resizes": (resize, balance), "last_checkpoint_step": 30})
    async with with_page(tmp_path, machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        row = await api.ask("GET", "/v1/jobs/train/summary")
        sentence = "a worker was lost: training paused for 63 ms, no step lost, nothing moved in the pause"
        assert row["last_resize"] == {
            "generation": 2, "time": 5.0, "reason": "kill", "pause_seconds": 0.063,
            "bytes": {"pause": 0, "fill": 100, "checkpoint": 0}, "lost_steps": 0, "sentence": sentence,
        }  # fmt: skip
        assert row["last_checkpoint"] == {"step": 30, "time": None, "sentence": "step 30"}
        assert row["job"] == await api.ask("GET", "/v1/jobs/train")


# ---- series


@asynchronous
async def test_a_series_has_what_was_recorded_and_only_what_is_asked_for(tmp_path: Path, unrecorded: None) -> None:
    async with with_page(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        series, now = api.shell.runner("train").series, api.shell.clock()
        for ago in (3, 2, 1):
            series.record(Sample(10 - ago, 1.5, None, None, 0.5, 1, 3), now - ago)
        hour = await api.ask("GET", "/v1/jobs/train/series")
        assert (hour["step"][:3], hour["loss"][:3], hour["step_seconds"][:3]) == ([7, 8, 9], [1.5] * 3, [None] * 3)
        assert (hour["every_seconds"], hour["since"]) == (1, series.since)
        later = await api.ask("GET", f"/v1/jobs/train/series?after={now - 1.5}")
        assert later["times"] == hour["times"][2:]
        day = await api.ask("GET", "/v1/jobs/train/series?span=day")
        assert (day["every_seconds"], day["step"]) == (30, [7])
        lengths = {len(hour[name]) for name in ("times", "loss", "active", "wanted", "unmirrored_blocks")}
        assert lengths == {len(hour["step"])}


@asynchronous
async def test_a_shell_records_every_job_by_itself_and_a_new_run_begins_anew(tmp_path: Path) -> None:
    async with with_page(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        series, seen = api.shell.runner("train").series, asyncio.Event()
        record = series.record
        series.record = lambda *given: (record(*given), seen.set())
        await asyncio.wait_for(seen.wait(), 100)
        before = await api.ask("GET", "/v1/jobs/train/series")
        assert before["wanted"][0] == 3
        await api.ask("DELETE", "/v1/jobs/train", 202)
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        after = await api.ask("GET", "/v1/jobs/train/series")
        assert after["run"] != before["run"] and after["since"] > before["since"]


@pytest.mark.parametrize(
    "path",
    ["jobs/train/series?span=week", "jobs/train/series?after=-1", "jobs/train/series?after=nan",
     "jobs/train/series?after=1e999", "jobs/train/series?after=soon", "overview?limit=0", "overview?limit=1001",
     "overview?series=perhaps", "overview?limit=" + "9" * 10_000],
)  # fmt: skip
@asynchronous
async def test_a_query_that_makes_no_sense_gets_one_sentence(tmp_path: Path, path: str) -> None:
    async with with_page(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        problem = await api.ask("GET", f"/v1/{path}", 400)
        assert problem["code"] == "invalid_request" and len(problem["detail"]) < 400


@pytest.mark.parametrize("name", ["nobody", "%3Cscript%3E", "%E2%80%AEnoitceles", "x" * 5000])
@asynchronous
async def test_a_job_that_is_not_there_gets_one_sentence(tmp_path: Path, name: str) -> None:
    async with with_page(tmp_path) as api:
        for part in ("series", "summary"):
            problem = await api.ask("GET", f"/v1/jobs/{name}/{part}", 404)
            assert problem["code"] == "job_unknown"


# ---- worlds, holdings, workers, logs


def resize(generation: int, began: float, **changed: object) -> ResizeView:
    made = ResizeView(
        generation=generation, workers=2, reason="kill", from_step=40, pause_seconds=0.063, phases={"plan": 0.1},
        promoted_blocks=5, pause_bytes=0, fill_bytes=100, checkpoint_bytes=0, lost_steps=0, began_at=began,
    )  # fmt: skip
    return replace(made, **changed)


STORY = [
    Note("open", "generation 1 is open"),
    Note("audit", "an operator drains w3"),
    Note("checkpoint_saved", "a checkpoint"),
    Note("lost", "worker w1 on h is dead: killed", "w1", data={"noticed_by": "the launcher"}),
    Note("prepare", "generation 2 is being prepared: w1 is dead"),
    Note("plan", "generation 2 is planned: w0, from step 4; waiting for w0 to stop: 0.031 s"),
    Note("waiting", "waiting for w2, w3 to build generation 2"),
]
BEGUN = [
    Note("open", "generation 2 is open"),
    Note("trains", "the first step of generation 2 is committed"),
    Note("resized", "generation 2 (kill) paused training", "w2"),
    Note("joined", "worker w4 has joined", "w4"),
]


def events(generation: int, notes: Sequence[Note]) -> list[JobEvent]:
    """As they lie in the store."""
    return [JobEvent(float(generation), n.kind, generation, n.worker, n.message, n.data) for n in notes]


@asynchronous
async def test_a_world_has_its_lanes_only_where_this_controller_has_seen_it_begin(tmp_path: Path) -> None:
    machine = SmallMachine(shown={"resizes": (resize(1, 5.0, reason="start"), resize(2, 9.0)), "ended_at": None})
    async with with_page(tmp_path, machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        api.shell.runner("train").series.see_world(training(3).job.durable.current, 2)
        worlds = (await api.ask("GET", "/v1/jobs/train/worlds"))["worlds"]
        assert [(one["generation"], one["began"], one["ended"]) for one in worlds] == [(1, 5.0, 9.0), (2, 9.0, None)]
        assert worlds[0]["lanes"].keys() == {"w0", "w1", "w2"} and worlds[1]["lanes"] is None
        assert worlds[0]["sentence"].startswith("the job began with 2 workers, from a checkpoint of step 40: ")


@asynchronous
async def test_a_timeline_tells_who_noticed_what_and_whom_the_others_waited_for(tmp_path: Path) -> None:
    machine = SmallMachine(shown={"resizes": (resize(1, 5.0), resize(2, 9.0))})
    async with with_page(tmp_path, machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        await api.shell.runner("train").repository.write([*events(1, STORY), *events(2, BEGUN)])
        found = await api.ask("GET", "/v1/jobs/train/worlds/2")
        kinds = ["audit", "lost", "prepare", "plan", "waiting", "open", "trains", "resized"]
        assert [event["kind"] for event in found["timeline"]] == kinds
        assert (found["noticed_by"], found["waited_for"]) == ("the launcher", ["w0", "w2", "w3"])
        assert (found["slowest"], found["sentence"], found["phases"]) == (
            "w2", "a worker was lost: training paused for 63 ms, no step lost, nothing moved in the pause",
            {"plan": 0.1},
        )  # fmt: skip
        assert (await api.ask("GET", "/v1/jobs/train/worlds/1"))["noticed_by"] == "the controller"
        missing = await api.ask("GET", "/v1/jobs/train/worlds/3", 404)
        assert missing["detail"] == "job train has no world 3; those that are remembered are from 1 to 2"


@pytest.mark.parametrize("generation", ["0", "-1", "x", "9" * 40])
@asynchronous
async def test_a_world_with_no_number_gets_one_sentence(tmp_path: Path, generation: str) -> None:
    async with with_page(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        assert (await api.ask("GET", f"/v1/jobs/train/worlds/{generation}", 400))["code"] == "invalid_request"


@asynchronous
async def test_holdings_are_those_of_the_plan(tmp_path: Path) -> None:
    shown = training(3).view
    machine = SmallMachine(shown={"world": shown.world, "workers": shown.workers, "copies_wanted": 2})
    async with with_page(tmp_path, machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        found = await api.ask("GET", "/v1/jobs/train/holdings")
        blocks = [block for one in found["members"] for begin, end in one["owned"] for block in range(begin, end)]
        assert sorted(blocks) == list(range(found["blocks"])) and found["missing"] == []
        assert sorted(lane for one in found["members"] for lane in one["lanes"]) == list(range(8))
        workers = (await api.ask("GET", "/v1/jobs/train/workers"))["workers"]
        assert workers[0]["activity"]["sentence"] and workers[0]["heartbeat_age_seconds"] is not None


WITH_LOG = WorkerView(
    worker="w0", host="h", pid=7, state=State.ACTIVE, rank=0, lanes=(0,), blocks=1, mirrored_blocks=1, step=1,
    step_seconds=0.1, memory_bytes={}, log="",
)  # fmt: skip


@asynchronous
async def test_the_end_of_a_log_is_shown_as_text_whatever_is_in_it(tmp_path: Path) -> None:
    log = tmp_path / "jobs" / "train" / "w0.log"
    log.parent.mkdir(parents=True)
    hostile = "<script>alert(1)</script> \u202eevil \x00\x1b[31m ü"
    log.write_bytes(b"first\n" + hostile.encode() + b"\xff\n")
    machine = SmallMachine(shown={"workers": (replace(WITH_LOG, log=str(log)),)})
    async with with_page(tmp_path / "s", settings=replace(WITH_PAGE, folder=tmp_path), machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        whole = await api.ask("GET", "/v1/jobs/train/workers/w0/log")
        assert whole["text"] == f"first\n{hostile}\ufffd\n"
        assert (whole["bytes"], whole["begin"]) == (log.stat().st_size, 0)
        end = await api.ask("GET", "/v1/jobs/train/workers/w0/log?bytes=3")
        assert (end["text"], end["begin"]) == ("\ufffd\n", log.stat().st_size - 2)


@asynchronous
async def test_a_log_is_shown_from_the_folder_that_was_named_for_logs_as_well(tmp_path: Path) -> None:
    """`shoal run --log-dir` keeps logs outside of the data folder, and a controller that is started again without it
    still has those of workers that it started with it."""
    settings = replace(WITH_PAGE, folder=tmp_path / "data", log_folder=tmp_path / "logs")
    paths = [tmp_path / "logs" / "train" / "w0.log", tmp_path / "data" / "jobs" / "train" / "w1.log"]
    other = tmp_path / "logs" / "another" / "w2.log"
    for path in (*paths, other):
        path.parent.mkdir(parents=True)
        path.write_text(f"of {path.stem}")
    shown = tuple(replace(WITH_LOG, worker=path.stem, log=str(path)) for path in (*paths, other))
    async with with_page(tmp_path / "s", settings=settings, machine=SmallMachine(shown={"workers": shown})) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        for name in ("w0", "w1"):
            assert (await api.ask("GET", f"/v1/jobs/train/workers/{name}/log"))["text"] == f"of {name}"
        await api.ask("GET", "/v1/jobs/train/workers/w2/log", 404)


@asynchronous
async def test_no_file_but_the_log_of_a_local_worker_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = tmp_path / "jobs" / "train"
    folder.mkdir(parents=True)
    (folder / "w1.log").symlink_to(secret)
    os.mkfifo(folder / "w2.log")
    logs = {
        "w0": str(secret), "w1": str(folder / "w1.log"), "w2": str(folder / "w2.log"), "w3": str(folder / "w3.log"),
        "w4": str(folder / ".." / "train" / "w1.log"), "w5": "",
    }  # fmt: skip
    workers = [replace(WITH_LOG, worker=name, log=path) for name, path in logs.items()]
    machine = SmallMachine(shown={"workers": (*workers, replace(WITH_LOG, worker="w6", pod="demo-w6"))})
    async with with_page(tmp_path / "s", settings=replace(WITH_PAGE, folder=tmp_path), machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        for name in (*logs, "w6", "w7"):  # w6: of a controller without a cluster
            problem = await api.ask("GET", f"/v1/jobs/train/workers/{name}/log", 404)
            assert "secret" not in problem["detail"].replace(str(secret), "") and name in problem["detail"]
        assert "no cluster to ask" in (await api.ask("GET", "/v1/jobs/train/workers/w6/log", 404))["detail"]


# ---- previews


@asynchronous
async def test_a_preview_says_what_a_request_would_do_and_does_nothing(tmp_path: Path) -> None:
    async with with_page(tmp_path) as api:
        made = await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        found = await api.ask("GET", "/v1/jobs/train/preview?act=scale&workers=5")
        assert found == {
            "act": "scale", "possible": True, "code": None, "version": made["version"],
            "sentence": "scale from 3 to 5 workers: 5 workers may join (`shoal worker`); training goes on meanwhile; "
            "5 workers for 8 lanes: 2 rounds, 20% of the capacity idles; with 25 lanes 0%",
        }  # fmt: skip
        refused = await api.ask("GET", "/v1/jobs/train/preview?act=scale&workers=9")
        assert (refused["possible"], refused["code"]) == (False, "conflict") and "expected 1 to 8" in refused[
            "sentence"
        ]
        assert (await api.ask("GET", "/v1/jobs/train"))["version"] == made["version"]


@pytest.mark.parametrize(
    ("query", "words"),
    [("", "`act`"), ("act=explode", "scale"), ("act=scale", "`workers` is missing"),
     ("act=drain", "`worker` is missing"), ("act=lost&worker=", "`worker` is missing"),
     ("act=scale&workers=0", "`workers`"), ("act=scale&workers=1e9", "`workers`"),
     ("act=drain&worker=" + "x" * 10_000, "`worker`")],
)  # fmt: skip
@asynchronous
async def test_a_preview_of_nothing_gets_one_sentence(tmp_path: Path, query: str, words: str) -> None:
    async with with_page(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        problem = await api.ask("GET", f"/v1/jobs/train/preview?{query}", 400)
        assert problem["code"] == "invalid_request" and words in problem["detail"] and len(problem["detail"]) < 400


# ---- events


@asynchronous
async def test_events_of_a_job_can_be_asked_for_by_kind_and_worker(tmp_path: Path) -> None:
    async with with_page(tmp_path, machine=SmallMachine({Pause: STORY})) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        await api.ask("POST", "/v1/jobs/train/pause", 202)
        lost = await api.ask("GET", "/v1/jobs/train/events?kind=lost&kind=plan")
        assert [event["kind"] for event in lost["events"]] == ["lost", "plan"] and lost["next"] is None
        of_one = await api.ask("GET", "/v1/jobs/train/events?worker=w1")
        assert [event["worker"] for event in of_one["events"]] == ["w1"]
        first = await api.ask("GET", "/v1/jobs/train/events?kind=lost&kind=plan&limit=1")
        assert [event["kind"] for event in first["events"]] == ["lost"]
        rest = await api.ask("GET", f"/v1/jobs/train/events?kind=lost&kind=plan&after={first['next']}")
        assert [event["kind"] for event in rest["events"]] == ["plan"]
        assert (await api.ask("GET", "/v1/jobs/train/events?kind=party", 400))["code"] == "invalid_request"


@asynchronous
async def test_the_newest_events_of_all_jobs_come_with_their_jobs(tmp_path: Path) -> None:
    async with with_page(tmp_path, machine=SmallMachine({Pause: STORY})) as api:
        begin = (await api.ask("GET", "/v1/events"))["next"]
        for job in ("a", "b"):
            await api.ask("POST", "/v1/jobs", 202, json={"job": job})
        await api.ask("POST", "/v1/jobs/b/pause", 202)
        found = await api.ask("GET", f"/v1/events?after={begin}&kind=lost")
        assert [(one["job"], one["worker"]) for one in found["events"]] == [("b", "w1")] and not found["anew"]
        assert (await api.ask("GET", f"/v1/events?after={found['next']}"))["events"] == []
        assert (await api.ask("GET", "/v1/events?job=a&kind=lost"))["events"] == []
        for stale in ("nonsense", "0000000000000000-1", f"{begin}999", "x" * 300):
            answer = await api.ask("GET", f"/v1/events?after={stale}")
            assert answer["anew"] and answer["events"] == []
        assert (await api.ask("GET", "/v1/events?after=" + "x" * 301, 400))["code"] == "invalid_request"


@asynchronous
async def test_a_stream_of_all_jobs_goes_on_where_its_reader_was(tmp_path: Path) -> None:
    async with with_page(tmp_path, machine=SmallMachine({Pause: STORY, Resume: BEGUN})) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        begin = (await api.ask("GET", "/v1/events"))["next"]
        headers = {"Accept": "text/event-stream", "Last-Event-ID": begin}
        async with api.client.stream("GET", "/v1/events?kind=lost&kind=trains", headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            await api.ask("POST", "/v1/jobs/train/pause", 202)
            [lost] = await newest(answer, 1)
            assert (lost["data"]["job"], lost["data"]["kind"]) == ("train", "lost")
        headers |= {"Last-Event-ID": lost["id"]}
        async with api.client.stream("GET", "/v1/events?kind=plan&kind=trains", headers=headers) as answer:
            await api.ask("POST", "/v1/jobs/train/resume", 202)
            assert [event["data"]["kind"] for event in await newest(answer, 2)] == ["plan", "trains"]
        headers |= {"Last-Event-ID": "of-another-controller"}
        async with api.client.stream("GET", "/v1/events", headers=headers) as answer:
            assert [event["event"] for event in await newest(answer, 1)] == ["anew"]


async def newest(answer: httpx.Response, count: int) -> list[dict[str, Any]]:
    """The next server-sent events, comments left out."""
    found: list[dict[str, Any]] = [{}]
    async with asyncio.timeout(100), aclosing(answer.aiter_lines()) as lines:
        async for line in lines:
            name, _, value = line.partition(": ")
            if name:
                found[-1][name] = json.loads(value) if name == "data" else value
            elif found[-1]:
                if len(found) == count:
                    break
                found.append({})
    return found
