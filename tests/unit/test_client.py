"""`shoal.client`: every operation of REST, what is sent again, pages, streams, errors by their codes."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import pytest
from api_port import TRAIN, serving
from asynchronous import asynchronous
from rest_listing import _operations
from shoal.client import Client, JobInfo, NoController, RestProblem, rest_answers
from shoal_controller.api import answers
from shoal_protos import path_part
from shoal_protos.errors import UserError
from shoal_protos.release import RELEASE
from tiers import check
from told_controller import answering

pytestmark = check("serves REST on real ports")

SHOWN = {
    "JobInfo": "JobAnswer", "WorkerNumbers": "WorkerCounts", "WorkerInfo": "WorkerAnswer", "EventInfo": "EventAnswer",
    "EventOfJobInfo": "EventOfJobAnswer",
    "CheckpointInfo": "CheckpointAnswer", "GenerationInfo": "GenerationAnswer", "ReportInfo": "ReportAnswer",
}  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


OPERATIONS = {
    "list_jobs", "create_job", "get_job", "delete_job", "get_job_spec", "scale_job", "pause_job", "resume_job",
    "get_report", "list_workers", "drain_worker", "confirm_worker_lost", "list_events", "list_newest_events",
    "list_checkpoints", "save_checkpoint", "get_join_token", "list_tokens", "create_token", "rotate_token",
    "revoke_token",
}  # fmt: skip
"""What programs do with a controller."""


def test_operations_of_rest_are_methods_and_what_is_answered_is_what_rest_answers() -> None:
    named = {operation["operationId"].partition("_v1_")[0] for _, _, operation in _operations({})}
    assert named >= OPERATIONS and set(dir(Client)) >= OPERATIONS
    for name, shown in SHOWN.items():
        assert set(getattr(rest_answers, name).model_fields) <= set(getattr(answers, shown).model_fields), name


def test_neither_torch_nor_the_controller_is_imported() -> None:
    code = "import sys, shoal.client; print([n for n in ('torch', 'shoal_controller', 'fastapi') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


async def apart(call: Any, *given: Any, **named: Any) -> Any:
    """In a thread, beside the controller; lists as lists."""

    def made() -> Any:
        answer = call(*given, **named)
        return list(answer) if inspect.isgenerator(answer) else answer

    return await asyncio.to_thread(made)


@asynchronous
async def test_a_real_controller_answers_with_objects_and_refuses_by_code(tmp_path: Any) -> None:
    async with serving(tmp_path) as api:
        with Client(f"http://127.0.0.1:{api.port}") as shoal:
            made = await apart(shoal.create_job, TRAIN)
            assert isinstance(made, JobInfo) and (made.workers.wanted, made.phase, made.is_over) == (
                3,
                "waiting",
                False,
            )
            assert await apart(shoal.get_job, "train") == made
            assert (await apart(shoal.get_job_spec, "train"))["lanes"] == 8
            scaled = await apart(shoal.scale_job, "train", 4, if_version=made.version)
            assert scaled.workers.wanted == 4
            with pytest.raises(RestProblem) as late:
                await apart(shoal.scale_job, "train", 5, if_version=made.version)
            assert (late.value.code, late.value.version) == ("version_mismatch", scaled.version)
            assert (await apart(shoal.get_report, "train")).steps == 0
            assert await apart(shoal.list_workers, "train") == await apart(shoal.list_checkpoints, "train") == []
            assert (await apart(shoal.delete_job, "train")).is_over
            assert (await apart(shoal.wait_for_job, "train", timeout_seconds=0)).phase == "cancelled"
            for call, code in (
                (partial(shoal.get_job, "no.pe"), "job_unknown"),
                (partial(shoal.create_job, {"job": "x", "lanse": 1, "wrkers": {}}), "invalid_request"),
                (partial(shoal.create_token, "ci", "view"), "no_tokens_here"),
            ):
                with pytest.raises(RestProblem) as refused:
                    await apart(call)
                assert refused.value.code == code
            with pytest.raises(TimeoutError, match="job again is waiting at step 0 after 0 s"):
                await apart(shoal.create_job, {"job": "again"})
                await apart(shoal.wait_for_job, "again", timeout_seconds=0)


@asynchronous
async def test_lists_go_on_over_their_pages(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.client.rest_client.PAGE", 2)
    async with serving(tmp_path) as api:
        with Client(f"http://127.0.0.1:{api.port}") as shoal:
            for name in "dcbae":
                await apart(shoal.create_job, {"job": name})
            for workers in (2, 3, 4):
                await apart(shoal.scale_job, "a", workers)
            assert [job.job for job in await apart(shoal.list_jobs)] == list("abcde")
            events = await apart(shoal.list_events, "a")
            assert [event.revision for event in events] == list(range(1, len(events) + 1)) and len(events) > 4
            assert await apart(shoal.list_events, "a", after=3) == events[3:]


@asynchronous
async def test_tokens_are_found_made_used_and_revoked(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".shoal").mkdir()
    (tmp_path / ".shoal/token").write_text("secret\n")
    async with serving(tmp_path / "store", token="secret") as api:
        url = f"http://127.0.0.1:{api.port}"
        with Client(url) as shoal, Client(url, "wrong") as stranger:
            made = await apart(shoal.create_token, "ci", "view", days=3)
            assert [one.name for one in await apart(shoal.list_tokens)] == ["ci"] and made.token
            monkeypatch.setenv("SHOAL_TOKEN", made.token)
            with Client(url) as viewer:
                assert await apart(viewer.list_jobs) == []
                with pytest.raises(RestProblem) as refused:
                    await apart(viewer.create_job, TRAIN)
                assert refused.value.code == "role_too_low"
            assert (await apart(shoal.rotate_token, "ci", keep_seconds=0)).token != made.token
            assert (await apart(shoal.revoke_token, "ci")).name == "ci"
            with pytest.raises(RestProblem) as refused:
                await apart(stranger.list_jobs)
            assert (refused.value.code, refused.value.status) == ("unauthorized", 401)


@asynchronous
async def test_a_stream_brings_what_happens_until_the_controller_is_gone(tmp_path: Any) -> None:
    async with serving(tmp_path) as api:
        shoal = Client(f"http://127.0.0.1:{api.port}", retry_seconds=0)
        await apart(shoal.create_job, TRAIN)
        following = shoal.follow_events("train")
        seen = [await asyncio.to_thread(next, following)]
        await apart(shoal.scale_job, "train", 4)
        seen += [await asyncio.to_thread(next, following) for _ in range(2)]
    with shoal, pytest.raises(NoController):
        await asyncio.to_thread(next, following)
    assert [event.revision for event in seen] == [1, 2, 3]


@asynchronous
async def test_the_events_of_all_jobs_are_one_stream(tmp_path: Any) -> None:
    async with serving(tmp_path) as api:
        shoal = Client(f"http://127.0.0.1:{api.port}", retry_seconds=0)
        await apart(shoal.create_job, {"job": "a"})
        earlier = await apart(shoal.list_newest_events)
        assert {event.job for event in earlier} == {"a"}
        following = shoal.follow_newest_events()
        first = asyncio.ensure_future(asyncio.to_thread(next, following))
        names = (f"b{number}" for number in range(1000))
        while not first.done():  # it follows from some moment on
            await apart(shoal.create_job, {"job": next(names)})
        assert (await first).job.startswith("b")
    with shoal, pytest.raises(NoController):
        while True:
            await asyncio.to_thread(next, following)


class Moody(BaseHTTPRequestHandler):
    """Answers what the test has put in, one after the other; `None` hangs up."""

    answers: ClassVar[list[tuple[int, dict[str, str], Any] | None]] = []
    requests: ClassVar[list[tuple[str, str | None]]] = []

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.requests.append((f"{self.command} {self.path}", self.headers.get("idempotency-key")))
        given = self.answers.pop(0)
        if given is None:
            self.close_connection = True
            return
        status, headers, body = given
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        streamed = "".join(f"data: {json.dumps(one)}\n\n" for one in body) if "content-type" in headers else ""
        self.wfile.write((streamed or json.dumps(body)).encode())

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Not on standard error."""


