"""One warm process from which workers and controllers are forked: torch is imported once per test session.

It has imported torch, shoal and the controller and started no thread, so a fork of it is a process like any other after
0.01 s instead of 2. Tests meet it through cluster.py only. `python -m integration.warm` is the process itself: it reads
one JSON request a line from its standard input, answers one a line, and dies with whoever started it, as its forks do
with it: a run of the tests that is killed leaves no worker behind that trains for ever.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shoal_protos.channel import GRPC_VARIABLES

TESTS = Path(__file__).resolve().parents[1]
WARM_MODULES = (
    "torch", "torch.distributed", "shoal.training.engine", "shoal.training.start",
    "shoal_controller.server", "integration.scripts",
)  # fmt: skip
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A thread pool that is started at import would not survive the fork."""
PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h."""


class Warm:
    """The tests' end: forks processes, knows how they ended."""

    def __init__(self, modules: Sequence[str] = WARM_MODULES) -> None:
        """To be called on the main thread: whatever is forked dies with the thread that calls it."""
        env = {name: value for name, value in os.environ.items() if name not in GRPC_VARIABLES}  # Shoal sets it
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        env |= ONE_THREAD | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "integration.warm", str(os.getpid()), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        self.pid = self._process.pid
        self._asking = threading.Lock()

    def fork(self, call: str, arguments: Mapping[str, Any], env: Mapping[str, str], log: Path) -> int:
        """Start `module:function` with these keyword arguments in a session of its own; returns its pid."""
        request = {"call": call, "arguments": arguments, "env": env, "log": str(log)}
        return int(self._ask(request)["pid"])

    def ended(self) -> dict[int, int]:
        """Exit status by pid of the processes that have ended so far (negative: the signal)."""
        return {int(pid): status for pid, status in self._ask({})["ended"].items()}

    def close(self) -> None:
        """Ends it with all that it has forked."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=100)  # where no test has forked from it, it may still be importing
        finally:
            self._process.kill()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with self._asking:  # a test's own threads ask, too
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the warm process died; its words are on this process's standard error"
        return dict(json.loads(answer))


# ---- the process itself


@dataclass
class Child:
    """What a fork is to become."""

    call: str
    arguments: dict[str, Any]
    env: dict[str, str]
    log: str


def serve() -> Child | None:
    """Answer requests until the input ends (None), or be the child that was asked for."""
    ended: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    _kill_all(selector)
                    return None
                request = json.loads(line)
                if request:
                    here = os.getpid()
                    pid = os.fork()
                    if pid == 0:
                        die_with(here)
                        selector.close()
                        return Child(**request)
                    ended.pop(pid, None)  # an earlier child's, where the kernel gives its number again
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                    _answer({"pid": pid})
                else:
                    _reap(selector, ended)
                    _answer({"ended": ended})
        _reap(selector, ended)


def _reap(selector: selectors.BaseSelector, ended: dict[int, int]) -> None:
    for key in [key for key in selector.get_map().values() if key.data is not None]:
        pid, status = os.waitpid(key.data, os.WNOHANG)
        if pid:
            ended[pid] = os.waitstatus_to_exitcode(status)
            selector.unregister(key.fileobj)
            os.close(key.fd)


def _kill_all(selector: selectors.BaseSelector) -> None:
    for pid in [key.data for key in selector.get_map().values() if key.data is not None]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answer(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def become(child: Child) -> NoReturn:
    """Leave the server behind: own session, own environment, own log; then run, and end as any program ends."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(child.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environ.update(child.env)
    code = _run(child)
    threading._shutdown()  # type: ignore[attr-defined]  # pools of threads end here, as they do before `atexit`
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # taking torch apart would take half a second


def _run(child: Child) -> int:
    """What the interpreter makes of a script: its exit status."""
    module, _, function = child.call.partition(":")
    try:
        getattr(importlib.import_module(module), function)(**child.arguments)
    except SystemExit as end:
        return _status_of(end)
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        except SystemExit as end:
            return _status_of(end)
        return 1
    return 0


def _status_of(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else 0 if end.code is None else 1


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended already


def main(parent: str, *modules: str) -> None:
    die_with(int(parent))
    for module in modules:
        importlib.import_module(module)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads run after the imports; a fork would lose all but one"
    gc.collect()
    gc.freeze()
    child = serve()
    if child is not None:
        become(child)


if __name__ == "__main__":
    main(*sys.argv[1:])
