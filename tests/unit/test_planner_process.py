"""The planner in a process of its own: the same answers, and a new process after one that died."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import AskPlanner
from shoal_controller.core.machine.events import Event, PlannerAnswered, PlannerFailed
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms
from shoal_controller.core.planning.question import ChangeQuestion, RecoveryQuestion, StartQuestion, answer
from shoal_controller.jobs import planner_process
from shoal_controller.jobs.planner_process import PlannerProcess
from shoal_protos.acts import Save
from shoal_protos.errors import PeerError
from shoal_protos.plan import Member, Plan, Reason
from shoal_protos.runs import NO_BLOCKS, Runs, every
from small_machine import SPEC, SmallMachine, running
from tiers import check

pytestmark = check("starts processes")

TERMS = Terms(lanes=8, blocks=64, mirrors=1, mirror_partners=4, fill_blocks_per_step=4)


SLOW = """
import time
from shoal_controller.jobs import planner_main
planner_main.BEAT_SECONDS = 0.1
def slow(_):
    time.sleep(3)
    raise ValueError("this planner took 3 s")
planner_main.answer = slow
"""


FROZEN_ONCE = """
import os, signal
from pathlib import Path
if not Path("{0}").exists():
    Path("{0}").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


HUNGRY = """
from shoal_controller.jobs import planner_main
def hungry(_):
    raise MemoryError
planner_main.answer = hungry
"""


