"""No secret is where it does not belong: a real controller with a real etcd and real workers, and everything that they
log, answer, store, show in `ps` or hand on is searched for each of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from etcd_cluster import Cluster, etcd_cluster
from forked_command import SHOAL, shoal
from integration.cluster import until
from shoal_controller.settings import Settings

TESTS = Path(__file__).resolve().parents[1]

ROOT = "root-token-5a1f"
ETCD = "etcd-password-9c3e"
ENV = {"a": "env-of-a-77d0", "b": "env-of-b-31b8"}
"""By job: a secret in the environment that its specification gives to its workers."""
WRONG = "wrong-token-e411"
QUERIES = {"/v1/jobs/{job}/preview": "?act=pause"}
"""What a route cannot do without."""

SCRIPT = f"""
import json, os, sys
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
folder = Path(sys.argv[1])
name = f"{{os.environ['SHOAL_JOB']}}-{{os.environ['SHOAL_WORKER_ID']}}"
(folder / f"{{name}}.half").write_text(json.dumps(dict(os.environ)))
(folder / f"{{name}}.half").rename(folder / f"{{name}}.json")
from integration.scripts import train
train(result=str(folder / "result"), **json.loads(sys.argv[2]))
"""


class Controller:
    """A controller in a process of its own, its folder, and what it said."""

    def __init__(self, folder: Path, etcd: Cluster) -> None:
        self.folder = folder
        self._errors = folder / "controller.log"
        own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        self.env = {**own, "SHOAL_TOKEN": ROOT, "SHOAL_ETCD_PASSWORD": ETCD, "SHOAL_LOG_LEVEL": "debug"}
        store = f"etcd://shoal@{etcd.addresses[0]}/shoal"
        ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [SHOAL, "controller", *ports, "--store", store, "--data", str(folder / "data")],
                cwd=folder, env=self.env, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert self.process.stdout
        self.first_line = self.process.stdout.readline()
        assert self.first_line, self._errors.read_text()
        self.url = f"http://{self.first_line.split()[0].removeprefix('http=')}"
        self.client = httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=100)

    def ask(self, method: str, path: str, status: int, token: str = ROOT, **given: Any) -> httpx.Response:
        answer = self.client.request(method, path, headers={"authorization": f"Bearer {token}"}, **given)
        assert answer.status_code == status, answer.text
        return answer

    def command(self, *arguments: str) -> str:
        """What `shoal` says, on both outputs."""
        env = {**self.env, "SHOAL_URL": self.url}
        done = shoal(*arguments, env=env, folder=self.folder)
        return f"{done.stdout}{done.stderr}"

    def log(self) -> str:
        return self.first_line + self._errors.read_text()

    def shown_by_ps(self) -> str:
        """The arguments of the controller and all that it has started."""
        processes = [psutil.Process(self.process.pid)]
        found = []
        for process in [*processes, *processes[0].children(recursive=True)]:
            with suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
        return "\n".join(found)

    def end(self) -> None:
        """With all that it has started."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes[1:], timeout=100)
        self.process.communicate()
        self.client.close()


@contextmanager
def controller(folder: Path) -> Iterator[tuple[Controller, Cluster]]:
    with etcd_cluster(folder / "etcd") as etcd:
        etcd.ask_for_users("/shoal", ETCD)
        started = Controller(folder, etcd)
        try:
            yield started, etcd
        finally:
            started.end()


def job(name: str, folder: Path) -> dict[str, Any]:
    options = json.dumps({"max_steps": 100_000, "pace": 0.2})
    command = [sys.executable, str(folder / "train.py"), str(folder), options]
    return {
        "job": name, "launcher": "local", "command": command, "env": {"API_KEY": ENV[name]},
        "workers": {"wanted": 2 if name == "a" else 1},
    }  # fmt: skip


def environment(folder: Path, worker: str) -> dict[str, str]:
    """What the worker found in its own."""
    file = folder / f"{worker}.json"
    until(f"{worker} to start", file.exists)
    return dict(json.loads(file.read_text()))


def answers(controller: Controller) -> Iterator[tuple[str, str]]:
    """Everything that can be read, for the jobs and workers that there are."""
    document = controller.ask("GET", "/openapi.json", 200)
    yield "/openapi.json", document.text
    reads = [path for path, methods in document.json()["paths"].items() if "get" in methods]
    assert len(reads) >= 10
    eye = controller.ask("POST", "/v1/tokens", 201, json={"name": "eye", "role": "view"}).json()["token"]
    for path in [*reads, "/readyz?store"]:
        for name in ("a", "b"):
            found = path.replace("{job}", name).replace("{worker}", "w0").replace("{name}", "ci")
            found = found.replace("{generation}", "1") + QUERIES.get(path, "")
            # Whoever may change a job may read what it was made with, to make it again.
            token = eye if path.endswith("/spec") else ROOT
            yield path, controller.ask("GET", found, 200, token).text
    follow = {"authorization": f"Bearer {ROOT}", "accept": "text/event-stream"}
    with controller.client.stream("GET", "/v1/jobs/a/events", headers=follow) as stream:
        for line in stream.iter_lines():
            yield "a stream of events", line
            if '"audit"' in line and "scale" in line:
                break