@pytest.fixture
def moody() -> Iterator[str]:
    Moody.answers, Moody.requests = [], []
    with answering(Moody) as url:
        yield url


def problem(code: str, status: int = 503, retry: str = "0") -> tuple[int, dict[str, str], Any]:
    return status, {"Retry-After": retry}, {"code": code, "detail": f"it is {code}"}


def test_a_stream_that_breaks_is_opened_again_after_the_last_event(moody: str) -> None:
    def events(*numbers: int) -> tuple[int, dict[str, str], Any]:
        return 200, {"content-type": "text/event-stream"}, [event(number) for number in numbers]

    with Client(moody) as shoal:
        Moody.answers = [events(1, 2), problem("not_leading"), events(3)]
        following = shoal.follow_events("j")
        assert [next(following).revision for _ in range(3)] == [1, 2, 3]
    assert [asked for asked, _ in Moody.requests] == [
        "GET /v1/jobs/j/events?after=0", *["GET /v1/jobs/j/events?after=2"] * 2,
    ]  # fmt: skip


def event(revision: int) -> dict[str, Any]:
    return {
        "revision": revision,
        "time": 1.0,
        "kind": "scaled",
        "generation": 0,
        "worker": "",
        "message": "",
        "data": {},
    }


JOB = {
    "job": "j", "phase": "running", "generation": 3, "workers": {"wanted": 3, "active": 2, "min": 1, "max": None},
    "lanes": 8, "step": 7, "max_steps": 100, "loss": 1.25, "samples": 56, "last_checkpoint_step": None, "reason": "",
    "created": 1.0, "started": None, "ended": None, "version": "a-1", "a_key_of_the_future": 1,
}  # fmt: skip


