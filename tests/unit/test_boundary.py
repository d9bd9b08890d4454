"""Every committed step has its boundary: callbacks and saves, though the world breaks between the vote and them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from crew import Crew, Killed, Task, engine_of, undisturbed
from integration.scripts import Samples
from matrices import shortened
from rule import Edit, holds, rule
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.boundary import Boundary
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
from shoal_protos.plan import Recovery
from torch import Tensor

OPTIONS: dict[str, Any] = {"max_steps": 6}


def watching(seen: list[int], **options: Any) -> Task:
    return Task({**OPTIONS, **options}, prepare=lambda engine: engine.on_step(lambda now: seen.append(now.global_step)))


@rule(
    "A boundary that a broken world left undone is completed by the next world before it trains, by all members "
    "alike: every committed step gets its callback, its save and whatever its vote asked for",
    "A step",
    broken_by=[
        Edit(
            "shoal.training.boundary",
            "        self._owed = int(rows[:, 3].min()) < step or self._called.last < step\n",
            "        self._owed = False\n",
        ),
        Edit(
            "shoal.training.boundary",
            "if counts else (step, -1)",
            "if counts else (self._passed, -1)",
            by="test_who_does_not_count_has_no_say_in_what_is_owed",
        ),
        Edit(
            "shoal.training.boundary",
            "if counts else (step, -1)",
            "if counts else (step, self._called.last)",
            by="test_who_does_not_count_has_no_say_in_what_is_owed",
        ),
        Edit(
            "shoal.training.boundary",
            "        if not self._owed:\n            self._passed = step\n",
            "",
            by="test_who_does_not_count_has_no_say_in_what_is_owed",
        ),
        Edit(
            "shoal.training.boundary",
            "        self._passed = self._called.last = step\n        self._owed = False\n",
            "        self._passed = self._called.last = step\n",
            by="test_who_begins_elsewhere_owes_nothing_of_where_it_was",
        ),
    ],
)
@pytest.mark.parametrize(
    ("stage", "name"), [(0, "b"), (0, "c"), (1, "a"), (1, "b"), (1, "c")], ids=lambda value: str(value)
)
@pytest.mark.parametrize("point", shortened(["vote", "in_vote", "optimizer", "hand_out"], "in_vote", "hand_out"))
def test_on_step_is_called_once_for_every_step_wherever_a_worker_dies(name: str, point: str, stage: int) -> None:
    seen: list[int] = []
    with Crew("abc", watching(seen, stage=stage)) as crew:
        crew.train_to(1)
        crew.plant(name, 3, point)
        assert crew.finish() == undisturbed(Task({**OPTIONS, "stage": stage}))
    assert seen == [1, 2, 3, 4, 5, 6]


def has_heard(worker: Any) -> bool:
    """That rank 0 is through with the callbacks of the step at hand."""
    comes = worker.engine.parts.boundary._called._comes
    return comes is not None and comes.is_over


@rule(
    "Rank 0 tells the others that it is through with a step's callbacks, and all have heard it before the next "
    "vote, or before the world is left: so they are called once, also where rank 0 dies around them, and again "
    "only where it dies before that message has come",
    "A step",
    broken_by=[
        Edit(
            "shoal.training.boundary",
            "                    self._called.tell(others, step)",
            "                    self._called.last = step",
        ),
        Edit("shoal.training.boundary", " or self._called.last < step\n", "\n"),
        Edit(
            "shoal.training.boundary",
            "                self._take(self._comes)\n        self._comes, self._sent",
            "                self._comes.wait()\n        self._comes, self._sent",
        ),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_each_step_is_told_of_once_where_rank_0_dies_around_its_callbacks(when: str, stage: int) -> None:
    """Within them it had not told of it yet: as a process that is killed while it writes a line. After them the others
    have heard of it.
    """
    seen: list[int] = []

    def watch(engine: Engine) -> None:
        crew_worker = engine.context.link.worker

        def on_step(engine: Engine) -> None:
            dies = engine.global_step == 3 and crew_worker == "a"
            if dies and when == "within":
                raise Killed
            seen.append(engine.global_step)

        engine.on_step(on_step)

    options = {**OPTIONS, "stage": stage}
    with Crew("abc", Task(options, prepare=watch)) as crew:
        crew.train_to(1)
        if when == "before":
            crew.plant("a", 3, "hand_out")
        if when == "after":
            crew.train_to(3)
            crew.until("b and c to hear of it", lambda: all(map(has_heard, map(crew.workers.get, "bc"))))
            crew.plant("a", 4, "forward")
        assert crew.finish() == undisturbed(Task(options))
    assert seen == [1, 2, 3, 4, 5, 6]


@holds("A boundary that a broken")
def test_a_boundary_that_is_owed_is_settled_though_the_next_world_breaks_too() -> None:
    seen: list[int] = []
    with Crew("abcd", watching(seen, mirrors=2)) as crew:
        crew.train_to(1)
        crew.plant("c", 3, "hand_out")
        crew.plant("d", 3, "opened")
        assert crew.finish() == undisturbed(Task({**OPTIONS, "mirrors": 2}))
    assert seen == [1, 2, 3, 4, 5, 6]


@dataclass
class Gathering:
    """A group whose members' rows meet; as many threads as members."""

    size: int
    rows: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all_there = Barrier(self.size, timeout=100)

    def of(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(all_gather=lambda row: self._gather(rank, row))

    def _gather(self, rank: int, row: Tensor) -> Tensor:
        self.rows[rank] = row
        self._all_there.wait()
        return torch.stack([self.rows[number] for number in range(self.size)])


def standing() -> Boundary:
    context: Any = SimpleNamespace(state=SimpleNamespace(frozen_in_place=True, layout=SimpleNamespace(stages=())))
    return Boundary(context, *(cast(Any, None),) * 5)


def agreed(step: int, counted: tuple[bool, ...], *passed: tuple[int, int]) -> list[tuple[bool, int, int]]:
    """By rank: whether the boundary of `step` is owed, the last one passed, the last step whose callbacks were called.

    `passed`: the last boundary and the last callbacks of each member before.
    """
    gathering = Gathering(len(counted))

    def member(rank: int) -> tuple[bool, int, int]:
        boundary = standing()
        boundary._passed, boundary._called.last = passed[rank]
        plan = SimpleNamespace(recovery=Recovery(step, b"", counted, ()))
        world: Any = SimpleNamespace(plan=plan, rank=rank, group=gathering.of(rank))
        assert boundary.agree(world) == ([True] * len(counted), [(0, 0)] * len(counted))
        return boundary.is_owed, boundary._passed, boundary._called.last

    with ThreadPoolExecutor(len(counted)) as members:
        return list(members.map(member, range(len(counted))))


@holds("A boundary that a broken")
def test_who_does_not_count_has_no_say_in_what_is_owed() -> None:
    """It stands where it stood; its boundaries are those of a world that is over."""
    assert agreed(5, (True, True, False), (5, 0), (5, 5), (2, 2)) == [(False, 5, 5)] * 3
    assert agreed(5, (True, True, False), (4, 4), (5, 0), (2, 5)) == [(True, 4, 4), (True, 5, 4), (True, 2, 4)]


def test_one_member_that_has_not_passed_a_boundary_owes_it_on_all() -> None:
    assert agreed(5, (True, True), (5, 5), (4, 0)) == [(True, 5, 5), (True, 4, 5)]
    assert agreed(5, (True, True), (5, 4), (5, 5)) == [(False, 5, 5)] * 2


@holds("Rank 0 tells the others")
def test_callbacks_that_nobody_knows_to_be_called_are_owed_though_all_have_passed() -> None:
    assert agreed(5, (True, True), (5, 4), (5, 4)) == [(True, 5, 4)] * 2


@holds("A boundary that a broken")
def test_who_begins_elsewhere_owes_nothing_of_where_it_was() -> None:
    boundary = standing()
    boundary._owed = True
    boundary.stand_at(7)
    assert not boundary.is_owed


def test_on_step_is_called_where_rank_0_leaves_by_a_planned_change() -> None:
    seen: list[int] = []
    with Crew("ab", watching(seen, max_steps=12)) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("a"))
        assert crew.finish() == undisturbed(Task({"max_steps": 12}))
    assert seen == list(range(1, 13))


