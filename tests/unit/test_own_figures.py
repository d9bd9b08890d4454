"""What a controller counts for itself: which requests and calls count as what, and what nobody can make series of."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from api_faults import Fault
from api_server import PODS
from asynchronous import asynchronous
from fastapi import FastAPI
from pod_team import team
from shoal_controller.access.callers import Unauthorized
from shoal_controller.api.guard import NO_ANSWER, OTHER, WITHOUT_ROUTER, CountedRequests, templates
from shoal_controller.api.routes import router
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.jobs.streams import StreamRefusals
from shoal_controller.launchers.counted import CALLS, CountedLauncher
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi
from shoal_controller.launchers.kubernetes.request_outcomes import ALL_VERBS, OUTCOMES
from shoal_controller.observe.own_figures import LoopLag
from shoal_controller.observe.recent import RecentMost
from shoal_controller.sessions.stream_counts import TooManyStreams
from shoal_protos.errors import Conflict, NotFound, Refused, StoreError, UserError

# ---- requests to REST


def test_every_route_has_its_template() -> None:
    app = FastAPI()
    app.include_router(router)
    assert set(templates()) == {*app.openapi()["paths"], *WITHOUT_ROUTER}


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """200 below /v1, 404 elsewhere; for a path that ends with /gone its client has gone."""
    if not scope["path"].endswith("/gone"):
        status = 200 if scope["path"].startswith("/v1/") else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@asynchronous
async def test_requests_count_by_the_template_of_their_route_and_anything_else_as_other() -> None:
    seen: list[tuple[str, str, str]] = []
    counted = CountedRequests(answers, lambda method, route, code, seconds: seen.append((method, route, code)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(counted), base_url="http://here") as client:
        for method, path in (
            ("GET", "/v1/jobs"), ("DELETE", "/v1/jobs/gpt"), ("POST", "/v1/jobs/gpt/workers/w7/drain"),
            ("POST", "/v1/tokens/me/rotate"), ("GET", "/metrics"), ("GET", "/v1/jobs/a/b/c/d"), ("BREW", "/etc/passwd"),
        ):  # fmt: skip
            await client.request(method, path)
    assert seen == [
        ("GET", "/v1/jobs", "200"),
        ("DELETE", "/v1/jobs/{job}", "200"),
        ("POST", "/v1/jobs/{job}/workers/{worker}/drain", "200"),
        ("POST", "/v1/tokens/{name}/rotate", "200"),
        ("GET", "/metrics", "404"),
        ("GET", OTHER, "200"),
        (OTHER, OTHER, "404"),
    ]


@asynchronous
async def test_a_request_whose_client_has_gone_counts_once_without_a_status() -> None:
    seen: list[str] = []
    counted = CountedRequests(answers, lambda method, route, code, seconds: seen.append(code))
    scope = {"type": "http", "method": "GET", "path": "/v1/jobs/gone"}
    await counted(scope, None, None)  # type: ignore[arg-type]
    assert seen == [NO_ANSWER]


# ---- calls of launchers, and requests to a cluster


class Unsteady:
    """A launcher that does what the job's name says."""

    def __getattr__(self, name: str) -> Any:
        async def call(*given: Any) -> None:
            job = given[0] if name == "forget" else given[1].job
            if job == "fails":
                raise UserError("no")
            if job == "hangs":
                await asyncio.Event().wait()

        return call


@asynchronous
async def test_a_launchers_calls_count_as_done_failed_or_late() -> None:
    seen: list[tuple[str, str]] = []
    launcher = CountedLauncher(Unsteady(), lambda call, outcome: seen.append((call, outcome)))
    for job, outcome in (("works", "done"), ("fails", "failed"), ("hangs", "late")):
        spec = JobSpec(job, 1)
        calls = (
            launcher.spawn("w0", spec), launcher.kill("w0", spec), launcher.adopt(("w0",), spec), launcher.forget(job)
        )  # fmt: skip
        for call in calls:
            ended = await asyncio.gather(asyncio.wait_for(call, 0.01), return_exceptions=True)
            assert (ended[0] is None) == (outcome == "done")
        assert seen == [(name, outcome) for name in CALLS]
        seen.clear()


@asynchronous
async def test_requests_to_a_cluster_count_by_verb_and_outcome_each_try_for_itself(tmp_path: Any) -> None:
    seen: list[tuple[str, str, bool]] = []
    async with team(tmp_path, "a") as one:
        api = await ClusterApi.connect(one.options.kubeconfig, asked=lambda *asked: seen.append(asked))
        try:
            one.cluster.faults += [Fault("GET", PODS, 429), Fault("GET", PODS, 500), Fault("PATCH", PODS, 409)]
            await api.list(PODS)
            for method in ("PATCH", "GET"):
                with pytest.raises(Exception, match=r"drawn|not found"):
                    await api.ask(method, f"{PODS}/none", {} if method == "PATCH" else None)
        finally:
            await api.close()
    assert seen == [
        ("list", "throttled", True), ("list", "error", True), ("list", "done", False), ("patch", "conflict", False),
        ("get", "refused", False),
    ]  # fmt: skip
    assert {verb for verb, _, _ in seen} <= set(ALL_VERBS) and {outcome for _, outcome, _ in seen} <= set(OUTCOMES)


# ---- sessions, the event loop, inboxes


def test_streams_that_are_refused_count_by_why() -> None:
    refusals = StreamRefusals()
    assert set(refusals.counts.values()) == {0}
    for error in (
        Refused(""), Unauthorized(""), TooManyStreams(""), NotFound(""), UserError(""), StoreError(""), Conflict("")
    ):  # fmt: skip
        refusals.count(error)
    refusals.count_of_job()
    assert set(refusals.counts.values()) == {1}


def test_the_greatest_value_of_the_last_minute_is_forgotten_after_it() -> None:
    now = 1000.0
    recent = RecentMost(lambda: now)
    assert recent.most == 0
    recent.see(5)
    now += 30
    recent.see(3)
    assert recent.most == 5
    now += 35
    assert recent.most == 3
    now += 60
    assert recent.most == 0
    recent.see(1)
    assert recent.most == 1


@asynchronous
async def test_a_loop_that_is_held_up_shows_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's time is the test's own: nothing waits."""
    lag, loop, late = LoopLag(), asyncio.get_running_loop(), iter((0.25, 0.75, 0.25))
    now = loop.time()

    async def sleeps(_: float) -> None:
        nonlocal now
        try:
            now += next(late)
        except StopIteration:
            raise asyncio.CancelledError from None

    with monkeypatch.context() as patched:
        patched.setattr("shoal_controller.observe.own_figures.asyncio.sleep", sleeps)
        patched.setattr(loop, "time", lambda: now)
        with pytest.raises(asyncio.CancelledError):
            await lag.run()
    assert lag.recent.most == pytest.approx(0.5)
