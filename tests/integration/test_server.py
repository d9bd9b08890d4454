"""A whole controller: it starts, answers, goes on after kill -9, gives way to another, and leaves nothing behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import httpx
import psutil
import pytest
from asynchronous import asynchronous
from prometheus_client.parser import text_string_to_metric_families
from shoal_controller.jobs.backups import RESTORING
from shoal_controller.server import serve
from shoal_controller.settings import Settings
from shoal_controller.store.open import open_store
from shoal_controller.store.store import Put
from shoal_protos.errors import StoreError, UserError
from tiers import promise

ALONE = """
import asyncio, sys
from shoal_controller.server import serve
from shoal_controller.settings import Settings

async def main():
    settings = Settings(http="127.0.0.1:0", grpc="127.0.0.1:0", store="embedded:" + sys.argv[1], data=sys.argv[1],
                        log_level="error")
    async with serve(settings) as server:
        print(server.http, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def settings(directory, **more):
    given = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "store": f"embedded:{directory}/store", "log_level": "error"}
    given["data"] = f"{directory}/store"
    return Settings(**given | more)


@asynccontextmanager
async def controller(directory, **more):
    async with (
        serve(settings(directory, **more)) as server,
        httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False, verify=False, timeout=60) as client,
    ):
        yield server, client


