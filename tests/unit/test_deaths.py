"""A process of this host that dies is noticed by a mutex that the kernel gives back, and one that ends is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from rule import Edit, holds, rule
from shoal.process import deaths
from shoal.process.deaths import own_life, watch
from shoal.process.unnamed_memory import MemoryAddress
from tiers import check

pytestmark = check("starts processes")

PATIENCE_SECONDS = 100.0
KEEPS_A_THREAD = "import threading, time; threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()"
"""Python takes down the modules that such a thread still uses, before the process has ended."""
FAILS_AT_ITS_END = "import threading; threading._register_atexit(lambda: 1 / 0)"
ENDS = ("", KEEPS_A_THREAD, "sys.exit(3)", "raise ValueError('an error of the script')", FAILS_AT_ITS_END)
LIVES = "import os, sys; from shoal.process import deaths; print(deaths.own_life().to_bytes().hex(), flush=True);"
WAITS = "sys.stdin.read(1)"
IN_A_CHILD = """
import multiprocessing, os
from shoal.process import deaths
asked = os.dup(0)
def child():
    print(deaths.own_life().to_bytes().hex(), flush=True)
    os.read(asked, 1)
begun = multiprocessing.get_context("fork").Process(target=child)
begun.start(), begun.join()
"""
"""Where `atexit` is not heard of."""
WATCHES = """
import sys
from shoal.process import deaths
from shoal.process.unnamed_memory import MemoryAddress
life = MemoryAddress.from_bytes(bytes.fromhex(sys.argv[1]))
deaths.watch(life, lambda: print("died", flush=True))
print("watches", flush=True)
sys.stdin.read(1)
"""


class Started:
    """A process that says where it is watched, and then does what its program says."""

    def __init__(self, program: str, *arguments: str) -> None:
        command = [sys.executable, "-c", program, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.says = self.line()

    @property
    def life(self) -> MemoryAddress:
        return MemoryAddress.from_bytes(bytes.fromhex(self.says))

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """It has waited for a character."""
        assert self.process.stdin is not None
        self.process.stdin.write(".")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def starts() -> Iterator[Callable[..., Started]]:
    with ExitStack() as stack:

        def start(program: str, *arguments: str) -> Started:
            one = Started(program, *arguments)
            stack.enter_context(one.process)
            stack.callback(one.process.kill)
            return one

        yield start


def await_watcher(life: MemoryAddress) -> None:
    """Until the thread that watches that process has ended."""
    for thread in threading.enumerate():
        if thread.name == f"shoal-life-{life.process}":
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


@rule(
    "The death of a process of this host is known when the kernel gives back its mutex, which is before its memory is "
    "freed and its sockets are closed; one that ends by itself is not taken for dead",
    "A change of the world",
    broken_by=[
        Edit("shoal.process.deaths", "        if _mark_in(memory) == LIVES:\n", "        if True:\n"),
        Edit("shoal.process.deaths", "        _libc.pthread_mutexattr_setrobust(attributes, ROBUST),\n", ""),
        Edit("shoal.process.deaths", "atexit.register(_mark_end)\nthreading.", "threading."),
        Edit("shoal.process.deaths", "threading._register_atexit(_mark_end)", "threading"),
        Edit(
            "shoal.process.deaths",
            "        _libc.pthread_mutex_unlock(mutex)  #",
            "        code = 0  #",
            by="test_all_that_watch_a_process_hear_of_its_death",
        ),
    ],
)
@pytest.mark.parametrize("program", [*(f"{LIVES}{WAITS}\n{end}" for end in ENDS), IN_A_CHILD])
def test_a_killed_process_is_seen_to_die_and_one_that_ends_by_itself_is_not(
    starts: Callable[..., Started], program: str
) -> None:
    killed, ends, died = starts(LIVES + WAITS), starts(program), list[str]()
    watch(killed.life, lambda: died.append("killed"))
    watch(ends.life, lambda: died.append("ended"))
    ends.go_on()
    ends.process.wait(PATIENCE_SECONDS)
    await_watcher(ends.life)
    assert died == []
    killed.kill()
    await_watcher(killed.life)
    assert died == ["killed"]


@holds("The death of a process of this host is known")
def test_all_that_watch_a_process_hear_of_its_death(starts: Callable[..., Started]) -> None:
    killed = starts(LIVES + WAITS)
    watchers = [starts(WATCHES, killed.says) for _ in range(3)]
    assert [one.says for one in watchers] == ["watches"] * 3
    killed.kill()
    assert [one.line() for one in watchers] == ["died"] * 3


@pytest.mark.parametrize("fork", ["os.fork", "__import__('ctypes').PyDLL(None).fork"])
def test_forked_children_neither_hide_a_death_nor_end_for_their_parent(
    starts: Callable[..., Started], fork: str
) -> None:
    """One child has ended as Python ends, and one lives on. Of a fork by another library Python knows nothing."""
    forks = f"{fork}() or sys.exit(0)\nprint(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)\n"
    killed, died = starts(f"{LIVES}{WAITS}\n{forks}os.fork()\n{WAITS}"), threading.Event()
    watch(killed.life, died.set)
    killed.go_on()
    assert killed.line() == "0"
    killed.process.kill()
    assert died.wait(PATIENCE_SECONDS)


def test_a_later_watch_takes_the_place_of_an_earlier_one(starts: Callable[..., Started]) -> None:
    killed, died = starts(LIVES + WAITS), list[str]()
    watch(killed.life, lambda: died.append("in the first world"))
    watch(killed.life, lambda: died.append("in the second world"))
    killed.kill()
    await_watcher(killed.life)
    assert died == ["in the second world"]


def test_nobody_watches_itself_nor_what_is_gone(starts: Callable[..., Started]) -> None:
    watch(own_life(), lambda: pytest.fail("it lives"))
    gone = starts(LIVES + WAITS)
    gone.kill()
    with pytest.raises(OSError):
        watch(gone.life, lambda: pytest.fail("it was never watched"))
    assert own_life().token not in deaths._watched
    assert gone.life.token not in deaths._watched


@pytest.mark.parametrize("name", ["_make_mutex", "threading.Thread.start", "_hold"])
def test_a_process_that_nobody_can_watch_says_so_each_time_and_keeps_no_file_open(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without robust mutexes, without a thread, and with one that does not come to run."""

    def refused(*_: object) -> None:
        if name != "_hold":
            raise RuntimeError("there is no more")

    monkeypatch.setattr(deaths, "_own", None)
    monkeypatch.setattr(deaths, "HELD_SECONDS", 0.01 if name == "_hold" else deaths.HELD_SECONDS)
    monkeypatch.setattr(f"shoal.process.deaths.{name}", refused)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - as many as are open now
    for _ in range(2):
        with pytest.raises((RuntimeError, TimeoutError)):
            own_life()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
