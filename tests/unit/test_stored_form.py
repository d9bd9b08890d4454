"""What lies in the store of a large job, and how much of it a change writes."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from machine_driver import MADE_OF, stored, through_the_store, training
from rule import Edit, holds, rule
from shoal_controller.core.machine.codec import plain, restored
from shoal_controller.core.machine.durable import Durable, Place, Resize, Standing, WorkerRecord
from shoal_controller.core.machine.spec import JobSpec, Phase
from shoal_controller.core.machine.stored_form import changed_records, durable_from, state_of
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_start
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.errors import PeerError
from shoal_protos.plan import Member, Plan, Reason
from shoal_protos.runs import Runs

WORKERS = 1000


@cache
def large_job() -> Durable:
    members = [Member(f"w{n}", f"{n:016}", f"10.0.{n // 256}.{n % 256}:{30000 + n}") for n in range(WORKERS)]
    roster = {
        member.worker: WorkerRecord(
            member.worker, age, True, member.incarnation, member.address, f"host{age // 8}", f"rack{age // 100}",
            place=Place.of_process(1000 + age, f"/logs/{member.worker}.log"),
        )
        for age, member in enumerate(members)
    }  # fmt: skip
    candidates = [Candidate(member, roster[member.worker].domain, age) for age, member in enumerate(members)]
    plan = plan_start(PlanRequest(Terms(WORKERS, 4096, 1, 4, 4), 1, Reason.START), candidates)
    return Durable(
        JobSpec("job", WORKERS), WORKERS, replace(MADE_OF, blocks=4096, lanes=WORKERS), Phase.RUNNING, "x" * 16_000,
        last_generation=1, current=plan, roster=roster, next_id=WORKERS, next_join_order=WORKERS,
        history=tuple(Resize(generation, WORKERS, Reason.KILL, 7) for generation in range(1, 200)),
    )  # fmt: skip


@rule(
    "A change writes the records that it changes and no others; what is written each time is below 4 KiB, "
    "whatever the size of the job",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.stored_form",
        "        if name not in before or _differs(value, before[name]):\n            yield",
        "        if before is not after:\n            yield",
    ),
)
def test_a_change_of_one_worker_of_a_thousand_writes_that_worker_and_the_small_state() -> None:
    before = large_job()
    lost = replace(before.roster["w7"], standing=Standing.LOST, why="it has not answered")
    after = replace(before, roster={**before.roster, "w7": lost}, next_id=WORKERS + 1)
    changed = changed_records(before, after)
    assert list(changed) == ["workers/w7"]
    assert sum(map(len, changed.values())) < 1000


@holds("A change writes the records")
def test_the_state_of_a_job_of_a_thousand_workers_is_below_4_kib() -> None:
    state, records = stored(large_job())
    assert len(state) < 4096 < sum(map(len, records.values()))


def test_a_plan_is_written_once_though_it_takes_the_place_of_another() -> None:
    before = large_job()
    assert before.current is not None
    planned = replace(before.current, generation=2, base=1, recovery=None)
    announced = replace(before, planned=(planned,))
    assert list(changed_records(before, announced)) == ["plans/2"]
    begun = replace(announced, current=planned, planned=())
    assert changed_records(announced, begun) == {"plans/1": None}
    assert (state_of(begun)["current"], state_of(begun)["planned"]) == (2, [])


def test_a_description_is_written_once() -> None:
    before = replace(large_job(), description=None)
    described = large_job()
    assert list(changed_records(before, described)) == ["description"]
    assert "description" not in changed_records(described, replace(described, step=8))


def test_a_checkpoint_that_is_verified_later_is_written_again() -> None:
    """Two references to one checkpoint are equal, whatever is known of it."""
    checkpoint = CheckpointRef(step=5, path="5-1-1", generation=1)
    before = replace(large_job(), checkpoints=(checkpoint,))
    after = replace(before, checkpoints=(replace(checkpoint, verified=True),))
    assert before == after
    assert changed_records(before, after).keys() == {"checkpoints"}


def test_a_plan_of_a_shape_of_one_process_has_no_field_of_cells_in_the_store() -> None:
    plan = large_job().current
    assert plan is not None
    written = plain(plan)
    assert not written.keys() & {"homes", "cells"} and "coordinate" not in written["members"][0]
    assert restored(Plan, written) == plan
    seated = tuple(replace(member, coordinate=rank % 2) for rank, member in enumerate(plan.members))
    of_cells = replace(plan, members=seated, homes=(Runs(((0, 99),)), Runs(((99, 4096),))), cells=((0, 1), (2, 3)))
    assert restored(Plan, plain(of_cells)) == of_cells


def test_what_is_back_at_its_default_has_no_record() -> None:
    paused = replace(large_job(), paused_because="an operator")
    assert changed_records(large_job(), paused) == {"paused_because": '"an operator"'}
    assert changed_records(paused, large_job()) == {"paused_because": None}


def test_a_roster_comes_back_in_the_order_of_age_and_the_history_in_that_of_generations() -> None:
    again = through_the_store(large_job())
    assert list(again.roster) == [f"w{number}" for number in range(WORKERS)]
    assert [resize.generation for resize in again.history] == list(range(1, 200))


DAMAGES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "another worker's record": (
        "workers/w1", lambda record: record.update(worker="w0"), "record workers/w1 is that of worker 'w0'",
    ),
    "another generation's plan": (
        "plans/1", lambda plan: plan.update(generation=2), "the plan of generation 1 is that of 2",
    ),
    "a plan with a stranger": (
        "plans/1", lambda plan: plan["members"][2].update(worker="w9"), "plan 1 has member 'w9', who has no record",
    ),
    "a plan that loses a lane": ("plans/1", lambda plan: plan["shares"][0].update(lanes=[]), "plan 1 is unsound"),
    "a plan without members": ("plans/1", lambda plan: plan.update(members=[]), "plan 1 is unsound"),
    "a back-off that was never counted": (
        "backoff_until", lambda until: until.update({"w0:1": 1e300}), "the back-off of 'w0:1' was never counted",
    ),
}  # fmt: skip


@rule(
    "A record that cannot be read, or does not fit the others, is left unchanged, and the other jobs are served",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.codec",
            "        if unknown := [name for name in _checked(value, dict) if name not in readers]:\n",
            "        if unknown := []:\n",
        ),
        Edit(
            "shoal_controller.core.machine.stored_form",
            "            check_plan(plan)\n            if",
            "            if",
            by="test_records_that_do_not_fit_each_other_are_refused_before_a_job_goes_on_with_them",
        ),
        Edit(
            "shoal_controller.core.machine.stored_form",
            "        if record.worker != name:",
            "        if False:",
            by="test_records_that_do_not_fit_each_other_are_refused_before_a_job_goes_on_with_them",
        ),
        Edit(
            "shoal_controller.core.machine.stored_form",
            "if strangers := plan.workers - durable.roster.keys():",
            "if strangers := frozenset():",
            by="test_records_that_do_not_fit_each_other_are_refused_before_a_job_goes_on_with_them",
        ),
        Edit(
            "shoal_controller.core.machine.stored_form",
            '    if plan["generation"] != generation:',
            "    if False:",
            by="test_records_that_do_not_fit_each_other_are_refused_before_a_job_goes_on_with_them",
        ),
        Edit(
            "shoal_controller.jobs.job_repository",
            "    if len(packed_texts) != head.records:\n",
            "    if len(packed_texts) > head.records:\n",
        ),
    ],
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_records_that_do_not_fit_each_other_are_refused_before_a_job_goes_on_with_them(damage: str) -> None:
    name, change, sentence = DAMAGES[damage]
    state, records = stored(training().job.durable)
    record = json.loads(records.get(name, "{}"))
    change(record)
    with pytest.raises((ValueError, PeerError), match=sentence):
        durable_from(json.loads(state), records | {name: json.dumps(record)})
