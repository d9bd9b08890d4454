"""A real controller and real workers for tests, on this machine, in a few tenths of a second.

    with Cluster(workers=3, options={"max_steps": 30}) as cluster:
        cluster.wait_step(5)
        cluster.kill("w1")
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed({"max_steps": 30})

All processes are forked from a warm one (warm.py). Whoever waits says what for; when that does not come in time, the
error shows the job, its events and the end of every log. `undisturbed` runs the same options in a world of one without
a controller, once per session.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx
from integration.warm import WARM_MODULES, Warm
from ports import free_port

Json = dict[str, Any]
TRAIN = "integration.scripts:train"
PATIENCE_SECONDS = 100.0
"""Far above what anything takes on two busy cores; a test that needs it is wrong."""
LONGEST_PAUSE_SECONDS = 0.06
"""Between two looks. Fifty looks a second took a fifth of the cores from what they looked at."""
OVER = ("succeeded", "failed", "cancelled")
WITHOUT_EFFECT = ("stage", "mirrors", "pace", "until", "evaluate")
"""Options of the script that must not change a bit."""
QUICK = {"heartbeat_seconds": 0.2, "reconnect_seconds": 2.0, "stall_seconds": 30.0}
"""So that a test sees within moments what takes seconds in earnest."""

_warm: Warm | None = None


@contextmanager
def warmed(modules: Sequence[str] = (), usual: Sequence[str] = WARM_MODULES) -> Iterator[Warm]:
    """The session's warm process, or in place of it one that has imported these modules besides the usual ones."""
    global _warm
    before, warm = _warm, Warm((*usual, *modules))
    _warm = warm
    try:
        yield warm
    finally:
        warm.close()
        _warm = before


def is_warm() -> bool:
    """Whether there is a process to fork from."""
    return _warm is not None


def fork(call: str, arguments: Mapping[str, Any], env: Mapping[str, str], log: Path) -> int:
    assert _warm, "no warm process: cluster tests live in tests/integration; others ask for the fixture `commands`"
    return _warm.fork(call, arguments, env, log)


def ended() -> dict[int, int]:
    """Exit status by pid of every forked process that has ended."""
    assert _warm
    return _warm.ended()


def until(goal: str, seen: Callable[[], Any], patience: float = PATIENCE_SECONDS) -> Any:
    """The first true value of `seen`; an AssertionError that says what was waited for when none comes in time."""
    deadline, pause, seconds = time.monotonic() + patience, threading.Event(), 0.01
    while not (value := seen()):
        assert time.monotonic() < deadline, f"waited {patience:.0f} s for {goal}"
        pause.wait(seconds)
        seconds = min(1.3 * seconds, LONGEST_PAUSE_SECONDS)
    return value


