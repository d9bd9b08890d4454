"""A worker that is forked from a warm process is what one that is started would be, in its own eyes and in others'."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from integration.local_processes import SECONDS, Controller, ended, until, with_controller, written
from rule import Edit, rule
from shoal.process.warm import READ_BY_IMPORTS
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.process import _taking_in as taking_in_orphans
from shoal_protos.plan import Plan

SELF = """
import json, multiprocessing, os, pickle, signal, sys, threading
from pathlib import Path


class Own:
    pass


def double(number):
    return 2 * number


def texts(name):
    return [text.decode() for text in Path(f"/proc/self/{name}").read_bytes().split(b"\\0") if text]


if __name__ == "__main__":
    import __main__

    assert type(pickle.loads(pickle.dumps(Own()))) is Own is __main__.Own
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, [1, 2])
    open_files = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    found = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": str(sys.flags), "executable": sys.executable,
        "path": sys.path, "file": __file__, "spec": str(__spec__ and __spec__.name), "package": __package__,
        "names": sorted(globals()), "loader": type(__loader__).__name__, "module": Own.__module__,
        "environment": dict(sorted(os.environ.items())), "shown environment": sorted(texts("environ")),
        "command line": texts("cmdline"), "leads": os.getsid(0) == os.getpgrp() == os.getpid(),
        "parent": os.getppid(), "open files": open_files, "folder": os.getcwd(),
        "input": os.readlink("/proc/self/fd/0"),
        "outputs": [Path(os.readlink(f"/proc/self/fd/{fd}")).suffix for fd in (1, 2)],
        "line buffered": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.write_through],
        "signals": [str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "threads": threading.active_count(),
        "session, nice": stat[16:17], "main": threading.current_thread() is threading.main_thread(), "doubled": doubled,
        "hook": sys.excepthook is sys.__excepthook__,
    }
    print(json.dumps(found))
    print("and to stderr", file=sys.stderr)
"""
TELLS_ITS_END = """
import atexit, os, signal, sys, threading, time, traceback


def keep(kind, error, trace):
    atexit.register(lambda: print("at exit", traceback.extract_tb(error.__traceback__)))
    sys.__excepthook__(kind, error, trace)


sys.excepthook = keep
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread"))).start()
what = open(os.path.join(os.path.dirname(__file__), "how")).read()
print(what, flush=True)
if what == "wait":
    time.sleep(600)
if what == "error":
    raise ValueError("mine")
if what == "deep":
    def inner():
        raise KeyError("deep")
    try:
        inner()
    except KeyError as error:
        raise RuntimeError("outer") from error
if what == "interrupt":
    raise KeyboardInterrupt
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "syntax":
    exec("1 +")
sys.exit({"status": 7, "sentence": "no", "nothing": None}[what])
"""
SETS_VARIABLE = """
import os, sys

was_imported = "torch" in sys.modules
CHANGE
import torch, torch.fx.experimental._config as config

with open("/proc/self/environ") as shown:
    began_with = [one for one in shown.read().split("\\0") if one.startswith("OMP_")]
print(torch.get_num_threads(), config.extended_debug_cpp, os.getenv("OMP_NUM_THREADS"), began_with, not was_imported)
"""
READS = """
import os

class Noted(dict):
    def __getitem__(self, name):
        print(os.fsdecode(name))
        return super().__getitem__(name)

os.environ._data = Noted(os.environ._data)
import shoal
shoal.initialize
"""
SHOWS_CHILD = """
import subprocess, time

child = subprocess.Popen(["sleep", "600"])
print("wait", child.pid, flush=True)
time.sleep(600)
"""

IMPORT_SECONDS = 90.0
"""No import takes longer, beside other tests."""


def job(folder: Path, script: str, *arguments: str, is_module: bool = False, **env: str) -> JobSpec:
    (folder / "script.py").write_text(script)
    program = ("-m", "script") if is_module else (str(folder / "script.py"),)
    own = str(folder) if is_module else env.pop("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))  # Shoal's, where a mutant is tried
    search = {"PYTHONPATH": path} if path else {}
    return JobSpec(
        "demo",
        wanted=2,
        launcher="local",
        command=(sys.executable, *program, *arguments),
        env=search | env,
        run="run-1",
    )


async def warm(controller: Controller, spec: JobSpec) -> int:
    """The pid of the job's warm process, which is ready."""
    controller.launcher.world_began(Plan.__new__(Plan), spec)
    async with asyncio.timeout(IMPORT_SECONDS):
        while not controller.launcher.warm.of["demo"].look():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return controller.launcher.warm.of["demo"].pid