def test_what_cannot_be_now_is_asked_again_and_what_may_be_done_is_not(moody: str) -> None:
    with Client(moody) as shoal:
        Moody.answers = [problem("not_leading"), problem("too_many_failures", 429), (202, {}, JOB)]
        assert shoal.scale_job("j", 3).step == 7
        assert len(Moody.requests) == 3
        for answer, error in ((problem("outcome_unknown"), RestProblem), (None, NoController)):
            Moody.answers, Moody.requests[:] = [answer], []
            with pytest.raises(error) as unknown:
                shoal.pause_job("j")
            assert unknown.value.may_be_done and len(Moody.requests) == 1


def test_a_lost_answer_makes_no_second_job_and_keeps_no_reader_waiting(moody: str) -> None:
    with Client(moody) as shoal:
        Moody.answers = [None, problem("outcome_unknown"), (202, {}, JOB)]
        shoal.create_job({"job": "j"})
        assert len({key for _, key in Moody.requests}) == 1 and len(Moody.requests) == 3
        Moody.answers = [None, (200, {}, JOB), (202, {}, JOB)]
        assert shoal.get_job("j").loss == 1.25
        shoal.create_job({"job": "j"}, key="mine")
        assert Moody.requests[-1] == ("POST /v1/jobs", "mine") != Moody.requests[0]


def test_nothing_is_asked_again_beyond_the_time_for_it(moody: str) -> None:
    with Client(moody, retry_seconds=30) as shoal:
        Moody.answers = [problem("store_unavailable", retry="31")]
        with pytest.raises(RestProblem, match="it is store_unavailable"):
            shoal.get_job("j")
    with Client(moody, retry_seconds=0) as shoal:
        Moody.answers = [problem("not_leading")]
        with pytest.raises(RestProblem, match="it is not_leading"):
            shoal.get_job("j")


@pytest.mark.parametrize(
    "answer", [(502, {}, {"message": "bad gateway"}), (404, {}, {"detail": "Not Found"}), (200, {}, [1]), (200, {}, {})]
)
def test_what_is_no_controller_is_said_so(moody: str, answer: Any) -> None:
    Moody.answers = [answer]
    with Client(moody) as shoal, pytest.raises(NoController, match="is it a Shoal controller"):
        list(shoal.list_jobs())