def errors(controller: Controller) -> Iterator[tuple[str, str]]:
    """What is said to requests that are wrong in every way that has a secret near it."""
    spec = job("a", controller.folder)
    yield "a job that is there", controller.ask("POST", "/v1/jobs", 409, json=spec).text
    yield "a wrong token", controller.ask("GET", "/v1/jobs", 401, WRONG).text
    bad: list[Any] = [
        {**spec, "env": {"API_KEY": {"value": ENV["a"]}}},
        {**spec, "env": [f"API_KEY={ENV['a']}"]},
        {**spec, "env": f"API_KEY={ENV['a']}"},
        {**spec, "env": {f"API_KEY={ENV['a']}": ""}},
        {**spec, "env": {"SHOAL_TOKEN": ROOT}},
        {**spec, "env": {"API_KEY": f"{ENV['a']}\0"}},
        {"job": "c", "environment": {"API_KEY": ENV["a"]}},
        {"job": "c", "env": {"API_KEY": ENV["a"]}},
        [f"API_KEY={ENV['a']}"],
        f"API_KEY={ENV['a']}",
    ]
    for body in bad:
        yield json.dumps(body), controller.ask("POST", "/v1/jobs", 400, json=body).text
    json_type = {"authorization": f"Bearer {ROOT}", "content-type": "application/json"}
    half = json.dumps(spec)[:-4]
    yield "half a spec", controller.client.post("/v1/jobs", content=half, headers=json_type).text


def commands(controller: Controller) -> Iterator[tuple[str, str]]:
    """What the commands show, and how they fail."""
    for line in (
        "jobs", "jobs -o json", "describe a", "workers a", "workers a -o json", "events a", "events a -o yaml",
        "logs a", "checkpoints a", "token list", "token list -o json", "scale a 2", "pause b", "describe b",
        "describe c",
    ):  # fmt: skip
        yield line, controller.command(*line.split())
    (controller.folder / "half.yaml").write_text(f"job: c\nenv: {{API_KEY: {ENV['a']}\n  - {ENV['a']}\n")
    yield "submit half.yaml", controller.command("submit", "half.yaml")
    before = dict(controller.env)
    place = controller.url.removeprefix("http://")
    for changed in (
        {"SHOAL_TOKEN": WRONG}, {"SHOAL_TOKEN": f"{ROOT}\n"}, {"SHOAL_TOKEN": f"{ROOT}é"}, {"SHOAL_TOKEN": f" {ROOT} "},
        {"SHOAL_STORE": f"etcd://shoal:{ETCD}@localhost:1/shoal"}, {"SHOAL_STORE": f"mysql://shoal:{ETCD}@localhost/x"},
        {"SHOAL_STORE": f"etcd://localhost:1/shoal?password={ETCD}"}, {"SHOAL_HTTP": "nowhere"},
    ):  # fmt: skip
        controller.env = {**before, **changed}
        yield str(changed), controller.command("jobs")
        if "SHOAL_TOKEN" not in changed or changed["SHOAL_TOKEN"] != WRONG:
            yield str(changed), controller.command("controller")
    controller.env = before
    yield "a URL with a token", controller.command("jobs", "--url", f"http://x:{ROOT}@{place}")


@pytest.mark.timeout(300)  # thirty commands, one after the other
def test_no_secret_is_where_it_does_not_belong(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with controller(tmp_path) as (started, etcd):
        named = [str(started.ask("POST", "/v1/tokens", 201, json={"name": "ci", "role": "view"}).json()["token"])]
        named.append(str(started.ask("POST", "/v1/tokens/ci/rotate", 200).json()["token"]))
        for name in ENV:
            started.ask("POST", "/v1/jobs", 202, json=job(name, tmp_path))
        for name in ENV:
            until(f"job {name}", lambda name=name: started.ask("GET", f"/v1/jobs/{name}", 200).json()["step"] >= 1)
        started.ask("POST", "/v1/jobs/a/scale", 202, json={"workers": 2})
        workers = {worker: environment(tmp_path, worker) for worker in ("a-w0", "a-w1", "b-w0")}
        own = {worker: found["SHOAL_TOKEN"] for worker, found in workers.items()}
        places = [("ps", started.shown_by_ps()), *answers(started), *errors(started), *commands(started)]
        places.append(("ps", started.shown_by_ps()))
        places.append(("the controller's log", started.log()))
        places += [
            (str(file), file.read_text(errors="replace")) for file in (tmp_path / "data").rglob("*") if file.is_file()
        ]
        stored = etcd.ctl("get", "--prefix", "")
    secrets = {ROOT, ETCD, WRONG, *ENV.values(), *map(_essence, named), *map(_essence, own.values())}
    found = [(place, secret) for place, text in places for secret in secrets if secret in text]
    assert found == []
    for secret in secrets - set(ENV.values()):
        assert secret not in stored, "the store keeps digests only"
    for worker, given in workers.items():
        elsewhere = secrets - {ENV[worker[0]], _essence(own[worker])}
        assert not [(worker, name) for name, value in given.items() if any(secret in value for secret in elsewhere)]
        assert not {name for name in given if name.removeprefix("SHOAL_").lower() in Settings.model_fields} - {
            "SHOAL_TOKEN"
        }
    assert own["b-w0"] not in (own["a-w0"], own["a-w1"])


def _essence(token: str) -> str:
    """A token without the words before it, which name whose it is and are no secret."""
    return re.split("[:.]", token)[-1]
