"""The chart's own jobs, run as they lie in its ConfigMap: `helm test` against a real controller that starts processes
in place of pods, and the job that makes the token for Prometheus against a small API server.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import authority, certificate
from charts.rendering import ALL_VALUES, Json, of_kind, rendered
from shoal_controller.api.models import JobBody

TOKEN = "root-token-of-this-test"
END_SECONDS, SCRIPT_SECONDS = 100, 280
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""As in an image, where `python` is the one that has Shoal."""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """The ConfigMap's files, as a pod has them."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (found,) = (
        one for one in of_kind(rendered(ALL_VALUES[0]), "ConfigMap") if one["metadata"]["name"].endswith("-scripts")
    )
    for name, text in found["data"].items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A controller that starts local processes."""
    command = [Path(sys.executable).with_name("shoal"), "controller", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command += ["--store", f"embedded:{tmp_path / 'store'}", "--data", tmp_path / "data"]
    given = {
        **os.environ,
        "PATH": PATH,
        "SHOAL_TOKEN": TOKEN,
        "SHOAL_LAUNCHERS": "local,none",
        "SHOAL_LOG_LEVEL": "warning",
    }
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=given)
    assert started.stdout is not None
    with started:
        line = started.stdout.readline()
        yield f"http://{line.split()[0].removeprefix('http=')}"
        started.send_signal(signal.SIGTERM)
        assert started.wait(END_SECONDS) == 0


def run(script: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=SCRIPT_SECONDS, env=given)


def spec() -> Json:
    """What `helm test` submits, for processes in place of pods."""
    (pod,) = of_kind(rendered(ALL_VALUES[0]), "Pod")
    given = {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}
    found: Json = json.loads(given["SHOAL_TEST_SPEC"])
    JobBody.model_validate({**found, "job": "helm-test"})
    assert found.pop("launcher") == "kubernetes"
    assert found.pop("kubernetes")["image"] == "shoal-worker:0.1.0"
    return {**found, "launcher": "local"}


@pytest.mark.timeout(300)
def test_helm_test_runs_a_job_of_8_steps_twice_and_compares(scripts: Path, url: str) -> None:
    given = {"SHOAL_URL": url, "SHOAL_TOKEN": TOKEN, "SHOAL_TEST_SECONDS": "130"}
    done = run(scripts / "check_job.py", {**given, "SHOAL_TEST_SPEC": json.dumps(spec())})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 steps with 2 workers and with 1 worker: ")
    left = httpx.get(
        f"{url}/v1/jobs", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, verify=False, timeout=100
    ).json()
    assert left["jobs"] == []


def test_helm_test_says_why_a_job_was_refused(scripts: Path, url: str) -> None:
    wrong = {**spec(), "lanes": 1}
    given = {"SHOAL_URL": url, "SHOAL_TOKEN": TOKEN, "SHOAL_TEST_SECONDS": "20", "SHOAL_TEST_SPEC": json.dumps(wrong)}
    done = run(scripts / "check_job.py", given)
    assert done.returncode == 1
    assert done.stderr.startswith("error: POST /v1/jobs: 400 "), done.stderr


class Secrets(BaseHTTPRequestHandler):
    """One secret of an API server."""

    secret: dict[str, Any]
    asked: list[str]

    def do_GET(self) -> None:
        self._answer()

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.secret.setdefault("data", {}).update(body["data"])
        self._answer()

    def _answer(self) -> None:
        self.asked.append(f"{self.command} {self.path} {self.headers['Authorization']}")
        body = json.dumps(self.secret).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[type[Secrets], dict[str, str]]]:
    """The server's state, and what a pod of it finds in its environment."""
    authority(folder, "ca")
    certificate(folder, "server", "ca", names="DNS:localhost,IP:127.0.0.1")
    account = folder / "account"
    account.mkdir()
    for name, text in {
        "ca.crt": (folder / "ca.pem").read_text(),
        "token": "account-token\n",
        "namespace": "ml",
    }.items():
        (account / name).write_text(text)
    state = type("State", (Secrets,), {"secret": {}, "asked": []})
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "server.pem", folder / "server.key")
    with HTTPServer(("127.0.0.1", 0), state) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, name="api server")
        thread.start()
        place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}
        try:
            yield state, {**place, "SHOAL_SERVICE_ACCOUNT": str(account), "SHOAL_VIEW_TOKEN_SECRET": "shoal-view-token"}
        finally:
            server.shutdown()
            thread.join(END_SECONDS)


def scrape(url: str, state: type[Secrets]) -> int:
    """What a Prometheus with the kept token is answered."""
    token = base64.b64decode(state.secret["data"]["token"]).decode()
    return httpx.get(
        f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}, trust_env=False, verify=False, timeout=100
    ).status_code


def test_the_token_for_prometheus_is_made_once_and_made_anew_if_it_is_lost(
    scripts: Path, url: str, tmp_path: Path
) -> None:
    with api_server(tmp_path) as (state, account):
        given = {"SHOAL_URL": url, "SHOAL_TOKEN": TOKEN, **account}
        done = run(scripts / "view_token.py", given)
        assert done.returncode == 0, done.stderr
        first = dict(state.secret["data"])
        assert scrape(url, state) == 200
        assert state.asked[0] == "GET /api/v1/namespaces/ml/secrets/shoal-view-token Bearer account-token"

        assert run(scripts / "view_token.py", given).stdout == "the secret shoal-view-token has a token already\n"
        assert state.secret["data"] == first

        state.secret.clear()
        assert run(scripts / "view_token.py", given).returncode == 0
        assert state.secret["data"] != first
        assert scrape(url, state) == 200
