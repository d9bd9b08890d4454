"""REST against a real port: its routes, every error a problem with its sentence, streams that end."""

import asyncio
import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from api_port import NO_JOBS, TRAIN, serving
from asynchronous import asynchronous
from rule import Edit, rule
from shoal_controller.api import web
from shoal_controller.api.app import ApiSettings
from shoal_controller.core.machine.effects import Note
from shoal_controller.core.machine.spec import JobSpec, Phase, ResizeView, State, WorkerView
from shoal_protos.acts import ConfirmLost, DrainWorker, Pause, Resume, Save
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.gpu import Gpu, Throttle
from shoal_protos.strict_json import MOST_BODY_BYTES
from small_machine import SmallMachine

ATTACKS = sorted((Path(__file__).parents[1] / "attacks" / "rest").glob("*.json"))
HERE = Path(__file__).parent


# ---- jobs


@asynchronous
async def test_a_job_is_created_shown_listed_scaled_and_deleted(tmp_path):
    async with serving(tmp_path) as api:
        shown = {
            "job": "train", "phase": "waiting", "generation": 1,
            "workers": {"wanted": 3, "active": 0, "min": 2, "max": 6, "spares": 0, "active_spares": 0},
            "lanes": 8, "step": 0,
            "idle_lane_ratio": None, "idle_lanes": "", "goodput": "", "owner": "",
            "max_steps": None, "loss": None, "samples": None, "last_checkpoint_step": None, "paused": False,
            "reason": "as it should be",
                "reports": {},
        }  # fmt: skip
        assert await api.ask("GET", "/v1/jobs") == NO_JOBS
        made = await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        run = made["version"].removesuffix("-0")
        shown |= {"created": made["created"], "started": None, "ended": None, "version": f"{run}-0"}
        assert made == shown and time.time() - 60 < made["created"] <= time.time()
        assert await api.ask("GET", "/v1/jobs/train") == shown
        assert await api.ask("GET", "/v1/jobs") == {"jobs": [shown], "next": None}
        scaled = shown | {"workers": shown["workers"] | {"wanted": 4}, "version": f"{run}-1"}
        assert await api.ask("POST", "/v1/jobs/train/scale", 202, json={"workers": 4}) == scaled
        scaled = shown | {
            "workers": {"wanted": 4, "active": 0, "min": 1, "max": 8, "spares": 0, "active_spares": 0},
            "version": f"{run}-2",
        }
        assert await api.ask("POST", "/v1/jobs/train/scale", 202, json={"min": 1, "max": 8}) == scaled
        assert await api.ask("DELETE", "/v1/jobs/train", 202) == scaled | {"phase": "cancelled", "version": f"{run}-3"}
        assert (await api.ask("GET", "/v1/jobs/train/events"))["events"][-1]["message"] == "cancelled by an operator"


@asynchronous
async def test_a_created_job_says_where_it_is(tmp_path):
    async with serving(tmp_path) as api:
        answer = await api.client.post("/v1/jobs", json=TRAIN)
        assert answer.headers["location"] == "/v1/jobs/train"


@asynchronous
async def test_a_spec_of_a_name_alone_gets_these_defaults(tmp_path):
    async with serving(tmp_path, ApiSettings(default_workers=5)) as api:
        await api.ask("POST", "/v1/jobs", 202, json={"job": "a"})
        assert replace(api.shell._runners["a"].spec, run="") == JobSpec(
            "a", wanted=5, wanted_by_default=True, min_workers=None, max_workers=None, launcher="none", command=(),
            env={}, lanes=None, heartbeat_seconds=1.0, suspect_after=3, reconnect_seconds=10.0, progress_seconds=10.0,
            stall_seconds=1800.0, max_restarts=3, resume=None,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "lanes", "wanted"),
    [({}, None, 2), ({"min": 3}, None, 3), ({"max": 1}, None, 1), ({}, 1, 1), ({"min": 4, "max": 4}, 8, 4)],
)
@asynchronous
async def test_the_default_for_wanted_stays_within_what_is_given(tmp_path, workers, lanes, wanted):
    async with serving(tmp_path) as api:
        job = await api.ask("POST", "/v1/jobs", 202, json={"job": "a", "workers": workers, "lanes": lanes})
        assert job["workers"]["wanted"] == wanted


