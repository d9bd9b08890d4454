"""The thread by which gloo moves the bytes of a group: it gives way to the threads that compute.

gloo's loop tries a connection's lock and, where another thread holds it, asks the kernel again at once. And each
message wakes its receiver's loop, which the kernel prefers to whoever computes there: on a machine that has no
processor left, to a thread that sends just then and holds such a lock. The other loop spins until its time is over,
which took a tenth of a step of stage 3. A thread of the kernel's class for batches (sched(7), SCHED_BATCH) interrupts
nobody by waking; where a processor is idle it runs as soon as any other. Called by gloo.py; knows no group.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

THREADS = Path("/proc/self/task")
NAME = b"gloo_tcp_loop\n"


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """A context in which gloo makes a loop and uses it. Where the system does not allow it all stays as it is."""
    before = _threads()
    yield
    for thread in _threads() - before:
        with contextlib.suppress(OSError):
            if (thread / "comm").read_bytes() == NAME and _is_usual(int(thread.name)):
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def _is_usual(thread: int) -> bool:
    """Whether it runs as threads do of which nobody has said how: a process's class for real time, or for what is to
    wait for all others, is its loop's too.
    """
    return os.sched_getscheduler(thread) == os.SCHED_OTHER


def _threads() -> set[Path]:
    """Empty on a system that does not tell."""
    with contextlib.suppress(OSError):
        return set(THREADS.iterdir())
    return set()