@pytest.fixture
def begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has every Python that is started from now on run this first."""

    def write(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return write


@asynccontextmanager
async def another_process() -> AsyncIterator[PlannerProcess]:
    """A planner that plans nothing in place."""
    planner = PlannerProcess(in_place=-1)
    try:
        yield planner
    finally:
        await planner.stop()


def candidates(count: int) -> tuple[Candidate, ...]:
    return tuple(Candidate(Member(f"w{n}", f"w{n}.1", f"10.0.0.1:{n + 1}"), f"host{n}", n) for n in range(count))


def start(count: int = 8, generation: int = 1) -> StartQuestion:
    return StartQuestion(PlanRequest(TERMS, generation, Reason.START), candidates(count))


def recovery(before: Plan, gone: int) -> RecoveryQuestion:
    here = [
        replace(known, holds=share.keeps, current=every(TERMS.blocks))
        for known, share in zip(candidates(before.world_size), before.shares, strict=True)
    ]
    return RecoveryQuestion(PlanRequest(TERMS, 2, Reason.KILL), tuple(here[gone:]), before, 7, b"record")


@asynchronous
async def test_another_process_gives_the_same_answers_as_this_one() -> None:
    async with another_process() as planner:
        world = await planner.answer(start())
        assert isinstance(world, Plan)
        assert world == answer(start())
        after = recovery(world, gone=1)
        assert await planner.answer(after) == answer(after)
        joined = (*after.candidates, replace(candidates(9)[8], holds=NO_BLOCKS))
        change = ChangeQuestion(PlanRequest(TERMS, 3, Reason.JOIN), joined, answer(after))
        assert await planner.answer(change) == answer(change)


@asynchronous
async def test_blocks_that_nobody_holds_are_an_answer() -> None:
    async with another_process() as planner:
        world = await planner.answer(start())
        assert isinstance(world, Plan)
        lost = await planner.answer(recovery(world, gone=7))
        assert isinstance(lost, Runs)
        assert lost == every(TERMS.blocks) - world.shares[7].keeps


@asynchronous
async def test_a_small_world_is_planned_in_place() -> None:
    planner = PlannerProcess()
    assert await planner.answer(start(64)) == answer(start(64))
    assert planner.pid is None


@asynchronous
async def test_a_question_is_taken_up_when_those_before_it_are_answered() -> None:
    async with another_process() as planner:
        order: list[str] = []

        async def ask(number: int) -> None:
            await planner.answer(start(generation=number), lambda: order.append(f"{number} begins"))
            order.append(f"{number} is answered")

        async with asyncio.TaskGroup() as jobs:
            for number in range(1, 4):
                jobs.create_task(ask(number))
        assert order == [f"{number} {act}" for number in range(1, 4) for act in ("begins", "is answered")]


@rule(
    "A question without an answer is asked again, but not while it only stands in line behind those of other "
    "jobs; the planner's process is started again when it has died, or sends no beat while it should plan, and "
    "this process has run to hear it",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.jobs.planner_process",
            "timeout=seconds / LOOKS",
            "timeout=None",
            by="test_a_planner_that_stands_still_is_ended_and_started_again",
        ),
        Edit(
            "shoal_controller.jobs.planner_process",
            "LOOKS = 5\n",
            "LOOKS = 1\n",
            by="test_a_controller_that_was_frozen_itself_says_of_no_planner_that_it_stood_still",
        ),
        Edit(
            "shoal_controller.jobs.planner_main",
            "            with _beating(replies):\n",
            "            if True:\n",
            by="test_a_planner_that_is_at_work_is_given_its_time_and_no_more",
        ),
        Edit(
            "shoal_controller.core.machine.phases.planner_questions",
            "    elif turn.now - planner.begun_at > turn.spec.progress_seconds:\n",
            "    elif turn.now - planner.begun_at > 1e9 * turn.spec.progress_seconds:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.planner_questions",
            "    if planner.begun_at is None:\n        if turn.now - planner.asked_at > turn.spec.stall_seconds:\n",
            "    if planner.begun_at is None:\n        if turn.now - planner.asked_at > turn.spec.progress_seconds:\n",
        ),
    ],
)
@asynchronous
async def test_a_planner_that_was_killed_says_so_and_is_started_again() -> None:
    async with another_process() as planner:
        await planner.answer(start())
        killed = planner.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(PeerError, match=r"the planner's process has ended \(exit status -9\)"):
            await planner.answer(start())
        assert await planner.answer(start()) == answer(start())
        assert planner.pid not in (None, killed)


@holds("A question without an answer")
@asynchronous
async def test_a_planner_that_stands_still_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with another_process() as planner:
        await planner.answer(start())
        frozen = planner.pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        monkeypatch.setattr(planner_process, "SILENT_SECONDS", 0.1)
        with pytest.raises(PeerError, match=r"has stood still for 0\.1 s"):
            await planner.answer(start())
        monkeypatch.undo()
        assert await planner.answer(start()) == answer(start())


@asynchronous
async def test_a_planner_that_is_frozen_before_it_is_ready_is_ended_and_started_again(
    begin_with: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin_with(FROZEN_ONCE.format(tmp_path / "was_frozen"))
    async with another_process() as planner:
        with monkeypatch.context() as patch:
            patch.setattr(planner_process, "ANSWER_SECONDS", 30.0)
            patch.setattr(planner_process, "START_SECONDS", 2.0, raising=False)
            with pytest.raises(PeerError, match=r"was not ready 2 s after its start"):
                await planner.answer(start())
        assert await planner.answer(start()) == answer(start())


@holds("A question without an answer")
@asynchronous
async def test_a_controller_that_was_frozen_itself_says_of_no_planner_that_it_stood_still(
    begin_with: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_with(SLOW)
    monkeypatch.setattr(planner_process, "SILENT_SECONDS", 1.0)
    async with another_process() as planner:
        with pytest.raises(PeerError, match="this planner took 3 s"):
            asked = asyncio.create_task(planner.answer(start()))
            while planner.pid is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.7)
            threading.Event().wait(1.5)  # as if this process were frozen
            await asked


@holds("A question without an answer")
@asynchronous
async def test_a_planner_that_is_at_work_is_given_its_time_and_no_more(
    begin_with: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_with(SLOW)
    monkeypatch.setattr(planner_process, "SILENT_SECONDS", 1.0)
    async with another_process() as planner:
        with pytest.raises(PeerError, match="this planner took 3 s"):
            await planner.answer(start())
        monkeypatch.setattr(planner_process, "ANSWER_SECONDS", 1.0)
        with pytest.raises(PeerError, match="had no answer after 1 s"):
            await planner.answer(start())


@asynchronous
async def test_what_others_print_where_python_begins_is_no_answer(begin_with: Callable[[str], None]) -> None:
    begin_with("print('a tracer is loaded ' * 3, flush=True)\n")
    async with another_process() as planner:
        assert await planner.answer(start()) == answer(start())


@asynchronous
async def test_a_planner_that_cannot_be_started_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with another_process() as planner:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/not/there/python")
            with pytest.raises(PeerError, match=r"the planner's process cannot be started: .*No such file"):
                await planner.answer(start())
        assert await planner.answer(start()) == answer(start())


@asynchronous
async def test_who_gives_a_question_up_leaves_nobody_its_answer() -> None:
    async with another_process() as planner:
        await planner.answer(start())
        given_up = asyncio.create_task(planner.answer(start(7)))
        await asyncio.sleep(0)
        others = asyncio.create_task(planner.answer(start(8, generation=5)))
        given_up.cancel()
        assert await others == answer(start(8, generation=5))


@asynchronous
async def test_a_question_that_the_planner_cannot_answer_is_an_error_and_not_its_end() -> None:
    async with another_process() as planner:
        nobody = StartQuestion(PlanRequest(TERMS, 1, Reason.START), ())
        await planner.answer(start())
        pid = planner.pid
        with pytest.raises(PeerError, match=r"(?s)the planner failed.*Traceback"):
            await planner.answer(nobody)
        assert await planner.answer(start()) == answer(start())
        assert planner.pid == pid


@asynchronous
async def test_a_planner_that_has_too_little_memory_says_so_and_calls_it_no_bug(
    begin_with: Callable[[str], None],
) -> None:
    begin_with(HUNGRY)
    async with another_process() as planner:
        with pytest.raises(PeerError, match=r"^the planner's process ran out of memory; give the controller more$"):
            await planner.answer(start())


@asynchronous
async def test_a_job_goes_on_while_a_question_is_answered_and_the_newest_one_is_the_next(tmp_path: Path) -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    machine = SmallMachine(
        {kind: lambda _, event: events.put_nowait(event) or () for kind in (PlannerAnswered, PlannerFailed)}
    )
    async with running(tmp_path, machine) as world:
        answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
        came = iter(answers)
        world.shell.connect(replace(world.written.outside(), planner=lambda question, begun: next(came)))
        await world.shell.create(SPEC)
        asked = [AskPlanner(number, start(generation=number), None) for number in range(1, 4)]
        for question in asked:
            machine.answers[Save] = [question]
            await world.shell.submit("train", Save())
        plan = answer(asked[0].question)
        answers[0].set_result(plan)
        assert await asyncio.wait_for(events.get(), 100) == PlannerAnswered(asked[0], plan)
        answers[1].set_exception(PeerError("the planner's process has ended"))
        assert await asyncio.wait_for(events.get(), 100) == PlannerFailed(3, "the planner's process has ended")
