"""What workers print, asked of the controller: the end of it, and all of it as it grows, of files and of pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from api_faults import served
from api_port import TRAIN, Api, serving
from api_server import PODS, FakeCluster, kubeconfig
from asynchronous import asynchronous
from machine_driver import training
from ports import free_port
from shoal_controller.api import log_routes, stream
from shoal_controller.api.app import ApiSettings
from shoal_controller.api.log_routes import MOST_LOG_BYTES
from shoal_controller.cli import jobs
from shoal_controller.cli.client import Client
from shoal_controller.core.machine.durable import Standing, WorkerRecord
from shoal_controller.core.machine.events import Started
from shoal_controller.core.machine.spec import JobView, State, WorkerView
from shoal_controller.jobs.runner import Runner
from shoal_controller.launchers.kubernetes import pod_logs
from shoal_controller.launchers.kubernetes.pod_launcher import connected
from shoal_controller.launchers.kubernetes.pod_logs import PodLogs
from shoal_controller.launchers.kubernetes.section import ClusterOptions
from shoal_controller.launchers.worker_logs import PART_BYTES
from shoal_protos.errors import NotFound, PeerError, UserError
from small_machine import SmallMachine
from tiers import check

pytestmark = check("serves REST and the API of a cluster on real ports")

WORKER: WorkerView = replace(training().view.workers[0], worker="w0", log="", pod="")
OF_POD = replace(WORKER, pod="demo-w0")
LOG = "/v1/jobs/train/workers/w0/log"
FOLLOW, EVENTS = f"{LOG}?follow=true", {"Accept": "text/event-stream"}


@dataclass
class Pods:
    """A cluster with one pod, and what a controller knows of its logs."""

    cluster: FakeCluster
    logs: PodLogs

    def put(self, phase: str = "Running") -> None:
        spec = {"containers": [{"name": "worker"}], "nodeName": "a"}
        self.cluster.put(PODS, {"metadata": {"name": "demo-w0"}, "spec": spec, "status": {"phase": phase}})

    def write(self, data: bytes) -> None:
        with (self.cluster.logs / "demo-w0.log").open("ab") as file:
            file.write(data)

    async def end_of_log(self, count: int = 100) -> str:
        return (await self.logs.read("train", OF_POD, count)).text


@asynccontextmanager
async def pods(folder: Path) -> AsyncIterator[Pods]:
    cluster = FakeCluster()
    cluster.logs = folder
    cluster.node("a")
    async with served(cluster, free_port()) as url:
        (folder / "kubeconfig").write_text(kubeconfig(url))
        async with connected(ClusterOptions(str(folder / "kubeconfig"))) as api:
            found = Pods(cluster, PodLogs(api))
            found.put()
            yield found


@asynccontextmanager
async def controller(folder: Path, worker: WorkerView, logs: PodLogs | None = None) -> AsyncIterator[Api]:
    machine = SmallMachine(shown={"workers": (worker,)}, roster={"w0": WorkerRecord("w0", 0)})
    settings = ApiSettings(default_workers=2, folder=folder)
    async with serving(folder / "s", settings, machine) as api:
        api.controller.pod_logs = logs
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        yield api


async def lose_worker(api: Api) -> None:
    """For the controller: its process may print on."""
    api.machine.roster = {"w0": WorkerRecord("w0", 0, standing=Standing.LOST)}
    await api.shell.submit("train", Started())


async def until_text(lines: AsyncIterator[str]) -> None:
    while not (await anext(lines)).startswith("data: "):
        pass


def local_log(folder: Path) -> Path:
    log = folder / "jobs" / "train" / "w0.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    return log


# ---- of pods


@asynchronous
async def test_the_end_of_a_pods_log_is_shown_and_its_size_where_it_is_known(tmp_path: Path) -> None:
    async with pods(tmp_path) as one, controller(tmp_path, OF_POD, one.logs) as api:
        one.write("one\nzwölf\n".encode())
        assert await api.ask("GET", LOG) == {
            "worker": "w0", "path": "pod demo-w0", "bytes": 11, "begin": 0, "text": "one\nzwölf\n",
        }  # fmt: skip
        end = await api.ask("GET", f"{LOG}?bytes=4")
        assert (end["text"], end["bytes"], end["begin"]) == ("lf\n", None, None), "begins with a whole character"


@asynchronous
async def test_of_a_log_whose_last_lines_are_long_the_end_is_shown_and_not_what_a_kubelet_sends_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_logs, "MOST_BYTES", 61 * 1000)
    async with pods(tmp_path) as one:
        one.write(b"".join(b"%06d%s\n" % (line, b"x" * 990) for line in range(2000)))
        assert (await one.end_of_log(997)).startswith("001999")


@pytest.mark.parametrize("phase", ["Pending", "Succeeded"])
@asynchronous
async def test_a_pod_that_waits_has_no_log_yet_and_one_that_has_ended_has_it_still(tmp_path: Path, phase: str) -> None:
    async with pods(tmp_path) as one:
        one.write(b"all\n")
        one.put(phase)
        if phase == "Succeeded":
            assert await one.end_of_log() == "all\n"
        else:
            with pytest.raises(NotFound, match='w0 has no log yet: container "worker" in pod "demo-w0" is waiting'):
                await one.end_of_log()


@asynchronous
async def test_the_log_of_a_pod_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    async with pods(tmp_path) as one, controller(tmp_path, OF_POD, one.logs) as api:
        one.cluster.remove(PODS, "demo-w0")
        for path, headers in ((LOG, {}), (LOG, EVENTS), (FOLLOW, EVENTS)):
            problem = await api.ask("GET", path, 404, headers=headers)
            assert problem["detail"] == (
                "the pod demo-w0 of w0 is gone, and its log with it; keep what pods print by a collector of logs"
            )


@asynchronous
async def test_a_role_without_the_right_and_a_node_that_is_cut_off_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pods(tmp_path) as one:
        one.cluster.fail("GET", "/log", 403, message="User cannot get resource pods/log")
        with pytest.raises(PeerError, match="give its role the verb get of pods/log"):
            await one.end_of_log()
        one.cluster.fail("GET", "/log", 500, message="Get https://a:10250/containerLogs: connection refused")
        with pytest.raises(PeerError, match="cannot be read from its pod demo-w0: Get https://a:10250"):
            await one.end_of_log()
        monkeypatch.setattr(pod_logs, "ANSWER_SECONDS", 0.2)
        one.cluster.fail("GET", "/log", seconds=1.0)
        with pytest.raises(PeerError, match=r"has not come from its pod demo-w0 within 0.2 s"):
            await one.end_of_log()


@asynchronous
async def test_a_pods_log_is_streamed_as_it_grows_until_the_pod_has_ended(tmp_path: Path) -> None:
    async with pods(tmp_path) as one, controller(tmp_path, OF_POD, one.logs) as api:
        one.write(b"first\n")
        async with Client(f"http://127.0.0.1:{api.port}") as client:
            found = ""
            async for part in client.log("train", "w0", follow=True):
                found += part
                if found == "first\n":
                    one.write(b"last")
                if found == "first\nlast":
                    one.put("Succeeded")
        assert found == "first\nlast"


@asynchronous
async def test_a_stream_of_a_pod_that_says_nothing_is_kept_open_and_one_that_breaks_off_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_routes, "IDLE_SECONDS", 0.05)
    async with pods(tmp_path) as one, controller(tmp_path, OF_POD, one.logs) as api:
        one.write(b"first\n")
        async with (
            api.client.stream("GET", FOLLOW, headers=EVENTS) as answer,
            aclosing(answer.aiter_lines()) as lines,
        ):
            while not (await anext(lines)).startswith(":"):
                pass
            one.cluster.break_watches()
            while not (line := await anext(lines)).startswith("event:"):
                pass
            detail = json.loads((await anext(lines)).removeprefix("data: "))["detail"]
        assert line == "event: problem" and detail.startswith("the log of w0 cannot be read from its pod demo-w0: ")


@asynchronous
async def test_a_stream_ends_with_its_worker_though_the_kubelet_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_routes, "END_SECONDS", 0.5)
    async with pods(tmp_path) as one, controller(tmp_path, OF_POD, one.logs) as api:
        one.write(b"first\n")
        async with (
            api.client.stream("GET", FOLLOW, headers=EVENTS) as answer,
            aclosing(answer.aiter_lines()) as lines,
            asyncio.timeout(100),
        ):
            await until_text(lines)
            await lose_worker(api)
            one.write(b"last\n")
            assert [line for line in [line async for line in lines] if line] == [r'data: {"text": "last\n"}']


@asynchronous
async def test_the_command_reads_on_where_the_cluster_breaks_the_stream_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(jobs, "echo", lambda line, err=False: lines.put_nowait("!" if err else line))
    async with pods(tmp_path) as one, controller(tmp_path, OF_POD, one.logs) as api, asyncio.timeout(100):
        one.write(b"first\n")
        following = asyncio.create_task(jobs.logs("train", "w0", True, f"http://127.0.0.1:{api.port}"))
        assert await lines.get() == "first"
        one.cluster.break_watches()
        assert await lines.get() == "!"
        one.write(b"last\n")
        assert await lines.get() == "last"
        api.machine.shown["workers"] = (replace(OF_POD, state=State.LEFT),)
        one.put("Succeeded")
        await following
    assert lines.empty()


@asynchronous
async def test_of_many_who_follow_at_once_as_many_are_served_as_may_be_and_one_without_a_log_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MOST_FOLLOWERS", 2)
    async with pods(tmp_path) as one, controller(tmp_path, OF_POD, one.logs) as api:
        one.cluster.fail("GET", "/log", 404, times=3)
        for _ in range(3):
            await api.ask("GET", FOLLOW, 404, headers=EVENTS)
        one.cluster.fail("GET", "/log", seconds=0.5, times=5)
        answered = asyncio.Barrier(5)

        async def follow() -> int:
            async with api.client.stream("GET", FOLLOW, headers=EVENTS) as answer:
                await answered.wait()
                return answer.status_code

        assert sorted(await asyncio.gather(*(follow() for _ in range(5)))) == [200, 200, 503, 503, 503]


@asynchronous
async def test_to_follow_without_asking_for_a_stream_is_a_sentence(tmp_path: Path) -> None:
    async with controller(tmp_path, replace(WORKER, log=str(local_log(tmp_path)))) as api:
        problem = await api.ask("GET", FOLLOW, 400)
        assert problem["detail"] == (
            "`follow` is true and `Accept` is '*/*'; expected `Accept: text/event-stream`, or no `follow`"
        )


# ---- of this machine


@pytest.mark.parametrize("of_pod", [False, True], ids=["file", "pod"])
@asynchronous
async def test_a_stream_says_that_it_ends_with_the_controller_and_keeps_it_from_nothing(
    tmp_path: Path, of_pod: bool
) -> None:
    worker = OF_POD if of_pod else replace(WORKER, log=str(local_log(tmp_path)))
    async with pods(tmp_path) as one, controller(tmp_path, worker, one.logs) as api:
        one.write(b"first\n")
        async with (
            api.client.stream("GET", FOLLOW, headers=EVENTS) as answer,
            aclosing(answer.aiter_lines()) as lines,
            asyncio.timeout(100),
        ):
            await until_text(lines)
            await api.shell.stop()
            assert [line for line in [line async for line in lines] if line] == [
                "event: problem", 'data: {"detail": "this controller is stopping; try again"}',
            ]  # fmt: skip


@asynchronous
async def test_to_follow_asks_for_no_view_of_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, views, view = local_log(tmp_path), [], Runner.view

    def counted(runner: Runner) -> JobView:
        views.append(runner)
        return view(runner)

    async with (
        controller(tmp_path, replace(WORKER, log=str(log))) as api,
        api.client.stream("GET", FOLLOW, headers=EVENTS) as answer,
        aclosing(answer.aiter_lines()) as lines,
        asyncio.timeout(100),
    ):
        await until_text(lines)
        monkeypatch.setattr(Runner, "view", counted)
        for _ in range(3):  # each after another look at the file
            with log.open("a") as file:
                file.write("more\n")
            await until_text(lines)
    assert not views


@asynchronous
async def test_the_log_of_a_local_worker_is_streamed_until_the_worker_has_ended(tmp_path: Path) -> None:
    log = local_log(tmp_path)
    async with controller(tmp_path, replace(WORKER, log=str(log))) as api:
        async with Client(f"http://127.0.0.1:{api.port}") as client:
            assert [part async for part in client.log("train", "w0", follow=False)] == ["first\n"]
            found = ""
            async for part in client.log("train", "w0", follow=True):
                found += part
                if part == "first\n":
                    log.write_text("")  # as the launcher empties one that has become too large
                    log.write_text("new\n")
                elif "new\n" in part:
                    with log.open("a") as file:
                        file.write("ö" * PART_BYTES)  # a part ends in a character
                    await lose_worker(api)
            with pytest.raises(UserError, match="bytes"):
                await client._ask("GET", f"{LOG}?bytes={MOST_LOG_BYTES + 1}".removeprefix("/v1"))
        assert found == "first\nnew\n" + "ö" * PART_BYTES