async def to_its_end(controller: Controller, worker: str, spec: JobSpec) -> tuple[int | None, list[str]]:
    """A worker's exit status, and what it has written."""
    place = await controller.launcher.spawn(worker, spec)
    async with asyncio.timeout(IMPORT_SECONDS):
        _, exited = await controller.exits.get()
    assert exited.worker == worker
    return exited.code, written(place.log).splitlines()


async def stays(controller: Controller, worker: str, spec: JobSpec) -> int:
    """The pid of a worker of TELLS_ITS_END that lives on."""
    (Path(spec.command[1]).parent / "how").write_text("wait")
    place = await controller.launcher.spawn(worker, spec)
    await until(lambda: "wait" in written(place.log))
    assert place.pid is not None
    return place.pid


@pytest.mark.parametrize("is_module", [False, True], ids=["a script", "a module"])
def test_a_forked_worker_is_what_a_started_one_is(tmp_path: Path, is_module: bool) -> None:
    async def scene(controller: Controller) -> None:
        (tmp_path / "other").mkdir()
        await stays(controller, "other", job(tmp_path / "other", TELLS_ITS_END))
        spec = job(tmp_path, SELF, "--size", "10M", "", is_module=is_module)
        started, lines = await to_its_end(controller, "w0", spec)
        assert started == 0, lines
        pid = await warm(controller, spec)
        forked, others = await to_its_end(controller, "w1", spec)
        assert forked == 0, others
        one, two = json.loads(lines[0]), json.loads(others[0])
        assert two["environment"].pop("SHOAL_WORKER_ID") == "w1"
        assert one["environment"].pop("SHOAL_WORKER_ID") == "w0"
        one["shown environment"].remove("SHOAL_WORKER_ID=w0")
        two["shown environment"].remove("SHOAL_WORKER_ID=w1")
        assert two == one
        assert lines[1:] == others[1:] == ["and to stderr"]
        assert controller.launcher.warm.of["demo"].pid == pid and not ended(pid)
        await controller.launcher.kill_all("demo")

    with_controller(tmp_path, scene, warm_start=True)


ENDS = ["status", "sentence", "nothing", "error", "deep", "interrupt", "kill", "syntax"]


def test_a_forked_workers_end_is_that_of_a_started_one(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        spec = job(tmp_path, TELLS_ITS_END)
        await stays(controller, "other", spec)
        started = {}
        for how in ENDS:
            (tmp_path / "how").write_text(how)
            started[how] = await to_its_end(controller, f"started-{how}", spec)
        await warm(controller, spec)
        for how in ENDS:
            (tmp_path / "how").write_text(how)
            assert await to_its_end(controller, f"forked-{how}", spec) == started[how], how
        assert [started[how][0] for how in ENDS] == [7, 1, 0, 1, 1, -signal.SIGINT, -signal.SIGKILL, 1]
        await controller.launcher.kill_all("demo")

    with_controller(tmp_path, scene, warm_start=True)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ('os.environ["MKL_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "2"', "2 False 2"),
        ('os.environ["TORCHDYNAMO_EXTENDED_DEBUG_CPP"] = "1"', "1 True 1"),
        ('del os.environ["OMP_NUM_THREADS"]', ""),
    ],
)
def test_a_script_that_changes_what_torch_reads_at_its_import_is_obeyed(tmp_path: Path, change: str, seen: str) -> None:
    async def scene(controller: Controller) -> None:
        (tmp_path / "other").mkdir()
        await stays(controller, "other", job(tmp_path / "other", TELLS_ITS_END))
        spec = job(tmp_path, SETS_VARIABLE.replace("CHANGE", change))
        started = await to_its_end(controller, "w0", spec)
        assert started[0] == 0 and started[1][0].startswith(seen) and started[1][0].endswith("True")
        await warm(controller, spec)
        assert await to_its_end(controller, "w1", spec) == started
        await controller.launcher.kill_all("demo")

    with_controller(tmp_path, scene, warm_start=True)


