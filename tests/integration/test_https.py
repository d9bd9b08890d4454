"""REST by HTTPS as people meet it: the commands, `run`, and controllers that forward to each other."""

from __future__ import annotations

import os
import ssl
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from asynchronous import asynchronous
from certificates import authority, certificate
from etcd_cluster import etcd_cluster
from forked_command import shoal
from integration.run_command import OPTIONS, running, started
from shoal_controller.server import serve
from shoal_controller.settings import Settings

PORTS = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
ELSEWHERE = "127.0.0.2"
"""Another address of this machine, from which a client asks."""
JOB = {"job": "job", "launcher": "none", "workers": {"wanted": 2}, "lanes": 8}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A folder with an authority `ca`, and `rest`, which it signed for localhost."""
    folder = tmp_path / "house"
    folder.mkdir()
    authority(folder, "ca")
    certificate(folder, "rest", "ca")
    return folder


def files_of(house: Path, key: str = "rest.key") -> dict[str, str]:
    return {"SHOAL_HTTP_CERTIFICATE": str(house / "rest.pem"), "SHOAL_HTTP_KEY": str(house / key)}


def test_a_bad_pair_ends_a_controller_at_its_start_with_2_and_one_sentence(house: Path, tmp_path: Path) -> None:
    done = shoal("controller", *PORTS, env={**os.environ, **files_of(house, "ca.key")}, folder=tmp_path)
    sentences = [line for line in done.stderr.splitlines() if line.startswith("shoal: ")]
    assert (done.returncode, done.stdout, len(sentences)) == (2, "", 1), done.stderr
    assert "ca.key) cannot be used together" in sentences[0]


def test_the_commands_ask_a_controller_by_its_https_url(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in files_of(house).items():
        monkeypatch.setenv(name, value)
    with started("controller", *PORTS, folder=tmp_path) as command:
        port = command.first_line.split()[0].rpartition(":")[2]
        (tmp_path / "job.yaml").write_text("job: waits\nworkers: {wanted: 2}\nlanes: 8\n")
        env = {**os.environ, "SHOAL_URL": f"https://localhost:{port}", "SHOAL_CA": str(house / "ca.pem")}
        assert shoal("submit", "job.yaml", env=env, folder=tmp_path).returncode == 0
        assert "waits" in shoal("jobs", env=env, folder=tmp_path).stdout
        refused = shoal("jobs", env={**env, "SHOAL_URL": f"http://localhost:{port}"}, folder=tmp_path)
        assert (refused.returncode, refused.stderr) == (
            3, f"shoal: the controller at http://localhost:{port} speaks TLS; its URL is https://localhost:{port}\n"
        )  # fmt: skip


def test_run_trains_a_script_behind_https(house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in files_of(house).items():
        monkeypatch.setenv(name, value)
    with running(tmp_path, OPTIONS, "--workers", "1") as command:
        code, output, errors = command.end()
    assert code == 0, errors
    assert "fingerprint " in output


async def _served(ends: AsyncExitStack, name: str, etcd: str, house: Path, folder: Path, **more: Any) -> Any:
    """A controller in this process that others reach by HTTPS."""
    settings = Settings(
        http="127.0.0.1:0", grpc="127.0.0.1:0", store=f"etcd://{etcd}/shoal", data=folder / name, token="secret",
        http_certificate=house / "rest.pem", http_key=house / "rest.key", ca=house / "ca.pem", advertise="localhost",
        log_level="error", **more,
    )  # fmt: skip
    return await ends.enter_async_context(serve(settings))


@asynchronous
async def test_controllers_forward_requests_and_streams_to_each_other_by_https(house: Path, tmp_path: Path) -> None:
    believed = ssl.create_default_context(cafile=house / "ca.pem")
    token = {"authorization": "Bearer secret"}
    with etcd_cluster(tmp_path / "etcd") as etcd:
        async with AsyncExitStack() as ends:
            first = await _served(ends, "a", etcd.addresses[0], house, tmp_path)
            second = await _served(ends, "b", etcd.addresses[0], house, tmp_path)
            leader, follower = (first, second) if first.controller.term else (second, first)
            assert follower.controller.other.url == f"https://localhost:{leader.http.rpartition(':')[2]}"
            client = await ends.enter_async_context(
                httpx.AsyncClient(
                    transport=httpx.AsyncHTTPTransport(verify=believed, local_address=ELSEWHERE), headers=token,
                    timeout=100,
                )
            )  # fmt: skip
            url = f"https://localhost:{follower.http.rpartition(':')[2]}"
            made = await client.post(f"{url}/v1/jobs", json=JOB)
            assert made.status_code == 202 and "job" in {view.job for view in leader.controller.jobs()}
            events = (await client.get(f"{url}/v1/jobs/job/events")).json()["events"]
            assert f"token root from {ELSEWHERE}: create the job" in [event["message"] for event in events]
            stream = client.stream("GET", f"{url}/v1/jobs/job/events", headers={"accept": "text/event-stream"})
            async with stream as answer, aclosing(answer.aiter_lines()) as lines:
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in lines:
                    if line.startswith("data:"):
                        break
            assert "shoal_leader " in (await client.get(f"{url}/metrics")).text
