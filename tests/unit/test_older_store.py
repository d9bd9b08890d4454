"""A store that was restored from an older state: living members of later generations go on by what they prove."""

from __future__ import annotations

import pytest
from machine_driver import MADE_OF, NEW, Driver, through_the_store, training
from rule import Edit, rule
from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.effects import Adopt, Send, Spawn
from shoal_controller.core.machine.events import Exited, NeverStarted, Spawned, Started
from shoal_controller.core.machine.machine import restore
from shoal_controller.core.machine.phases.fencing import unknown_generation
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_protos.acts import DrainWorker, Scale
from shoal_protos.messages import MemberState, Status, Welcome
from shoal_protos.runs import Runs, every

WHOLE = every(MADE_OF.blocks)
LAUNCHED = {"launcher": "local", "command": ("train",)}


def restored(**spec: object) -> Driver:
    """A controller has started with a store that knows generation 1, of w0 and w1, of whom nothing is heard."""
    job = training(workers=2, **spec)  # type: ignore[arg-type]
    job.job = restore(through_the_store(job.job.durable), job.now)
    job.connections, job.statuses = {}, {}
    job.feed(Started())
    return job


def come(job: Driver, *workers: str, generation: int = 9, holds: Runs = WHOLE, next_generation: int = 0) -> None:
    """Members of a later generation say hello."""
    job.welcomed |= set(workers)
    for worker in workers:
        job.hello(worker, next_generation=next_generation, status=Status(
            1, generation, MemberState.TRAINING, generation, 50, generation, 40, holds,
        ))  # fmt: skip


def answer(job: Driver) -> None:
    """All who are connected stop for the attempt under way."""
    for worker in list(job.connections):
        job.stop(worker, job.statuses[worker])


@rule(
    "A living member of a later generation proves that the one which the store knows is over: nobody waits for the "
    "members of that, once all who live have had time to come",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.fencing",
            "    return plan.generation < unknown_generation(turn) and not may_others_come(turn)\n",
            "    return False\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.fencing",
            "    return turn.now - turn.job.started_at < turn.spec.reconnect_seconds\n",
            "    return False\n",
        ),
    ],
)
def test_members_of_a_later_generation_go_on_though_nobody_has_confirmed_that_those_of_the_store_are_dead() -> None:
    job = restored()
    come(job, "w2", "w3")
    assert "the store knows none after 1" in job.job.attempt.why  # type: ignore[union-attr]
    answer(job)
    job.wait(job.spec.reconnect_seconds - 1)
    assert job.job.attempt is not None and job.job.attempt.plan is None, "others may be about to come"
    job.wait(1.5)
    plan = job.planned()
    assert plan.workers == {"w2", "w3"} and plan.generation > 9
    job.recover()
    assert job.view.phase is Phase.RUNNING and job.statuses["w2"].step == 51


@pytest.mark.parametrize("silent", [4, 1])
def test_one_living_member_is_enough_though_most_whom_the_store_knows_are_silent(silent: int) -> None:
    job = training(workers=silent)
    job.job = restore(through_the_store(job.job.durable), job.now)
    job.connections, job.statuses = {}, {}
    job.feed(Started())
    come(job, "w9")
    answer(job)
    job.wait(job.spec.reconnect_seconds + 1)
    assert job.planned().workers == {"w9"}


@rule(
    "A number that a living member has gone beyond is given up: it is one of a store from an older backup",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.recovery",
        "    if why:\n        recover(turn, why, turn.now)\n",
        "    if False:\n        recover(turn, why, turn.now)\n",
    ),
)
def test_a_change_that_has_begun_before_they_came_begins_again_with_a_number_beyond_theirs() -> None:
    job = restored(**LAUNCHED)
    job.feed(Exited("w0", -9, "killed", ""))
    assert job.job.attempt is not None and job.job.attempt.generation == 2
    come(job, "w2", "w3")
    assert job.job.attempt.generation > 9


@rule(
    "… and so is one of a plan that may still begin where a worker has it, though none has gone so far",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.fencing",
            "(attempt is not None and hello.next_generation == attempt.generation)",
            "0",
        ),
        Edit(
            "shoal_controller.core.machine.phases.fencing",
            'older state" if highest > number else "")',
            'older state" if False else "")',
        ),
    ],
    after="A number that a living member has gone beyond",
)
@pytest.mark.parametrize("planned", [10, 11])
def test_a_number_that_a_pending_plan_has_is_not_given_again(planned: int) -> None:
    job = restored(**LAUNCHED)
    come(job, "w2")
    assert job.job.attempt is not None and job.job.attempt.generation == 10
    come(job, "w3", next_generation=planned)
    assert job.job.attempt.generation == 12
    job.beat("w3", generation=planned, promised=planned)
    assert not job.job.distrusted, "it has begun meanwhile"