@asynchronous
async def test_everything_that_a_spec_can_say_reaches_the_job(tmp_path):
    spec = {
        "job": "A.b_c-1", "workers": {"wanted": 2}, "launcher": "local", "command": ["python", "train.py", "ä"],
        "env": {"A": "ü"}, "heartbeat_seconds": 0.5, "suspect_after": 5, "reconnect_seconds": 3, "stall_seconds": 60,
        "max_restarts": 0, "resume": False, "lanes": 4,
    }  # fmt: skip
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=spec)
        assert replace(api.shell._runners["A.b_c-1"].spec, run="") == JobSpec(
            "A.b_c-1", wanted=2, launcher="local", command=("python", "train.py", "ä"), env={"A": "ü"},
            lanes=4, heartbeat_seconds=0.5, suspect_after=5, reconnect_seconds=3.0, stall_seconds=60.0, max_restarts=0,
            resume=False,
        )  # fmt: skip


@asynchronous
async def test_wishes_reach_the_job_with_their_defaults(tmp_path):
    requests = []
    kinds = (Pause, Resume, DrainWorker, ConfirmLost, Save)
    machine = SmallMachine({kind: lambda _, event: requests.append(event) or () for kind in kinds})
    async with serving(tmp_path, machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        for path, body in [
            ("pause", None), ("resume", None), ("workers/w1/drain", None), ("workers/w1/drain", {}),
            ("workers/w1/drain", {"grace_seconds": 0}), ("workers/w1/lost", None), ("checkpoints", None),
        ]:  # fmt: skip
            assert (await api.ask("POST", f"/v1/jobs/train/{path}", 202, json=body))["job"] == "train"
        drains = [DrainWorker("w1", 30.0), DrainWorker("w1", 30.0), DrainWorker("w1", 0.0)]
        assert requests == [Pause(), Resume(), *drains, ConfirmLost("w1"), Save()]


WORKER = WorkerView(
    worker="w0", host="h", pid=7, state=State.ACTIVE, rank=0, lanes=(0, 2), blocks=5, mirrored_blocks=4, step=9,
    step_seconds=0.25, memory_bytes={"parameters": 10, "rss": 1000}, log="/logs/w0.log", heartbeat_age_seconds=0.5,
)  # fmt: skip
RESIZE = ResizeView(
    generation=2, workers=2, reason="kill", from_step=40, pause_seconds=0.3, phases={"plan": 0.1}, promoted_blocks=5,
    pause_bytes=0, fill_bytes=100, checkpoint_bytes=0, lost_steps=0,
)  # fmt: skip


@asynchronous
async def test_workers_are_shown_with_these_keys(tmp_path):
    async with serving(tmp_path, machine=SmallMachine(shown={"workers": (WORKER,)})) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        assert await api.ask("GET", "/v1/jobs/train/workers") == {
            "workers": [{
                "worker": "w0", "host": "h", "pid": 7, "state": "active", "rank": 0, "lanes": [0, 2], "blocks": 5,
                "mirrored_blocks": 4, "step": 9, "step_seconds": 0.25, "memory_bytes": 1000, "log": "/logs/w0.log",
                "pod": "", "node": "", "why": "", "domain": "", "heartbeat_age_seconds": 0.5, "waited_for_seconds": 0.0,
                "activity": {
                    "phase": "", "seconds": 0.0, "waits_for": [],
                    "sentence": "has not been heard of since this controller leads",
                },
            }],
            "next": None,
        }  # fmt: skip


@asynchronous
async def test_a_worker_on_a_gpu_has_what_it_tells_of_it(tmp_path):
    gpu = Gpu("NVIDIA H100 80GB HBM3", 3, 0.97, 5, 10, None, Throttle.HEAT, "GPU 3 does not tell its temperature")
    async with serving(tmp_path, machine=SmallMachine(shown={"workers": (replace(WORKER, gpu=gpu),)})) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        (worker,) = (await api.ask("GET", "/v1/jobs/train/workers"))["workers"]
        assert worker["gpu"] == {
            "name": "NVIDIA H100 80GB HBM3", "index": 3, "use_ratio": 0.97, "memory_bytes": 5,
            "memory_total_bytes": 10, "celsius": None, "throttled": ["heat"],
            "why": "GPU 3 does not tell its temperature",
        }  # fmt: skip


@asynchronous
async def test_checkpoints_are_listed_newest_first(tmp_path):
    found = (CheckpointRef(3, 40, "/c/step-40", 99), CheckpointRef(1, 20, "/c/step-20", verified=True))
    shown = {"checkpoints": found, "last_checkpoint_step": 40}
    async with serving(tmp_path, machine=SmallMachine(shown=shown)) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        assert await api.ask("GET", "/v1/jobs/train/checkpoints") == {
            "checkpoints": [
                {"step": 40, "generation": 3, "path": "/c/step-40", "bytes": 99, "saved": None, "verified": False},
                {"step": 20, "generation": 1, "path": "/c/step-20", "bytes": 0, "saved": None, "verified": True},
            ],
            "next": None,
        }
        assert (await api.ask("GET", "/v1/jobs/train"))["last_checkpoint_step"] == 40


@asynchronous
async def test_the_report_has_these_keys(tmp_path):
    shown = {"step": 100, "fingerprint": "ab", "loss": 1.5, "resizes": (RESIZE,), "step_seconds_median": 0.2}
    shown |= {"samples": 6400, "goodput_ratio": 0.9}
    async with serving(tmp_path, machine=SmallMachine(shown=shown | {"phase": Phase.SUCCEEDED})) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        assert await api.ask("GET", "/v1/jobs/train/report") == {
            "job": "train", "steps": 100, "fingerprint": "ab", "final_loss": 1.5,
            "generations": [{
                "generation": 2, "workers": 2, "reason": "kill", "from_step": 40, "pause_seconds": 0.3,
                "phases": {"plan": 0.1}, "promoted_blocks": 5, "bytes": {"pause": 0, "fill": 100, "checkpoint": 0},
                "lost_steps": 0,
            }],
            "step_seconds_median": 0.2, "samples": 6400, "goodput_ratio": 0.9,
            "stepping_ratio": 0.0, "wanted_seconds": 0.0, "worker_seconds": {},
        }  # fmt: skip


# ---- events


@asynchronous
async def test_events_are_listed_from_any_revision_on(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        for workers in (2, 3, 4):
            await api.ask("POST", "/v1/jobs/train/scale", 202, json={"workers": workers})
        events = (await api.ask("GET", "/v1/jobs/train/events?after=3"))["events"]
        assert [event.pop("time") > 1.7e9 for event in events] == [True] * 4
        assert [event["kind"] for event in events] == ["audit", "scale", "audit", "scale"]
        assert events[1] == {
            "revision": 5, "kind": "scale", "generation": 0, "worker": "", "message": "scaled to 3",
            "data": {"workers": 3},
        }  # fmt: skip


async def stream_lines(api, path, headers, count):
    """The first so many data lines of a stream."""
    lines = []
    async with api.client.stream("GET", path, headers={"accept": "text/event-stream", **headers}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                lines.append(json.loads(line.removeprefix("data:")))
                if len(lines) == count:
                    break
    return lines


@asynchronous
async def test_a_stream_has_what_was_and_what_comes(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        await api.ask("POST", "/v1/jobs/train/scale", 202, json={"workers": 2})
        streaming = asyncio.ensure_future(stream_lines(api, "/v1/jobs/train/events", {}, 3))
        for workers in (3, 4):
            await api.ask("POST", "/v1/jobs/train/scale", 202, json={"workers": workers})
        assert [event["revision"] for event in await streaming] == [1, 2, 3]


@asynchronous
async def test_a_stream_goes_on_after_the_last_event_that_its_reader_had(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        for workers in (2, 3, 4):
            await api.ask("POST", "/v1/jobs/train/scale", 202, json={"workers": workers})
        events = await stream_lines(api, "/v1/jobs/train/events", {"last-event-id": "2"}, 1)
        assert events[0]["revision"] == 3


@asynchronous
async def test_a_stream_says_that_it_lives_and_ends_with_the_controller(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.api.stream.IDLE_SECONDS", 0.01)
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        async with api.client.stream(
            "GET", "/v1/jobs/train/events?after=1", headers={"accept": "text/event-stream"}
        ) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith(":")
            await api.shell.stop()
            rest = [line async for line in lines]
        assert all(not line or line.startswith(":") for line in rest)


@asynchronous
async def test_a_message_of_many_lines_stays_one_event(tmp_path):
    machine = SmallMachine({Save: [Note("failed", "first\nsecond\r\nthird\n\ndata: {}")]})
    async with serving(tmp_path, machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        await api.shell.submit("train", Save())
        events = await stream_lines(api, "/v1/jobs/train/events?after=1", {}, 1)
        assert events[0]["message"] == "first\nsecond\r\nthird\n\ndata: {}"


# ---- errors


def content_of(attack):
    if "body" in attack:
        return json.dumps(attack["body"]).encode()
    if "raw_hex" in attack:
        return bytes.fromhex(attack["raw_hex"])
    if "raw_repeat" in attack:
        text, times = attack["raw_repeat"]
        return text.encode() * times
    return attack.get("raw", "").encode()


@asynchronous
async def test_every_attack_gets_its_sentence_and_harms_nothing(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json={"job": "train"})
        before = await api.ask("GET", "/v1/jobs")
        wrong = {}
        for file in ATTACKS:
            attack = json.loads(file.read_text())
            headers = {"content-type": "application/json"} | attack.get("headers", {})
            answer = await api.client.request(
                attack["method"], attack["path"], content=content_of(attack), headers=headers
            )
            problem = answer.json()
            expected = (attack["status"], attack["status"], attack["sentence"], "application/problem+json")
            got = (answer.status_code, problem.get("status"), problem.get("detail"), answer.headers["content-type"])
            if got != expected:
                wrong[file.name] = (got, expected)
        assert wrong == {}, json.dumps(wrong, indent=1)
        assert await api.ask("GET", "/v1/jobs") == before
        assert len(ATTACKS) > 70


@asynchronous
async def test_no_path_is_redirected_to_one_without_its_slash(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json={"job": "train"})
        paths = (await api.ask("GET", "/openapi.json"))["paths"]
        assert len(paths) > 20
        for path, operations in paths.items():
            named = path.format(job="train", worker="w0", name="ci", generation=1)
            for method in operations:
                answer = await api.client.request(method, f"{named}/")
                assert (answer.status_code, answer.json()["code"]) == (404, "path_unknown"), (method, path)


@asynchronous
async def test_a_problem_has_all_that_the_rfc_names(tmp_path):
    async with serving(tmp_path) as api:
        assert await api.ask("GET", "/v1/jobs/nope", 404) == {
            "type": "about:blank", "code": "job_unknown", "title": "Not Found", "status": 404,
            "detail": "there is no job nope; there are none yet", "instance": "/v1/jobs/nope",
        }  # fmt: skip


@asynchronous
async def test_a_problem_names_the_path_as_a_reference_whatever_was_asked_for(tmp_path):
    """It had spaces, ended at an escaped question mark, and with two slashes it named another host."""
    named = {"/v1/jobs/a%20b%3Fc%C3%A9": "/v1/jobs/a%20b%3Fc%C3%A9", "//there.example/x": "/.//there.example/x"}
    async with serving(tmp_path) as api:
        for asked, instance in named.items():
            answer = await api.client.get(f"{str(api.client.base_url).rstrip('/')}{asked}")
            assert (answer.status_code, answer.json()["instance"]) == (404, instance)


@asynchronous
async def test_an_answer_has_the_clock_of_its_times_though_the_machines_was_set(tmp_path, monkeypatch):
    async with serving(tmp_path) as api:
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
        answer = await api.client.get("/v1/jobs")
        assert abs(float(answer.headers["shoal-clock"]) - api.shell.clock()) < 600.0


@asynchronous
async def test_a_body_that_grows_on_the_way_is_cut_off(tmp_path):
    async def endless():
        for _ in range(MOST_BODY_BYTES // 1000 + 2):
            yield b" " * 1000

    async with serving(tmp_path) as api:
        headers = {"content-type": "application/json"}
        problem = await api.ask("POST", "/v1/jobs", 413, content=endless(), headers=headers)
        assert problem["detail"] == "the body is larger than 262144 bytes, the most that is accepted"


@asynchronous
async def test_our_own_defect_is_a_problem_without_its_traceback(tmp_path, monkeypatch):
    async with serving(tmp_path) as api:
        monkeypatch.setattr(api.shell, "jobs", lambda: 1 / 0)
        problem = await api.ask("GET", "/v1/jobs", 500)
        assert problem["detail"] == "this is a bug in Shoal; see the controller's log"
        assert await api.ask("GET", "/healthz") == {"status": "ok", "trouble": "", "term": 0}


# ---- health, figures, doors


@asynchronous
async def test_a_request_that_the_end_of_the_controller_cuts_short_is_answered_so(tmp_path, monkeypatch):
    async def slow(*_, **__):
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(web, "FINISH_SECONDS", 0.5)
    asked = asyncio.Event()
    async with serving(tmp_path) as api:
        monkeypatch.setattr(api.shell, "create", slow)
        answer = asyncio.create_task(api.client.post("/v1/jobs", json=TRAIN))
        await asked.wait()
        await api.web.stop()
        problem = (await answer).json()
    assert (problem["status"], problem["code"]) == (503, "outcome_unknown")
    assert problem["detail"] == (
        "this controller is shutting down and has not answered in time; it may have been done: look before you try "
        "again"
    )


@asynchronous
async def test_health_readiness_and_figures_are_told_apart(tmp_path):
    async with serving(tmp_path) as api:
        assert await api.ask("GET", "/healthz") == {"status": "ok", "trouble": "", "term": 0}
        assert await api.ask("GET", "/readyz") == {"status": "ready", "trouble": "", "term": 0}
        figures = await api.client.get("/metrics")
        assert figures.text == "figures 1\n" and figures.headers["content-type"].startswith("text/plain; version=0.0.4")
        api.shell.give_up(RuntimeError("the disk is gone"))
        assert await api.ask("GET", "/healthz") == {"status": "ok", "trouble": "", "term": 0}
        problem = await api.ask("GET", "/readyz", 503)
        assert problem["detail"] == "this controller has stopped: the disk is gone"


@rule(
    "No page of a controller runs a script of another site",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.api.app", "        docs_url=None,", '        docs_url="/docs",'),
)
@asynchronous
async def test_the_documentation_is_a_document_and_no_page_that_runs_a_script_of_another_site(tmp_path):
    async with serving(tmp_path) as api:
        assert (await api.ask("GET", "/openapi.json"))["info"]["title"] == "Shoal"
        for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
            problem = await api.ask("GET", path, 404)
            assert problem["detail"] == f"there is nothing at {path}; /openapi.json lists what there is"


@asynchronous
async def test_a_launcher_that_is_not_allowed_starts_nothing(tmp_path):
    async with serving(tmp_path, ApiSettings(2, launchers=frozenset({"none"}))) as api:
        body = {"job": "demo", "launcher": "local", "command": ["id"]}
        answer = await api.client.post("/v1/jobs", json=body)
        assert (answer.status_code, answer.json()["detail"]) == (
            403,
            "`launcher` is local; this controller allows none (its SHOAL_LAUNCHERS)",
        )
        assert await api.ask("GET", "/v1/jobs") == NO_JOBS


@asynchronous
async def test_an_answer_on_a_kept_connection_does_not_wait_for_an_acknowledgement(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("GET", "/healthz")
        [kept] = api.web._server.server_state.connections
        opened = kept.transport.get_extra_info("socket")
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "with Nagle's algorithm nearly all take 40 ms"


# ---- frozen


def test_routes_and_bodies_are_the_frozen_ones():
    from rest_listing import listing

    file = HERE / "frozen" / "rest.txt"
    assert listing() == file.read_text(), f"REST has changed; if that is meant: python tests/rest_listing.py > {file}"


@asynchronous
async def test_the_openapi_document_says_of_every_route_what_it_answers_when_something_is_wrong(tmp_path):
    async with serving(tmp_path) as api:
        document = await api.ask("GET", "/openapi.json")
        for operations in document["paths"].values():
            for operation in operations.values():
                answers = operation["responses"]
                assert "422" not in answers and {"4XX", "5XX", "401", "429", "503"} <= answers.keys()
                for status in ("4XX", "5XX", "503"):
                    assert list(answers[status]["content"]) == ["application/problem+json"]
                assert answers["503"]["headers"]["Retry-After"]["required"]
                assert operation["security"] in ([], [{"token": []}])
        assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
        assert document["paths"]["/v1/jobs"]["get"]["security"] and not document["paths"]["/healthz"]["get"]["security"]
        events = document["paths"]["/v1/jobs/{job}/events"]["get"]["responses"]["200"]["content"]
        assert set(events) == {"application/json", "text/event-stream"}
        assert "ValidationError" not in document["components"]["schemas"]
