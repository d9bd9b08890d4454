"""A `shoal controller` that writes down what held its event loop: `python held_loop.py FILE controller …`.

Every callback that took so much CPU is a line of FILE, `seconds of whom`. Its wall time would tell of the machine.
It ends with whoever started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import time
from asyncio import events
from pathlib import Path

from shoal_controller.cli.main import main
from shoal_controller.sessions.settings import SessionSettings

LEAST_SECONDS = 0.005
READ_SECONDS = 0.001
PR_SET_PDEATHSIG = 1
STREAMS = 1 << 14
"""Of one address: all simulated workers have the same one, and no token."""


def measure(file: Path) -> None:
    """From now on, in every event loop of this process.

    The thread's CPU time is a system call, so it is read once a millisecond of wall time and where a callback was long.
    """
    run, lines = events.Handle._run, file.open("a", buffering=1)
    read_at, cpu_seconds = time.perf_counter(), time.thread_time()

    def measured(handle: asyncio.Handle) -> None:
        nonlocal read_at, cpu_seconds
        began = time.perf_counter()
        run(handle)
        ended = time.perf_counter()
        if ended - read_at < READ_SECONDS:
            return
        before, read_at, cpu_seconds = cpu_seconds, ended, time.thread_time()
        seconds = min(cpu_seconds - before, ended - began)
        if seconds >= LEAST_SECONDS:
            lines.write(f"{seconds:.4f} {_whose(handle)}\n")

    events.Handle._run = measured  # type: ignore[assignment, method-assign]


def _whose(handle: asyncio.Handle) -> str:
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return task.get_name() if isinstance(task, asyncio.Task) else "the event loop"


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    measure(Path(sys.argv[1]))
    for bound in ("of_address", "of_token"):
        object.__setattr__(SessionSettings().limits, bound, STREAMS)
    sys.argv = ["shoal", *sys.argv[2:]]
    main()
