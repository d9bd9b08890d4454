"""The thread that moves the bytes of a group gives way to those that compute, and only that one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from over_gloo import over_gloo
from shoal.group import gloo
from shoal.group.gloo import giving_way
from shoal.group.group import Group

SIZE = 3
LOOP = b"gloo_tcp_loop"


def threads() -> dict[int, str]:
    """The kernel's names of this process's threads."""
    found: dict[int, str] = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            found[int(thread.name)] = (thread / "comm").read_text().strip()
        except FileNotFoundError:  # it has ended by now
            continue
    return found


def swap(group: Group) -> None:
    rows = group.all_gather(torch.full((4,), group.rank, dtype=torch.uint8))
    assert rows[:, 0].tolist() == list(range(SIZE))


def test_a_groups_loop_interrupts_nobody_by_waking_and_other_threads_are_as_they_were() -> None:
    before = set(threads())
    met = threading.Barrier(SIZE)

    def act(group: Group) -> None:
        swap(group)
        met.wait(100.0)
        new = {thread: name for thread, name in threads().items() if thread not in before}
        classes = {thread: os.sched_getscheduler(thread) for thread in new}
        loops = {thread for thread, name in new.items() if name == "gloo_tcp_loop"}
        assert len(loops) == SIZE
        assert {thread for thread, found in classes.items() if found == os.SCHED_BATCH} == loops
        met.wait(100.0)

    over_gloo(SIZE, act)


@contextmanager
def running(name: bytes, scheduler: int = os.SCHED_OTHER) -> Iterator[int]:
    """A thread with a name and class of its own, by its number."""
    is_ready, is_over = threading.Event(), threading.Event()

    def live() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(name)
        os.sched_setscheduler(0, scheduler, os.sched_param(0))
        is_ready.set()
        is_over.wait(100.0)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        assert is_ready.wait(100.0) and thread.native_id is not None
        yield thread.native_id
    finally:
        is_over.set()
        thread.join()


def class_after(name: bytes, scheduler: int = os.SCHED_OTHER) -> int:
    """Of such a thread that begins while a group looks for its loop."""
    with ExitStack() as threads:
        with giving_way():
            thread = threads.enter_context(running(name, scheduler))
        return os.sched_getscheduler(thread)


def test_a_loop_keeps_the_class_that_its_process_was_given() -> None:
    """SCHED_IDLE stands for the classes for real time too, which need a privilege."""
    assert class_after(LOOP) == os.SCHED_BATCH
    assert class_after(LOOP, os.SCHED_IDLE) == os.SCHED_IDLE


def test_a_loop_that_was_there_before_is_left_alone() -> None:
    """It is of a process group of the script's own."""
    with running(LOOP) as loop:
        with giving_way():
            pass
        assert os.sched_getscheduler(loop) == os.SCHED_OTHER


def test_a_thread_whose_name_is_no_text_hinders_no_group() -> None:
    """The kernel cuts names after 15 bytes, be it within a letter."""
    assert class_after("reading größen".encode()[:13]) == os.SCHED_OTHER


@pytest.mark.parametrize("refusal", [PermissionError, ProcessLookupError])
def test_a_system_that_does_not_allow_it_has_groups_all_the_same(
    refusal: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise refusal("of the system")  # a new one: its traceback keeps the frames of the group that was built

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    over_gloo(SIZE, swap)


def test_a_system_that_does_not_tell_its_threads_has_groups_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gloo, "THREADS", tmp_path / "nothing")
    over_gloo(SIZE, swap)
