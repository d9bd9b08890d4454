"""REST against a real port: its routes, every error a problem with its sentence, streams that end."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from asynchronous import asynchronous
from shoal_controller import logs
from shoal_controller.api.app import ApiSettings, build_app
from shoal_controller.api.guard import MOST_BODY_BYTES
from shoal_controller.api.web import Web
from shoal_controller.core.machine.effects import Note
from shoal_controller.core.machine.events import ConfirmLost, DrainWorker, Pause, Resume, Save
from shoal_controller.core.machine.spec import JobSpec, Phase, ResizeView, State, WorkerView
from shoal_controller.shell import Shell
from shoal_controller.store.open import open_store
from shoal_controller.tokens import token_of_job
from shoal_protos.checkpoint import CheckpointRef
from small_machine import SmallMachine, Written

ATTACKS = sorted((Path(__file__).parents[1] / "attacks" / "rest").glob("*.json"))
HERE = Path(__file__).parent


class Api:
    """A shell with a small machine behind a real port."""

    def __init__(self, shell, machine, client, port) -> None:
        self.shell = shell
        self.machine = machine
        self.client = client
        self.port = port

    async def ask(self, method, path, status=200, **given):
        answer = await self.client.request(method, path, **given)
        assert answer.status_code == status, answer.text
        return answer.json()


@asynccontextmanager
async def serving(directory, settings=None, machine=None):
    logs.configure("warning")
    store = await open_store(f"embedded:{directory}")
    machine = machine or SmallMachine()
    shell = Shell(store, step=machine.step, view=machine.view)
    shell.connect(Written().outside())
    await shell.start()
    web = Web("127.0.0.1", 0)
    await web.start(build_app(shell, lambda: b"figures 1\n", settings or ApiSettings(default_workers=2)), shell.give_up)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{web.port}", trust_env=False) as client:
            yield Api(shell, machine, client, web.port)
    finally:
        await shell.stop()
        await web.stop()
        await store.close()


TRAIN = {"job": "train", "workers": {"wanted": 3, "min": 2, "max": 6}, "lanes": 8}


# ---- jobs


@asynchronous
async def test_a_job_is_created_shown_listed_scaled_and_deleted(tmp_path):
    async with serving(tmp_path) as api:
        shown = {
            "job": "train", "phase": "waiting", "generation": 1,
            "workers": {"wanted": 3, "active": 0, "min": 2, "max": 6}, "lanes": 8, "step": 0,
            "max_steps": None, "loss": None, "samples": None, "last_checkpoint_step": None, "reason": "as it should be",
        }  # fmt: skip
        assert await api.ask("GET", "/v1/jobs") == {"jobs": []}
        assert await api.ask("POST", "/v1/jobs", 202, json=TRAIN) == shown
        assert await api.ask("GET", "/v1/jobs/train") == shown
        assert await api.ask("GET", "/v1/jobs") == {"jobs": [shown]}
        scaled = shown | {"workers": shown["workers"] | {"wanted": 4}}
        assert await api.ask("POST", "/v1/jobs/train/scale", 202, json={"workers": 4}) == scaled
        assert await api.ask("DELETE", "/v1/jobs/train", 202) == scaled | {"phase": "cancelled"}
        assert (await api.ask("GET", "/v1/jobs/train/events"))["events"][-1]["message"] == "cancelled by an operator"


@asynchronous
async def test_a_created_job_says_where_it_is(tmp_path):
    async with serving(tmp_path) as api:
        answer = await api.client.post("/v1/jobs", json=TRAIN)
        assert answer.headers["location"] == "/v1/jobs/train"


@asynchronous
async def test_defaults_are_those_of_the_interfaces(tmp_path):
    async with serving(tmp_path, ApiSettings(default_workers=5)) as api:
        await api.ask("POST", "/v1/jobs", 202, json={"job": "a"})
        assert replace(api.shell._runners["a"].spec, run="") == JobSpec(
            "a", wanted=5, wanted_by_default=True, min_workers=1, max_workers=None, launcher="none", command=(), env={},
            lanes=None, heartbeat_seconds=1.0, suspect_after=3, reconnect_seconds=10.0, progress_seconds=10.0,
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
async def test_workers_are_shown_as_the_interfaces_say(tmp_path):
    async with serving(tmp_path, machine=SmallMachine(shown={"workers": (WORKER,)})) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        assert await api.ask("GET", "/v1/jobs/train/workers") == {
            "workers": [{
                "worker": "w0", "host": "h", "pid": 7, "state": "active", "rank": 0, "lanes": [0, 2], "blocks": 5,
                "mirrored_blocks": 4, "step": 9, "step_seconds": 0.25, "memory_bytes": 1000, "log": "/logs/w0.log",
            }],
        }  # fmt: skip


@asynchronous
async def test_checkpoints_are_listed_newest_first(tmp_path):
    found = (CheckpointRef(3, 40, "/c/step-40", 99), CheckpointRef(1, 20, "/c/step-20"))
    shown = {"checkpoints": found, "last_checkpoint_step": 40}
    async with serving(tmp_path, machine=SmallMachine(shown=shown)) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        assert await api.ask("GET", "/v1/jobs/train/checkpoints") == {
            "checkpoints": [
                {"step": 40, "generation": 3, "path": "/c/step-40", "bytes": 99},
                {"step": 20, "generation": 1, "path": "/c/step-20", "bytes": 0},
            ]
        }
        assert (await api.ask("GET", "/v1/jobs/train"))["last_checkpoint_step"] == 40


@asynchronous
async def test_the_report_is_the_one_of_the_interfaces(tmp_path):
    shown = {"step": 100, "fingerprint": "ab", "loss": 1.5, "resizes": (RESIZE,), "step_seconds_median": 0.2}
    async with serving(tmp_path, machine=SmallMachine(shown=shown | {"phase": Phase.SUCCEEDED})) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        assert await api.ask("GET", "/v1/jobs/train/report") == {
            "job": "train", "steps": 100, "fingerprint": "ab", "final_loss": 1.5,
            "generations": [{
                "generation": 2, "workers": 2, "reason": "kill", "from_step": 40, "pause_seconds": 0.3,
                "phases": {"plan": 0.1}, "promoted_blocks": 5, "bytes": {"pause": 0, "fill": 100, "checkpoint": 0},
                "lost_steps": 0,
            }],
            "step_seconds_median": 0.2,
        }  # fmt: skip


# ---- events


@asynchronous
async def test_events_are_listed_from_any_revision_on(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        for workers in (2, 3, 4):
            await api.ask("POST", "/v1/jobs/train/scale", 202, json={"workers": workers})
        events = (await api.ask("GET", "/v1/jobs/train/events?after=1"))["events"]
        assert [event.pop("time") > 1.7e9 for event in events] == [True, True]
        assert events[0] == {
            "revision": 2, "kind": "scale", "generation": 0, "worker": "", "message": "scaled to 3",
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
        async with api.client.stream("GET", "/v1/jobs/train/events", headers={"accept": "text/event-stream"}) as answer:
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
        events = await stream_lines(api, "/v1/jobs/train/events", {}, 1)
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
async def test_a_problem_has_all_that_the_rfc_names(tmp_path):
    async with serving(tmp_path) as api:
        assert await api.ask("GET", "/v1/jobs/nope", 404) == {
            "type": "about:blank", "title": "Not Found", "status": 404,
            "detail": "there is no job nope; there are none yet", "instance": "/v1/jobs/nope",
        }  # fmt: skip


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
        assert await api.ask("GET", "/healthz") == {"status": "ok", "trouble": ""}


# ---- health, figures, doors


@asynchronous
async def test_health_readiness_and_figures_are_told_apart(tmp_path):
    async with serving(tmp_path) as api:
        assert await api.ask("GET", "/healthz") == {"status": "ok", "trouble": ""}
        assert await api.ask("GET", "/readyz") == {"status": "ready", "trouble": ""}
        figures = await api.client.get("/metrics")
        assert figures.text == "figures 1\n" and figures.headers["content-type"].startswith("text/plain; version=0.0.4")
        api.shell.give_up(RuntimeError("the disk is gone"))
        assert await api.ask("GET", "/healthz") == {"status": "ok", "trouble": ""}
        problem = await api.ask("GET", "/readyz", 503)
        assert problem["detail"] == "this controller has stopped: the disk is gone"


@asynchronous
async def test_the_documentation_is_served(tmp_path):
    async with serving(tmp_path) as api:
        assert "swagger" in (await api.client.get("/docs")).text
        assert (await api.ask("GET", "/openapi.json"))["info"]["title"] == "Shoal"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, "no token"),
        ("Bearer nope", "another token"),
        ("Basic c2VjcmV0", "another token"),
        ("Bearer sécret", "another token"),
        (f"Bearer {token_of_job('secret', 'demo')}", "a token for workers, which is not one for operators"),
    ],
)
@asynchronous
async def test_without_the_token_only_health_and_documentation_answer(tmp_path, header, found):
    async with serving(tmp_path, ApiSettings(2, token="secret")) as api:
        headers = {} if header is None else {"authorization": header.encode()}
        for path in ("/v1/jobs", "/metrics", "/nothing"):
            answer = await api.client.get(path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["detail"] == (
                f"the request shows {found}; send the header `Authorization: Bearer TOKEN` "
                "with the controller's SHOAL_TOKEN (`shoal run` keeps its own in .shoal/token where it was started)"
            )
        for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
            assert (await api.client.get(path, headers=headers)).status_code == 200


@asynchronous
async def test_with_the_token_everything_answers_under_any_host_name(tmp_path):
    async with serving(tmp_path, ApiSettings(2, token="secret")) as api:
        headers = {"authorization": "Bearer secret", "host": "shoal.example:7070"}
        assert await api.ask("GET", "/v1/jobs", headers=headers) == {"jobs": []}


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:7", "127.1.2.3", "[::1]:7070"])
@asynchronous
async def test_this_machine_has_several_names(tmp_path, host):
    async with serving(tmp_path) as api:
        assert await api.ask("GET", "/v1/jobs", headers={"host": host}) == {"jobs": []}


@asynchronous
async def test_a_port_that_is_open_to_others_answers_to_any_name(tmp_path):
    async with serving(tmp_path, ApiSettings(2, here_only=False)) as api:
        assert await api.ask("GET", "/v1/jobs", headers={"host": "node7.cluster"}) == {"jobs": []}


ELSEWHERE = {"origin": "https://example.org"}
FOREIGN = [
    ELSEWHERE,
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://["},
    {"origin": "http://127.0.0.1:3000"},
    {"origin": "http://127.0.0.1:7070.example.org"},
    {"origin": "http://example.org@127.0.0.1:7070"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("door", [ApiSettings(2), ApiSettings(2, token="secret"), ApiSettings(2, here_only=False)])
@asynchronous
async def test_what_a_browser_sends_for_another_sites_page_is_refused(tmp_path, headers, door):
    async with serving(tmp_path, door) as api:
        given = headers | {"host": "127.0.0.1:7070", "authorization": "Bearer secret"}
        for method, path in (("POST", "/v1/jobs/demo/pause"), ("GET", "/v1/jobs"), ("GET", "/metrics")):
            answer = await api.client.request(method, path, headers=given)
            assert answer.status_code == 403
            assert answer.json()["detail"] == (
                f"the request comes from a web page of {headers.get('origin') or 'another site'}; "
                "a controller answers to programs and to its own pages only"
            )


@asynchronous
async def test_a_name_that_anybody_can_give_this_address_makes_no_page_its_own(tmp_path):
    rebound = {"origin": "http://example.org:7070", "host": "example.org:7070"}
    async with serving(tmp_path, ApiSettings(2, here_only=False)) as api:
        assert (await api.client.post("/v1/jobs/demo/pause", headers=rebound)).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:7070", "host": "127.0.0.1:7070", "sec-fetch-site": "same-origin"},
        {"origin": "http://[::1]:7070", "host": "[::1]:7070"},
        {"sec-fetch-site": "none"},
        {},
    ],
)
@asynchronous
async def test_its_own_pages_and_programs_are_answered(tmp_path, headers):
    async with serving(tmp_path) as api:
        assert await api.ask("GET", "/v1/jobs", headers=headers) == {"jobs": []}


@asynchronous
async def test_a_launcher_that_is_not_allowed_starts_nothing(tmp_path):
    async with serving(tmp_path, ApiSettings(2, launchers=frozenset({"none"}))) as api:
        body = {"job": "demo", "launcher": "local", "command": ["id"]}
        answer = await api.client.post("/v1/jobs", json=body)
        assert (answer.status_code, answer.json()["detail"]) == (
            403,
            "`launcher` is local; this controller allows none (its SHOAL_LAUNCHERS)",
        )
        assert await api.ask("GET", "/v1/jobs") == {"jobs": []}


@asynchronous
async def test_an_answer_on_a_kept_connection_does_not_wait_for_an_acknowledgement(tmp_path):
    async with serving(tmp_path) as api:
        loop = asyncio.get_running_loop()
        seconds = []
        for _ in range(9):
            began = loop.time()
            await api.ask("GET", "/healthz")
            seconds.append(loop.time() - began)
        assert sorted(seconds)[2] < 0.04  # with Nagle's algorithm on nearly all take so long, and more


# ---- frozen


def test_routes_and_bodies_are_the_frozen_ones():
    from rest_listing import listing

    file = HERE / "frozen" / "rest.txt"
    assert listing() == file.read_text(), f"REST has changed; if that is meant: python tests/rest_listing.py > {file}"