class Cluster:
    """One controller, one job, its workers. Leaving the `with` ends every process, whatever state they are in."""

    token = ""
    """What all must show; empty: nobody asks."""
    settings: ClassVar[Mapping[str, str]] = {}
    """Variables of the controller's environment."""
    host = "127.0.0.1"
    """Where the controller listens."""

    def __init__(
        self,
        workers: int = 2,
        options: Mapping[str, Any] | None = None,
        script: str = TRAIN,
        spec: Mapping[str, Any] | None = None,
        faults: str = "",
        pace: float = 0.0,
    ) -> None:
        """`options`: keyword arguments of the script. `spec`: what differs from the defaults in the job's spec.

        `faults`: the value of SHOAL_FAULT for every worker. `pace`: seconds per micro-batch until `release`; the last
        three steps take seconds until then, so that the job does not end while the test is at work.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.job_name = "job"
        self.script = script
        self.options = dict(options or {})
        self._go = self.folder / "go"
        self._pace = {"pace": pace, "until": str(self._go)} if pace else {}
        self.faults = faults
        self.spec = {"job": self.job_name, "launcher": "none", "workers": {"wanted": workers}, **QUICK, **(spec or {})}
        self.pids: dict[str, int] = {}
        self.detours: dict[str, int] = {}
        """By worker: another port at which it finds the controller."""
        self._started = workers
        self._lives = 0
        self._controller = 0
        self._take_ports()

    def __enter__(self) -> Self:
        try:
            self._start_anywhere()
            self._submit()
            if self.spec["launcher"] == "none":
                self._start_in_order()
        except BaseException:
            self.__exit__(AssertionError)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is not None:
            print(self.story())
        forked = {*self.pids.values(), *self.controller_pids()}
        processes = {*forked, *self._local_pids()}
        self._rest.close()
        for pid in processes:
            send_signal(pid, signal.SIGKILL, group=True)
        until("all processes to end", lambda: forked <= ended().keys())
        shutil.rmtree(self.folder)

    @property
    def grpc_port(self) -> int:
        return self._ports[1]

    # ---- processes

    def _take_ports(self) -> None:
        self._ports = free_port(), free_port()
        shown = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        base = f"{self.url}/v1"
        self._rest = httpx.Client(base_url=base, headers=shown, timeout=60, trust_env=False, verify=False)

    def _start_anywhere(self) -> None:
        """A free port may be taken by somebody else before the controller has it: then at others."""
        for _ in range(3):
            try:
                return self.start_controller()
            except AssertionError:
                if self._controller not in ended():
                    raise
                self._rest.close()
                self._take_ports()
        return self.start_controller()

    def start_controller(self, store: str = "store", program: str = "integration.scripts:controller") -> None:
        """Start it, or start it again at the same addresses, with the same store or another one."""
        self._lives += 1
        addresses = {name: f"{self.host}:{port}" for name, port in zip(("http", "grpc"), self._ports, strict=True)}
        arguments = {**addresses, "store": f"embedded:{self.folder / store}", "data": str(self.folder / store)}
        log = self.folder / f"controller-{self._lives}.log"
        self._controller = self.fork("a", program, arguments, {**self._secrets, **self.settings}, log)
        until("the controller to answer", self._answers)

    def kill_controller(self) -> None:
        """SIGKILL; returns when it is gone."""
        send_signal(self._controller, signal.SIGKILL)
        until("the controller to be gone", lambda: self._controller in ended())
        self._controller = 0

    def controller_pids(self) -> set[int]:
        """Of those that run."""
        return {self._controller} - {0}

    def wait_controller_death(self) -> None:
        """It dies by itself."""
        until("the controller to die", lambda: self._controller in ended())
        self._controller = 0

    def _start_in_order(self) -> None:
        """One said hello after the other: `w0` is the oldest, and the builder; ids are in the order of ranks."""
        for worker in [f"w{index}" for index in range(self._started)]:
            self.start(worker)
            until(f"{worker} to say hello", lambda worker=worker: worker in self.workers())

    def stop_controller(self) -> None:
        """SIGSTOP: frozen, not dead."""
        send_signal(self._controller, signal.SIGSTOP)

    def cont_controller(self) -> None:
        """SIGCONT: thawed."""
        send_signal(self._controller, signal.SIGCONT)

    def add(self, count: int = 1, **options: Any) -> list[str]:
        """Start more workers with the next free ids; `options` differ from the cluster's for these."""
        ids = [f"w{len(self.pids) + index}" for index in range(count)]
        for worker in ids:
            self.start(worker, **options)
        return ids

    def start(self, worker: str, **options: Any) -> None:
        """Start a process with this id (again: a second one, whose log is the same file)."""
        env = {"SHOAL_CONTROLLER": self.controllers_of(worker), "SHOAL_JOB": self.job_name, "SHOAL_WORKER_ID": worker}
        env |= self._secrets
        if self.faults:
            env["SHOAL_FAULT"] = self.faults
        given = {**self.options, **self._pace, **options, "result": str(self.result_file(worker))}
        self.pids[worker] = self.fork(worker, self.script, given, env, self.folder / f"{worker}.log")

    def controllers_of(self, worker: str) -> str:
        """Where it looks for its controller."""
        return f"{self.host}:{self.detours.get(worker, self.grpc_port)}"

    def kill(self, *workers: str) -> None:
        """SIGKILL, all at once."""
        for worker in workers:
            send_signal(self._pid(worker), signal.SIGKILL)

    def stop(self, *workers: str) -> None:
        """SIGSTOP: frozen, not dead."""
        for worker in workers:
            send_signal(self._pid(worker), signal.SIGSTOP)

    def cont(self, *workers: str) -> None:
        """SIGCONT: thawed."""
        for worker in workers:
            send_signal(self._pid(worker), signal.SIGCONT)

    def terminate(self, *workers: str) -> None:
        """SIGTERM, as a preemption notice."""
        for worker in workers:
            send_signal(self._pid(worker), signal.SIGTERM)

    def exit_code(self, worker: str) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return ended().get(self.pids[worker])

    # ---- the controller's answers

    @property
    def url(self) -> str:
        """What `--url` takes."""
        return f"http://{self.host}:{self._ports[0]}"

    def job(self) -> Json:
        return self._answer("GET", f"/jobs/{self.job_name}")

    def workers(self) -> dict[str, Json]:
        """By id."""
        listed = self._answer("GET", f"/jobs/{self.job_name}/workers")["workers"]
        return {worker["worker"]: worker for worker in listed}

    def metrics(self) -> str:
        """What Prometheus would read."""
        return self._rest.get(f"{self.url}/metrics").text

    def events(self) -> list[Json]:
        return list(self._answer("GET", f"/jobs/{self.job_name}/events?after=0")["events"])

    def messages(self, kind: str) -> list[str]:
        """What the events of one kind say."""
        return [event["message"] for event in self.events() if event["kind"] == kind]

    def report(self) -> Json:
        return self._answer("GET", f"/jobs/{self.job_name}/report")

    def reasons(self) -> list[str]:
        """Why each world began, in order."""
        return [world["reason"] for world in self.report()["generations"]]

    @property
    def fingerprint(self) -> str:
        """What the job ended with."""
        return str(self.report()["fingerprint"])

    def result(self, worker: str) -> Json:
        """What the worker's script wrote at its end."""
        return dict(json.loads(self.result_file(worker).read_text()))

    def result_file(self, worker: str) -> Path:
        return self.folder / f"{worker}.result"

    def log(self, worker: str) -> str:
        return (self.folder / f"{worker}.log").read_text()

    # ---- requests

    def scale(self, workers: int) -> Json:
        return self._answer("POST", f"/jobs/{self.job_name}/scale", {"workers": workers})

    def drain(self, worker: str, grace_seconds: float = 30.0) -> Json:
        path = f"/jobs/{self.job_name}/workers/{worker}/drain"
        return self._answer("POST", path, {"grace_seconds": grace_seconds})

    def lost(self, worker: str) -> None:
        """An operator's word that it is dead, which the controller may have found out by itself."""
        answer = self._rest.post(f"/jobs/{self.job_name}/workers/{worker}/lost")
        assert answer.is_success or answer.json()["code"] == "worker_gone", answer.text

    def pause(self) -> Json:
        return self._answer("POST", f"/jobs/{self.job_name}/pause")

    def resume(self) -> Json:
        return self._answer("POST", f"/jobs/{self.job_name}/resume")

    def cancel(self) -> Json:
        return self._answer("DELETE", f"/jobs/{self.job_name}")

    # ---- waiting

    def until(self, goal: str, seen: Callable[[Json], Any], patience: float = PATIENCE_SECONDS) -> Any:
        """Until `seen(job)`; fails at once when the job is over and it was not that."""

        def look() -> Any:
            job = self.job()
            value = seen(job)
            assert value or job["phase"] not in OVER, f"job {job['phase']} before {goal}: {job['reason']}"
            return value

        return until(goal, look, patience)

    def wait_step(self, step: int) -> None:
        self.until(f"step {step}", lambda job: job["step"] >= step)

    def wait_phase(self, phase: str) -> None:
        self.until(f"phase {phase}", lambda job: job["phase"] == phase)

    def wait_world(self, size: int) -> None:
        """Until exactly so many members train."""
        self.until(f"a world of {size}", lambda job: job["workers"]["active"] == size and job["phase"] == "running")

    def wait_state(self, worker: str, *states: str) -> None:
        self.until(
            f"{worker} to be {' or '.join(states)}",
            lambda _: self.workers().get(worker, {"state": "unknown"})["state"] in states,
        )

    def wait_saved(self, step: int) -> int:
        """Until a checkpoint of that step or a later one is known; returns its step."""

        def saved(job: Json) -> int:
            last = int(job["last_checkpoint_step"] or 0)
            return last if last >= step else 0

        return int(self.until(f"a checkpoint of step {step}", saved))

    def release(self) -> None:
        """The script runs as fast as it can from here on."""
        self._go.touch()

    def wait_done(self) -> None:
        """Until the job has succeeded."""
        self.release()
        self.until("success", lambda job: job["phase"] == "succeeded")

    def wait_undisturbed(self, of: Mapping[str, Any] | None = None) -> Json:
        """Until the job has succeeded with the bits of the undisturbed run, no step lost; returns the report.

        `of`: the options of that run, where they are others than the cluster's.
        """
        self.wait_done()
        report, expected = self.report(), undisturbed(of or self.options, self.script)
        assert report["fingerprint"] == expected, "other bits than the undisturbed run"
        assert [world["lost_steps"] for world in report["generations"]] == [0] * len(report["generations"])
        return report

    def wait_exit(self, worker: str) -> int:
        """The worker's exit status."""
        until(f"{worker} to end", lambda: self.exit_code(worker) is not None)
        return ended()[self.pids[worker]]

    # ---- inside

    def fork(self, who: str, call: str, arguments: Mapping[str, Any], env: Mapping[str, str], log: Path) -> int:
        """Start the process of that worker or controller, wherever it belongs."""
        return fork(call, arguments, env, log)

    @property
    def _secrets(self) -> dict[str, str]:
        return {"SHOAL_TOKEN": self.token} if self.token else {}

    def _submit(self) -> None:
        self._answer("POST", "/jobs", self.spec)

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Json:
        answer = self._rest.request(method, path, json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def _answers(self) -> bool:
        assert self._controller not in ended(), "the controller ended at its start"
        try:
            return self._rest.get(f"{self.url}/readyz").is_success
        except httpx.TransportError:
            return False

    def _pid(self, worker: str) -> int:
        return self.pids.get(worker) or int(self.workers()[worker]["pid"])

    def _local_pids(self) -> list[int]:
        """Processes that the controller's own launcher has started."""
        if self.spec["launcher"] != "local" or not self._controller:
            return []
        try:
            return [worker["pid"] for worker in self.workers().values() if worker["pid"]]
        except (AssertionError, httpx.TransportError):
            return []

    def story(self) -> str:
        """What happened so far, for a test's failure."""
        parts = []
        try:
            parts += [f"job: {self.job()}", *(str(worker) for worker in self.workers().values())]
            parts += [f"{event['revision']:4} {event['kind']}: {event['message']}" for event in self.events()[-60:]]
        except (AssertionError, httpx.TransportError) as error:
            parts.append(f"the controller does not answer: {error}")
        logs = [*self.folder.glob("*.log"), *self.folder.glob("store/jobs/*/*.log")]
        parts += [f"---- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(logs)]
        return "\n".join(parts)


def send_signal(pid: int, number: signal.Signals, group: bool = False) -> None:
    """To a process that may be gone already."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except ProcessLookupError:
        return


def state_of(pid: int) -> str:
    """A process's state as the system tells it: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def alone(options: Mapping[str, Any], script: str = TRAIN, env: Mapping[str, str] | None = None) -> Json:
    """What a world of one without a controller ends with: the result that its script writes."""
    folder = Path(tempfile.mkdtemp(prefix="alone-"))
    try:
        log, result = folder / "log", folder / "result"
        pid = fork(script, {**options, "result": str(result)}, env or {}, log)
        until("the undisturbed run to end", lambda: pid in ended())
        assert ended()[pid] == 0, f"the undisturbed run failed:\n{log.read_text()}"
        return dict(json.loads(result.read_text()))
    finally:
        shutil.rmtree(folder)


@cache
def _undisturbed(options: str, script: str) -> Json:
    return alone(json.loads(options), script)


def undisturbed(options: Mapping[str, Any], script: str = TRAIN) -> str:
    """The fingerprint of the same options in a world of one, computed once per session."""
    matter = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    return str(_undisturbed(json.dumps(matter, sort_keys=True), script)["fingerprint"])