@pytest.mark.parametrize("jobs", [3, [3], [{}], [{"job": "train", "phase": 3}]])
def test_an_answer_of_another_release_that_cannot_be_read_is_said_with_both_releases(moody: str, jobs: Any) -> None:
    Moody.answers = [(200, {"shoal-release": "9.9.9"}, {"jobs": jobs})]
    both = f"its controller is of shoal 9.9.9, this is shoal {re.escape(RELEASE)}. Use one release for both"
    with Client(moody) as shoal, pytest.raises(NoController, match=rf"returned an unknown answer .*; {both}$"):
        list(shoal.list_jobs())


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("127.0.0.1:7070", "the controller's URL is '127.0.0.1:7070'; expected something like http://127.0.0.1:7070"),
        ("http://me:secret@h", "the controller's URL has a user or a password in it; set SHOAL_TOKEN instead"),
        ("http://me:secret@[x", "the controller's URL has a user or a password in it; set SHOAL_TOKEN instead"),
        (
            "http://127.0.0.1:70x",
            "the controller's URL is 'http://127.0.0.1:70x' (Invalid port: '70x'); expected something like "
            "http://127.0.0.1:7070",
        ),
        (
            "http://127.0.0.1:70707",
            "the controller's URL is 'http://127.0.0.1:70707' (Port out of range 0-65535); expected something like "
            "http://127.0.0.1:7070",
        ),
        (
            "http://[::1",
            "the controller's URL is 'http://[::1' (Invalid IPv6 URL); expected something like http://127.0.0.1:7070",
        ),
        (
            "http://999.0.0.1",
            "the controller's URL is 'http://999.0.0.1' (Invalid IPv4 address: '999.0.0.1'); expected something like "
            "http://127.0.0.1:7070",
        ),
    ],
)
def test_a_wrong_address_is_refused_and_one_without_a_controller_named(url: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        Client(url)
    assert str(refused.value) == sentence
    with (
        Client("http://127.0.0.1:1", retry_seconds=0) as shoal,
        pytest.raises(NoController, match=r"^no controller answers at http://127\.0\.0\.1:1 \(") as gone,
    ):
        shoal.get_job("j")
    assert not gone.value.may_be_done


NO_NAME = f"is no name of a job, a worker or a token; expected {path_part.NAME_EXPECTED}"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda shoal: shoal.get_job("\udcff"), f'"\\udcff" {NO_NAME}'),
        (lambda shoal: next(shoal.list_workers("\udcff")), f'"\\udcff" {NO_NAME}'),
        (lambda shoal: shoal.drain_worker("j", "\udcff"), f'"\\udcff" {NO_NAME}'),
        (lambda shoal: shoal.rotate_token("\udcff"), f'"\\udcff" {NO_NAME}'),
        (lambda shoal: shoal.get_join_token(".."), f'".." {NO_NAME}'),
        (
            lambda shoal: shoal.get_job("x" * 301),
            f'"{"x" * 78}… is no name: it has 301 characters; expected at most 300',
        ),
        (lambda shoal: shoal.create_job({"job": "\udcff"}), path_part.NOT_TEXT),
        (lambda shoal: shoal.drain_worker("j", "w0", grace_seconds=math.inf), path_part.NOT_FINITE),
        (
            lambda shoal: shoal.create_job({"job": "j"}, key="ü"),
            "the header Idempotency-Key is '\\xfc'; expected printable ASCII, no blanks around it",
        ),
        (
            lambda shoal: shoal.delete_job("j", if_version="1\n"),
            "the header If-Match is '\"1\\n\"'; expected printable ASCII, no blanks around it",
        ),
    ],
)
def test_what_no_request_can_carry_is_refused_before_it_is_sent(call: Callable[[Client], Any], sentence: str) -> None:
    with Client("http://127.0.0.1:1", retry_seconds=0) as shoal, pytest.raises(UserError) as refused:
        call(shoal)
    assert str(refused.value) == sentence
