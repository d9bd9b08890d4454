"""What every test gets: nothing may be left behind, and a free port when one is asked for.

`nothing_is_left_behind` fails a test after which a task, thread, process, socket or file is there that was not before.
What may stay is in the named lists below. Waiting for a port or thread to go has a short deadline.
"""

from __future__ import annotations

import asyncio
import gc
import getpass
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import shoal  # noqa: F401  (before gRPC: it makes forks of this process safe)
import tqdm
from hypothesis import HealthCheck, settings
from matrices import examples
from tiers import sort_into_tiers

# torch shows a bar where it compiles and tqdm is installed, and the first bar would start a thread for good.
tqdm.tqdm.monitor_interval = 0

# How fast an example is made and tried says how busy the machine is, and nothing of the code.
settings.register_profile(
    "shoal", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shoal")

THREADS_THAT_STAY = (
    "pytest_timeout",  # watches this very test
    "grpc",  # gRPC's own live as long as the process
    "_grpc",
    "Dummy-",  # one of gRPC's own in which it has called us
    "fsspecIO",  # fsspec's event loop for object stores lives as long as the process
    "shoal-life",  # holds the mutex by which others notice that this process has died
    "asyncio_",  # and so do the threads in which it looks up names; `asyncio.run` ends those of ours
)
"""Beginnings of the names of threads that live as long as the process."""

GRPC_POLLER = "(_poll_wrapper)"
"""End of the name of grpc.aio's thread, which lives as long as any of its objects."""

PROCESSES_THAT_STAY = (
    "from multiprocessing.resource_tracker import main",  # Python's own, once something was spawned
    "chromium/chromium --type=",  # a browser's own, spare ones too; the browser itself has to be ended
)
"""Parts of the command lines of processes that end with those that have started them."""

TASKS_THAT_STAY = ("TestRunner._run_tests_and_fixtures",)
"""Of anyio's pytest plugin: it runs the test itself."""

FILES_THAT_STAY = {
    ".venv",
    ".hypothesis",
    ".mypy_cache",
    ".ruff_cache",
    ".import_linter_cache",
    ".pytest_cache",
    ".git",
    f"torchinductor_{getpass.getuser()}",
}
"""Tools' folders in the working directory, and the one that torch makes with a process's first optimizer."""

GRACE_SECONDS = 30.0


def pytest_configure() -> None:
    """A run in the background of a shell ignores Ctrl-C, and the commands that tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest looks which marks were asked for."""
    sort_into_tiers(items)


def _threads() -> dict[str, str]:
    ours = [thread for thread in threading.enumerate() if not thread.name.startswith(THREADS_THAT_STAY)]
    return {f"thread {t.ident}": f"thread {t.name!r}" for t in ours if not t.name.endswith(GRPC_POLLER)}


def _processes() -> dict[str, str]:
    """All descendants of this process, the ended ones that nobody has waited for among them."""
    found, parents = {}, [os.getpid()]
    while parents:
        for task in _tasks_of(parents.pop()):
            try:
                children = (task / "children").read_text().split()
            except OSError:
                continue  # the thread ended while it was looked at
            parents += map(int, children)
            named = {child: _name(child) for child in children}
            found |= {
                f"process {child}": f"process {child} ({name})"
                for child, name in named.items()
                if not any(one in name for one in PROCESSES_THAT_STAY)
            }
    return found


def _tasks_of(process: int) -> list[Path]:
    """Its threads; none where it ended while it was looked at."""
    with suppress(OSError):
        return list(Path(f"/proc/{process}/task").glob("*"))
    return []


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:120] or "ended, not waited for"
    except OSError:
        return "just ended"


def _sockets() -> dict[str, str]:
    """Descriptors of this process that are sockets. Of which kind they are takes long to find out."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that with which they are listed is gone
            link = str(descriptor.readlink())
            if link.startswith("socket:"):
                found[f"socket {descriptor.name} {link}"] = descriptor.name
    return found


def _internet(descriptors: Collection[str]) -> list[str]:
    """Those of them that are ports listened on, or connections."""
    if not descriptors:
        return []
    open_now = psutil.Process().net_connections(kind="inet")
    return [f"socket {c.laddr} → {c.raddr or 'nobody'} ({c.status})" for c in open_now if str(c.fd) in descriptors]


def _files(temporary: Path) -> dict[str, str]:
    there = [*Path.cwd().iterdir(), *temporary.iterdir()]
    return {f"file {file}": f"file {file}" for file in there if file.name not in FILES_THAT_STAY}


def _everything(temporary: Path) -> dict[str, str]:
    return _threads() | _processes() | _sockets() | _files(temporary)


def _left(temporary: Path, before: Collection[str]) -> list[str]:
    """What is there now, and was not before."""
    new = {key: text for key, text in _everything(temporary).items() if key not in before}
    sockets = {key for key in new if key.startswith("socket ")}
    return [*(text for key, text in new.items() if key not in sockets), *_internet([new[key] for key in sockets])]


@pytest.fixture(scope="session")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this process and its children put temporary files, so that a forgotten one is seen."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield folder


def _stays(task: asyncio.Task[object]) -> bool:
    """Whether nobody here could have waited for it. gRPC's own are nameless; its `rpc_task` is a handler of ours."""
    coroutine = str(task.get_coro())
    of_grpc = "<_cython_" in coroutine and task.get_name().startswith("Task-")
    return of_grpc or any(name in coroutine for name in TASKS_THAT_STAY)


@pytest.fixture(scope="session")
def forgotten_tasks() -> Iterator[list[str]]:
    """Names of the tasks that were still running when an event loop's main one was done."""
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        cancel: Callable[[asyncio.AbstractEventLoop], None] = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]

        def note_and_cancel(loop: asyncio.AbstractEventLoop) -> None:
            for task in asyncio.all_tasks(loop):
                if not _stays(task):
                    names.append(f"task {task.get_name()}: {task.get_coro()}")
            cancel(loop)

        patch.setattr(asyncio.runners, "_cancel_all_tasks", note_and_cancel)
        yield names


@pytest.fixture(autouse=True)
def nothing_is_left_behind(temporary: Path, forgotten_tasks: list[str]) -> Iterator[None]:
    """Fails the test that leaves something behind. Processes are killed: they would keep the run's output open."""
    forgotten_tasks.clear()
    before = _everything(temporary)
    yield
    left = _gone_in_time(temporary, before)
    for process in _processes().keys() - before.keys():
        with suppress(ProcessLookupError):
            os.kill(int(process.removeprefix("process ")), signal.SIGKILL)
    assert [*left, *forgotten_tasks] == [], "the test has left something behind"


def _gone_in_time(temporary: Path, before: Collection[str]) -> list[str]:
    pause, waited = threading.Event(), 0.0
    while True:
        left = _left(temporary, before)
        if not left or waited > GRACE_SECONDS:
            return left
        gc.collect()
        pause.wait(0.05)
        waited += 0.05