@holds("A boundary that a broken")
@pytest.mark.parametrize("point", shortened(["in_vote", "hand_out", "arrival"], "in_vote"))
def test_a_checkpoint_that_was_due_at_a_step_whose_world_broke_is_made(point: str, tmp_path: Path) -> None:
    options = {"max_steps": 5, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}}
    with Crew("abc", Task(options)) as crew:
        crew.train_to(1)
        crew.plant("c", 3, point)
        assert crew.finish() == undisturbed(Task({"max_steps": 5}))
        (made,) = crew.job.durable.checkpoints
        assert made.step >= 3, "later, where who passed the vote has begun one with the dead: that one ends first"


@pytest.mark.parametrize("point", shortened(["in_vote", "hand_out"], "hand_out"))
def test_what_a_worker_asked_for_in_a_vote_that_passed_is_done_though_it_died_of_it(point: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"

    def ask(engine: Engine) -> None:
        if engine.rank == 2 and engine.global_step == 2:
            engine.export(file)

    with Crew("abc", Task(OPTIONS, in_loop=ask)) as crew:
        crew.train_to(1)
        crew.plant("c", 3, point)
        crew.finish()
    assert file.exists()


def test_a_callback_may_evaluate_even_when_it_is_called_in_the_midst_of_a_lane() -> None:
    """A survivor whose lane goes on is still in its forward when the new world settles the step before."""
    seen: list[int] = []

    def evaluate(engine: Engine) -> None:
        seen.append(engine.global_step)
        with engine.evaluating():
            for batch in engine.shard(Samples(8)):
                engine.report(validation=engine.module(**batch))

    task = Task({**OPTIONS, "dropout": 0.3}, prepare=lambda engine: engine.on_step(evaluate))
    with Crew("abc", task) as crew:
        crew.train_to(1)
        crew.plant("c", 3, "hand_out")
        assert crew.finish() == undisturbed(Task({**OPTIONS, "dropout": 0.3}))
    assert seen == [1, 2, 3, 4, 5, 6]


def test_step_says_once_for_each_step_that_it_was_committed() -> None:
    """Also to whom catches up with a vote that the others had passed."""
    committed: dict[str, list[int]] = {}

    def step(engine: Engine) -> None:
        if engine.step():
            committed.setdefault(engine.context.link.worker, []).append(engine.global_step)

    with Crew("abc", Task(OPTIONS, step=step)) as crew:
        crew.train_to(1)
        crew.plant("b", 3, "in_vote")
        crew.finish()
    assert committed["a"] == committed["c"] == [1, 2, 3, 4, 5, 6]


def test_alone_step_is_true_after_the_last_lane_only() -> None:
    engine, committed = engine_of(Task({"max_steps": 2}), AloneLink(), Faults([])), []
    for batch in engine:
        engine.backward(engine.module(**batch))
        committed.append(engine.step())
    assert committed == [False, False, False, True] * 2