@contextmanager
def controller_process(directory):
    """A controller of its own process, and the address of its REST API."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, str(directory / "store")], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process, f"http://{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def event_with(client, job, text):
    """The first event whose message has that text; waits for it on the stream."""
    async with client.stream("GET", f"/v1/jobs/{job}/events", headers={"accept": "text/event-stream"}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data:"):
                event = json.loads(line.removeprefix("data:"))
                if text in event["message"]:
                    return event
    raise AssertionError(f"the stream ended without an event that says {text}")


@asynchronous
async def test_where_any_port_will_do_workers_find_the_next_controller_where_the_last_one_was(tmp_path):
    async with serve(settings(tmp_path)) as server:
        first = server.grpc
    async with serve(settings(tmp_path)) as server:
        assert server.grpc == first
        async with serve(settings(tmp_path, store=f"embedded:{tmp_path}/other")) as beside:
            assert beside.grpc != first
    (tmp_path / "store" / "worker-port").write_text("damaged")
    async with serve(settings(tmp_path)) as server:
        assert server.grpc


@asynchronous
async def test_a_controller_answers_on_ports_of_its_choice_and_ends_without_a_trace(tmp_path):
    async with controller(tmp_path) as (server, client):
        assert (await client.get("/readyz")).json()["status"] == "ready"
        assert server.grpc.startswith("127.0.0.1:") and not server.grpc.endswith(":0")
        assert (await client.post("/v1/jobs", json={"job": "a"})).status_code == 202
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families((await client.get("/metrics")).text)
            for sample in family.samples
        }
        assert samples["shoal_leader"] == 1
        assert samples["shoal_store_request_duration_seconds_count"] > 0
        assert samples["shoal_job_generation"] == 0


@asynchronous
async def test_what_a_controller_keeps_is_readable_by_its_user_alone(tmp_path):
    before = os.umask(0o022)
    try:
        async with controller(tmp_path) as (_, client):
            assert (await client.post("/v1/jobs", json={"job": "a"})).status_code == 202
            kept = list((tmp_path / "store").rglob("*"))
            assert {"lock", "worker-port"} <= {path.name for path in kept}
            assert [path for path in (tmp_path / "store", *kept) if path.stat().st_mode & 0o077] == []
    finally:
        os.umask(before)


@asynchronous
@promise("the controller is lost")
async def test_a_job_outlives_kill_9_of_its_controller(tmp_path):
    def killed_after_creating():
        with controller_process(tmp_path) as (process, url):
            created = httpx.post(
                f"{url}/v1/jobs", json={"job": "a", "workers": {"wanted": 3}}, trust_env=False, verify=False, timeout=60
            )
            process.send_signal(signal.SIGKILL)
        return created.json()

    created = await asyncio.to_thread(killed_after_creating)
    async with controller(tmp_path) as (_, client):
        found = (await client.get("/v1/jobs/a")).json()
        assert found["workers"] == created["workers"]
        assert (await client.post("/v1/jobs/a/scale", json={"workers": 2})).json()["workers"]["wanted"] == 2


def test_a_store_that_another_controller_holds_is_refused_naming_it(tmp_path):
    async def start():
        async with serve(settings(tmp_path)):
            raise AssertionError("it started")

    with controller_process(tmp_path) as (process, _), pytest.raises(StoreError) as refusal:
        asyncio.run(start())
    assert f"is held by another controller (pid {process.pid} on host" in str(refusal.value)


@asynchronous
async def test_a_controller_starts_on_no_store_that_is_restored_in_part_and_writes_nothing_there(tmp_path):
    store = await open_store(f"embedded:{tmp_path}/store")
    await store.transact([], [Put(RESTORING, b"{}")])
    await store.close()
    with pytest.raises(UserError, match="a restore into this store is under way, or was interrupted: repeat it"):
        async with serve(settings(tmp_path)):
            raise AssertionError("it started")
    store = await open_store(f"embedded:{tmp_path}/store")
    assert [one.key for one in (await store.list("/")).entries] == [RESTORING]
    await store.close()


@pytest.mark.parametrize(("which", "purpose"), [("http", "REST"), ("grpc", "workers")])
@asynchronous
async def test_a_port_in_use_is_refused_and_everything_let_go(tmp_path, which, purpose):
    async with controller(tmp_path) as (server, _):
        taken = {which: getattr(server, which)}
        with pytest.raises(
            UserError, match=f"cannot listen for {purpose} on {taken[which]}: .*; give another --{which}"
        ):
            async with serve(settings(tmp_path / "other", **taken)):
                raise AssertionError("it started")
    async with controller(tmp_path / "other"):
        pass


@pytest.mark.parametrize("http", ["no.such.host.invalid:0", "192.0.2.1:0"])
@asynchronous
async def test_an_address_of_another_machine_is_refused(tmp_path, http):
    with pytest.raises(UserError, match=f"cannot listen for REST on {http}: .*; give another --http HOST:PORT"):
        async with serve(settings(tmp_path, http=http, token="secret")):
            raise AssertionError("it started")


@asynchronous
async def test_a_controller_whose_job_another_one_writes_decides_nothing_more_and_begins_anew(tmp_path):
    async with controller(tmp_path) as (server, client):
        await client.post("/v1/jobs", json={"job": "a"})
        before = server.shell
        await before._store.transact([], [Put("/jobs/a", b"another's")])
        refused = await client.post("/v1/jobs/a/scale", json={"workers": 1})
        assert refused.status_code == 503
        assert "job a was written by another controller" in str(before.stopped.result())
        while (found := (await client.get("/v1/jobs/a")).json()).get("phase") != "failed":
            continue
        assert "job a is not served" in found["reason"]
        while not server.controller.term:
            await client.get("/healthz")
        assert server.shell is not before


@asynchronous
async def test_who_cancels_the_body_is_not_deceived(tmp_path):
    async def body():
        async with controller(tmp_path):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(body())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@asynchronous
async def test_an_open_stream_does_not_hold_up_the_end(tmp_path, monkeypatch):
    async def read_to_the_end(url):
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=60) as client,
            client.stream("GET", "/v1/jobs/a/events", headers={"accept": "text/event-stream"}) as stream,
        ):
            open_now.set()
            return [line async for line in stream.aiter_lines()]

    monkeypatch.setattr("shoal_controller.api.web.FINISH_SECONDS", 3600)  # which it is not waited for
    open_now = asyncio.Event()
    async with controller(tmp_path) as (server, client):
        await client.post("/v1/jobs", json={"job": "a"})
        reading = asyncio.ensure_future(read_to_the_end(f"http://{server.http}"))
        await open_now.wait()
    await reading


@asynchronous
async def test_local_workers_that_cannot_live_fail_the_job_with_their_last_words(tmp_path):
    last_words = "import sys; sys.exit('ValueError: lanes is 0; expected 1 and more')"
    spec = {
        "job": "a", "workers": {"wanted": 1}, "launcher": "local", "command": [sys.executable, "-c", last_words],
        "max_restarts": 0,
    }  # fmt: skip
    async with controller(tmp_path) as (_, client):
        assert (await client.post("/v1/jobs", json=spec)).status_code == 202
        event = await asyncio.wait_for(event_with(client, "a", "max_restarts is 0"), 100)
        job = (await client.get("/v1/jobs/a")).json()
        assert job["phase"] == "failed"
        assert "lanes is 0; expected 1 and more" in job["reason"] and str(tmp_path) in job["reason"]
        assert job["reason"].endswith(event["message"]), "a store that is slow is told of before it"


@asynchronous
@promise("a launcher")
async def test_local_workers_outlive_their_controller_and_are_adopted_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal_controller.core.machine.phases.ending.LINGER_SECONDS", 0.5)
    spec = {"job": "a", "workers": {"wanted": 1}, "launcher": "local", "command": ["sleep", "1000"], "max_restarts": 0}
    async with controller(tmp_path) as (server, client):
        await client.post("/v1/jobs", json=spec)
        before = await until_it_has_a_process(server.shell)
    async with controller(tmp_path) as (server, client):
        after = await until_it_has_a_process(server.shell)
        assert (after.worker, after.pid) == (before.worker, before.pid)
        process = psutil.Process(before.pid)
        await client.delete("/v1/jobs/a")
        await asyncio.to_thread(process.wait, 100)


async def until_it_has_a_process(shell):
    """The job's only worker, as soon as its process is known."""
    async with asyncio.timeout(100):
        while True:
            workers = shell.view("a").workers
            if workers and workers[0].pid:
                return workers[0]
            await asyncio.sleep(0.02)