def test_nothing_is_given_up_before_all_who_live_have_had_time_to_come() -> None:
    job = restored(**LAUNCHED)
    for worker in ("w0", "w1"):
        job.feed(Exited(worker, -9, "killed", ""))
    assert job.view.phase is Phase.STALLED and job.job.durable.first_valid_generation == 0
    come(job, "w2", "w3")
    answer(job)
    job.wait(job.spec.reconnect_seconds + 1)
    assert job.planned().workers == {"w2", "w3"}


@rule(
    "… and its launcher is asked for them: of whom it has no process is dead",
    "A change of the world",
    broken_by=Edit("shoal_controller.core.machine.phases.recovery", "    fencing.confirm_absent(turn)\n", ""),
    after="A living member of a later generation",
)
def test_blocks_that_only_those_of_the_store_might_hold_are_lost_at_once_where_their_launcher_has_no_such_process() -> (
    None
):
    job = restored(**LAUNCHED)
    assert Adopt(("w0", "w1")) in job.effects
    for worker in ("w0", "w1"):
        job.feed(NeverStarted(worker))
    assert all(job.job.durable.roster[worker].serves for worker in ("w0", "w1")), "by itself that proves nothing"
    come(job, "w2", holds=WHOLE.first(4))
    answer(job)
    job.wait(job.spec.reconnect_seconds + 2)
    assert job.job.durable.first_valid_generation > 9, "it has begun anew"


@rule(
    "… and a process that it has, and the store does not know, keeps its id, and is one of the launcher's",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failure_detector",
            "    _take_for_the_launchers(turn, event.worker)\n",
            "    if event.worker not in turn.durable.roster:\n        return\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.places",
            "if (unknown := [one for one in ids if one not in turn.durable.roster]))",
            "if not turn.durable.roster.keys() & (unknown := ids))",
        ),
    ],
    after="… and its launcher is asked for them",
)
def test_a_process_of_the_launchers_that_the_store_does_not_know_keeps_its_id_and_belongs_to_its_pod() -> None:
    job = restored(launcher="kubernetes", started_together=2)
    job.feed(Spawned("w5", Place.of_pod("job-w4", "uid", "node")))
    assert job.job.durable.roster["w5"].launched and job.job.durable.roster["w5"].serves
    job.welcomed |= {"w2", "w3"}
    job.hello("w3")  # heard before the launcher has told of its pod
    job.feed(Scale(6))
    assert [effect.worker for effect in job.of(Spawn)] == ["w2"], "what is there already is not started beside it"
    job.hello("w2")
    assert [effect.message.worker for effect in job.of(Send) if isinstance(effect.message, Welcome)] == ["w2"]


def test_a_member_keeps_its_id_where_the_store_has_given_it_again_to_a_process_that_holds_nothing() -> None:
    job = restored()
    job.hello("", incarnation="by-hand")
    come(job, "w2")
    ids = {record.incarnation: record.worker for record in job.job.durable.roster.values()}
    assert (ids["inc-w2"], ids["by-hand"]) == ("w2", "w3")
    job.hello("w2", incarnation="by-hand", status=NEW)
    assert [effect.message.worker for effect in job.of(Send) if isinstance(effect.message, Welcome)] == ["w3"]


def test_where_nobody_can_say_what_became_of_them_the_job_names_the_command_that_says_it() -> None:
    job = restored()
    come(job, "w2", holds=WHOLE.first(4))
    answer(job)
    job.wait(job.spec.reconnect_seconds + 2)
    assert job.view.phase is Phase.STALLED
    assert 'If they are gone, say so: "shoal lost job WORKER"' in job.view.reason


def test_nobody_who_is_heard_is_let_go_in_favour_of_those_who_are_not() -> None:
    job = restored(**LAUNCHED)
    come(job, "w2", "w3", "w4")
    leaving = [one.worker for one in job.job.durable.roster.values() if one.leaving]
    assert leaving == ["w4"], "the store wants two"
    assert not job.of(Spawn)


def test_no_worker_is_let_go_while_a_process_of_the_launchers_may_still_be_heard() -> None:
    """With cells it may be at a coordinate that all others lack."""
    job = restored(**LAUNCHED)
    job.feed(Spawned("w4", Place.of_process(7, "log")))
    come(job, "w2", "w3")
    assert not any(one.leaving for one in job.job.durable.roster.values())
    come(job, "w4")
    assert [one.worker for one in job.job.durable.roster.values() if one.leaving] == ["w3"], "the store wants two"


def test_a_generation_of_the_store_is_not_unknown() -> None:
    job = training(workers=2)
    job.feed(DrainWorker("w1"))
    assert unknown_generation(Turn(job.job, job.now)) == 0
