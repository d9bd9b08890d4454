"""A joiner of stages 0 to 2 trains in its first world: parameters come to it beside its first forward.

Where anything comes it is NaN before, so whatever is read too early is a wrong bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shoal.exchange.hand_out
import shoal.training.parameters
from crew import Crew, Worker
from hard_units import of, task
from idle_members import answering
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from shoal.blocks.released import Arriving
from shoal.exchange.traffic import HANDED
from shoal.training.engine import Engine
from shoal_protos.activity import StepPhase
from shoal_protos.plan import Reason
from tiers import check

pytestmark = check("trains in crews of several workers")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.exchange.hand_out, "POISON", True)
    monkeypatch.setattr(shoal.training.parameters, "has_compiled", lambda: False)  # other tests of this process


class FirstLanes:
    """What a crew's members find in the first step of a world that a worker has joined: by name and generation, their
    lanes, and how many parameters are still to come.
    """

    def __init__(self) -> None:
        self.lanes: dict[tuple[str, int], tuple[int, ...]] = {}
        self.coming: dict[tuple[str, int], int] = {}

    def look(self, engine: Engine) -> None:
        context = engine.context
        if context.world is not None and context.world.plan.base and not context.boundaries:
            key = context.link.worker, context.generation
            self.lanes.setdefault(key, context.lanes)
            coming = sum(isinstance(one, Arriving) for one in engine.module.parameters())
            self.coming.setdefault(key, coming)


def joined(crew: Crew, *names: str) -> list[Worker]:
    """They have said hello; returns when all are members."""
    workers = [crew.add(name) for name in names]
    crew.train_until("them to be in", lambda: all(worker in crew.members() for worker in workers))
    return workers


@rule(
    "A joiner has lanes in its first world, and waits there for the parameters with which it begins: their owners "
    "hand them out beside its first forward",
    "A change of the world",
    broken_by=[
        Edit("shoal.training.step", "[lacking if rank in joiners", "[lacking if rank not in joiners"),
        Edit("shoal.training.resize", "            self._step.hand_to(joiners)\n", "            pass\n"),
        Edit(
            "shoal_controller.core.planning.planner",
            "    staying = [worker for worker in known if not here[worker].leaving]\n",
            "    staying = [worker for worker in known if here[worker].holds and not here[worker].leaving]\n",
            by="test_a_joiner_has_lanes_and_is_filled_in_its_first_world",
        ),
    ],
)
@pytest.mark.parametrize("stage", shortened([0, 1, 2], 0, 2))
@pytest.mark.parametrize("precision", shortened([{}, {"bf16": {"enabled": True}}], {}))
def test_a_joiner_trains_in_its_first_world_with_the_parameters_that_come_meanwhile(
    stage: int, precision: dict[str, Any]
) -> None:
    first, precision = FirstLanes(), precision and {"precision": precision}
    with Crew("abc", of(task(stage, in_loop=first.look, **precision))) as crew:
        crew.train_to(2)
        (joiner,) = joined(crew, "d")
        world = crew.job.durable.current
        assert world is not None and world.reason is Reason.JOIN
        assert crew.finish() == reference(of(task(0, **precision)))
    key = joiner.link.worker, world.generation
    assert first.lanes[key] and first.coming[key] > 0, "its forward has begun before they were here"
    assert all(first.lanes[member.worker, world.generation] for member in world.members)


@holds("A joiner has lanes")
def test_a_joiner_is_handed_each_parameter_once_and_no_other_member_any() -> None:
    handed: list[tuple[int, int]] = []
    with Crew("abc", of(task(1))) as crew:

        def look(worker: Worker, point: str, _: int) -> None:
            context = worker.engine.context
            if worker.name == "d" and point == "backward" and context.world is not None and not handed:
                ways = (way for _, way in crew.wires[context.generation].posts if way[2] == HANDED)
                handed.extend((source, to) for source, to, _ in ways)

        crew.watchers.append(look)
        crew.train_to(2)
        joined(crew, "d")
        crew.finish()
    assert {source for source, _ in handed} == {0, 1, 2}, "every owner"
    assert {to for _, to in handed} == {3}


@rule(
    "A joiner, and a member that hands out to it, stand before the first boundary of the world until all is here, or "
    "has left: none seems to have passed what another waits for",
    "A change of the world",
    broken_by=Edit(
        "shoal.training.resize",
        "        if context.are_parameters_here:\n            world.group.progress.begin_boundary(0)\n",
        "        world.group.progress.begin_boundary(0)\n",
    ),
)
def test_while_a_joiner_waits_for_parameters_the_world_has_not_begun_for_it() -> None:
    seen: list[tuple[int, StepPhase]] = []

    def look(engine: Engine) -> None:
        context = engine.context
        if context.world is not None and not context.are_parameters_here and context.world.plan.base:
            activity = context.world.group.progress.activity(str)
            if not context.boundaries:
                seen.append((activity.boundary, activity.phase))

    with Crew("ab", of(task(1, in_loop=look))) as crew:
        crew.train_to(2)
        joined(crew, "c")
        assert crew.finish() == reference(of(task(0)))
    assert seen and all(boundary == 0 for boundary, _ in seen)


@holds("A joiner has lanes")
@pytest.mark.parametrize("victim", ["a", "b", "d"])
@pytest.mark.parametrize("moment", shortened(["join", "forward", "arrival", "backward"], "forward", "arrival"))
def test_a_loss_while_parameters_come_to_a_joiner_changes_no_bit(victim: str, moment: str) -> None:
    def die(worker: Worker, point: str, _: int) -> None:
        if worker.name == "d" and point == moment and (point == "join" or worker.engine.context.world is not None):
            crew.workers[victim].killed = True
            crew.changed.notify_all()

    with Crew("abc", of(task(1))) as crew:
        crew.watchers.append(die)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == reference(of(task(0)))
        assert crew.workers[victim].killed


@holds("A joiner has lanes")
@pytest.mark.parametrize(
    "point", shortened(["join", "forward", "backward", "fill", "vote", "optimizer"], "join", "vote")
)
def test_a_joiner_that_dies_anywhere_in_its_first_step_changes_no_bit(point: str) -> None:
    # the point `fill` is in slices after the first
    slices = {"shoal": {"fill_bytes_per_step": 1}} if point == "fill" else {}
    with Crew("abc", of(task(2, **slices))) as crew:
        crew.train_to(2)
        crew.add("d")
        crew.plant("d", 1, point)
        assert crew.finish() == reference(of(task(0)))
        assert crew.workers["d"].killed


@holds("A joiner has lanes")
def test_a_second_joiner_that_comes_while_the_first_is_handed_parameters_changes_no_bit() -> None:
    first = FirstLanes()
    with Crew("a", of(task(1, max_steps=12, in_loop=first.look))) as crew:
        crew.train_to(2)
        workers = [*joined(crew, "b", "c"), *joined(crew, "d")]
        assert crew.finish() == reference(of(task(0, max_steps=12)))
    names = {name for name, _ in first.lanes}
    assert {worker.link.worker for worker in workers} <= names


LATE: list[Callable[[Crew], object]] = [lambda crew: crew.kill("b"), lambda crew: crew.kill("a")]


@holds("A joiner has lanes")
@pytest.mark.parametrize("loss", shortened(range(len(LATE)), 1))
def test_a_joiner_that_was_handed_all_takes_part_in_the_next_recovery(loss: int) -> None:
    with Crew("abc", of(task(1, mirrors=2))) as crew:
        crew.train_to(2)
        joined(crew, "d")
        LATE[loss](crew)
        assert crew.finish() == reference(of(task(0)))


def test_a_joiner_without_lanes_gets_all_parameters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = {"c"}
    monkeypatch.setattr("crew.answer", answering(idle))
    with Crew("ab", of(task(1))) as crew:
        crew.train_to(2)
        (standby,) = joined(crew, "c")
        state = standby.engine.context.state
        crew.until("its parameters to be there", lambda: state.current == state.everything)
        assert not standby.engine.lanes
        idle.clear()
        crew.kill("a")
        assert crew.finish() == reference(of(task(0)))
        assert standby.engine.context.world is not None and standby.engine.context.world.lanes