def test_a_killed_warm_process_is_made_anew_and_its_workers_live_on(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        spec = job(tmp_path, TELLS_ITS_END)
        await stays(controller, "w0", spec)
        first = await warm(controller, spec)
        forked = await stays(controller, "w1", spec)
        os.kill(first, signal.SIGKILL)
        await until(lambda: ended(first))
        await stays(controller, "w2", spec)  # which goes on without it
        second = await warm(controller, spec)
        assert second != first
        os.kill(forked, signal.SIGSEGV)
        exited = await controller.end()
        assert (exited.worker, exited.code) == ("w1", -signal.SIGSEGV)
        await controller.launcher.kill_all("demo")

    with_controller(tmp_path, scene, warm_start=True)


def test_what_a_worker_leaves_that_is_killed_while_another_is_forked_does_not_stay_a_zombie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orphans fall to the controller in that time; here the warm process stands still in it."""
    monkeypatch.setattr("shoal_controller.launchers.local.TIDY_SECONDS", 0.01)
    monkeypatch.setattr("shoal_controller.launchers.process.FORK_SECONDS", 60.0)

    async def scene(controller: Controller) -> None:
        spec = job(tmp_path, SHOWS_CHILD)
        place = await controller.launcher.spawn("w0", spec)
        await until(lambda: "wait" in written(place.log))
        assert place.pid is not None
        child = psutil.Process(int(written(place.log).split()[1]))
        stands_still = await warm(controller, spec)
        os.kill(stands_still, signal.SIGSTOP)
        forking = asyncio.create_task(controller.launcher.spawn("w1", spec))
        await until(taking_in_orphans.locked)
        os.kill(place.pid, signal.SIGKILL)
        await until(lambda: child.ppid() == os.getpid())
        os.kill(stands_still, signal.SIGCONT)
        assert (await controller.end()).code == -signal.SIGKILL
        await forking
        await until(lambda: not child.is_running())
        await controller.launcher.kill_all("demo")

    with_controller(tmp_path, scene, warm_start=True)


def test_variables_that_are_read_as_torch_and_shoal_are_imported_are_known() -> None:
    """Of libraries: those of Python itself and of the system are read as a process starts, or later."""
    bare = {"PATH": os.environ["PATH"]}  # a library may look through all variables that are set
    reads = subprocess.run(
        [sys.executable, "-c", READS], capture_output=True, text=True, timeout=IMPORT_SECONDS, env=bare, check=True
    )
    libraries = ("TORCH", "PYTORCH", "NPY", "NUMPY", "GRPC", "PROTOCOL", "OMP", "MKL", "ATEN", "KINETO")
    found = {name for name in reads.stdout.split() if name.startswith(libraries)}
    assert {"TORCH_LOGS", "GRPC_VERBOSITY"} <= found
    assert [name for name in sorted(found) if not name.startswith(READ_BY_IMPORTS)] == []


@rule(
    "A worker is forked from a warm process only where it is as one that is started: nothing but the importing thread "
    "runs there, and no module of the script's folder would have been imported in the place of another",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal.process.warm", "    if threads > 1:\n", "    if threads > 9:\n"),
        Edit("shoal.process.warm", "    why = _shadowed(command) or _take", "    why = _take"),
    ],
)
def test_a_worker_is_started_where_a_fork_would_not_be_the_same(tmp_path: Path) -> None:
    """A thread in the warm process; a module of the script's own that has the name of one that is imported."""

    async def scene(controller: Controller) -> None:
        threaded = tmp_path / "threaded"
        threaded.mkdir()
        (threaded / "sitecustomize.py").write_text(
            "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
        )
        one, other = job(tmp_path, TELLS_ITS_END, PYTHONPATH=str(threaded)), job(tmp_path, TELLS_ITS_END)
        await stays(controller, "w0", one)
        (tmp_path / "how").write_text("nothing")
        for number, spec in enumerate([one, other]):
            await warm(controller, spec)
            if spec is other:
                (tmp_path / "numpy.py").touch()
            assert (await to_its_end(controller, f"w1{number}", spec))[0] == 0
            assert controller.launcher.warm.of["demo"].refuses and controller.launcher.warm.of["demo"].has_ended
            controller.launcher.world_began(Plan.__new__(Plan), spec)
            assert controller.launcher.warm.of["demo"].has_ended, "it would refuse again"
        await controller.launcher.kill_all("demo")

    with_controller(tmp_path, scene, warm_start=True)


def test_without_warm_starts_no_process_is_kept(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        controller.launcher.world_began(Plan.__new__(Plan), job(tmp_path, TELLS_ITS_END))
        assert controller.launcher.warm.of == {}

    with_controller(tmp_path, scene)


@pytest.mark.parametrize("when", ["importing", "ready"])
def test_a_warm_process_ends_with_its_controller(when: str) -> None:
    program = """
import sys, time
from pathlib import Path
from shoal_controller.launchers.process import WarmProcess
warm = WarmProcess([sys.executable, "train.py"], {"SHOAL_CONTROLLER": "127.0.0.1:1"}, {})
while sys.argv[1] == "ready" and not warm.look():
    time.sleep(0.01)
time.sleep(0.3)
print(warm.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program, when], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        controller.kill()
    with suppress(psutil.NoSuchProcess):
        assert psutil.wait_procs([psutil.Process(pid)], timeout=SECONDS)[1] == []
