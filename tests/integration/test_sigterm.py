"""What SIGTERM does to a worker, before and after it is welcomed, and to its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from integration.linked_workers import Worker, begin_a_world
from integration.small_controller import PATIENCE_SECONDS, SmallController
from rule import Edit, rule
from shoal.group.group import WorldChanged
from shoal_protos.messages import (
    Heartbeat,
    Ping,
    Prepare,
    Request,
    Status,
)


def test_sigterm_asks_for_a_drain_though_the_main_thread_is_blocked() -> None:
    with SmallController() as controller:
        a, b = Worker("a", controller, grace_seconds=7.5), Worker("b", controller)
        a.introduce()
        b.does(b.introduce).result(PATIENCE_SECONDS)
        begin_a_world(controller, [a, b])
        controller.receives(Heartbeat, lambda beat: beat.status.step == 0, by="a")  # nothing else is due now

        def preempt() -> tuple[float, Status]:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                asked = controller.receives(Request, by="a")
                return asked.grace_seconds, controller.receives(Heartbeat, by="a").status
            finally:
                controller.sends("a", Prepare(2))

        with ThreadPoolExecutor(1) as preemption:
            outcome = preemption.submit(preempt)
            with pytest.raises(WorldChanged):
                a.gathers()  # the main thread: a Python handler could not run in here
            grace_seconds, status = outcome.result()
        assert (grace_seconds, status.drain, status.grace_seconds) == (7.5, True, 7.5)
        a.stops(2)
        a.close()
        b.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


UNWELCOMED = """
import os, signal, sys
from shoal.session.signals import install
if sys.argv[1] == "first":
    os.kill = lambda pid, number: None  # what the kernel makes of a default action where a process is the first
install(harmless=lambda: False)
signal.raise_signal(signal.SIGTERM)
signal.pause()
"""


@rule(
    "SIGTERM ends a worker that has not been welcomed yet, even as process 1 of a container, to which the kernel "
    "does not apply the default action",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.session.signals", "            os._exit(128 + number)\n", ""),
)
@pytest.mark.parametrize(("place", "status"), [("first", 143), ("any", -signal.SIGTERM)])
def test_sigterm_ends_a_worker_that_is_not_welcomed_yet_also_as_the_first_process(place: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", UNWELCOMED, place], timeout=PATIENCE_SECONDS)
    assert done.returncode == status


def test_a_handler_of_the_scripts_own_stays() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with SmallController() as controller:
            worker = Worker("a", controller)
            worker.introduce()
            os.kill(os.getpid(), signal.SIGTERM)
            controller.receives(Request)
            assert received == [signal.SIGTERM]
            worker.close()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12: this is what is tested
def test_a_forked_child_dies_of_sigterm_and_drains_nobody() -> None:
    with SmallController() as controller:
        worker = Worker("a", controller)
        worker.introduce()
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE_SECONDS))
            signal.pause()
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        controller.sends("a", Ping(1))
        assert not controller.receives(Heartbeat, lambda beat: beat.echo == 1).status.drain
        worker.close()
