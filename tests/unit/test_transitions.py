"""The tables of the job machine: which phase leads to which, and what is done with each message."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
from rule import Edit, holds, rule
from shoal_controller.core.machine.job import new_job
from shoal_controller.core.machine.machine import SETTLE
from shoal_controller.core.machine.phases.worker_messages import MESSAGES
from shoal_controller.core.machine.spec import JobSpec, Phase
from shoal_controller.core.machine.turn import ALLOWED, LIVING, Turn
from shoal_protos.messages import AskSeat, Hello, ToController


def turn_in(phase: Phase) -> Turn:
    job = new_job(JobSpec("job", 2), 0.0)
    return Turn(replace(job, durable=replace(job.durable, phase=phase)), 1.0)


@rule(
    "A job's phase changes only along the arrows of `core/machine/turn.py`, and only `Turn.enter` sets it",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.turn",
            "        assert phase is before or (before, phase) in ALLOWED",
            "        assert phase in Phase",
        ),
        Edit(
            "shoal_controller.core.machine.turn",
            "    (Phase.RUNNING, Phase.STALLED): ",
            '    (Phase.WAITING, Phase.RESIZING): "nothing",\n    (Phase.RUNNING, Phase.STALLED): ',
            by="test_every_arrow_of_the_phases_is_taken_by_a_scenario",
        ),
    ],
)
@pytest.mark.parametrize(("before", "after"), sorted(product(SETTLE, SETTLE)))
def test_a_phase_is_entered_only_where_the_table_has_an_arrow(before: Phase, after: Phase) -> None:
    turn = turn_in(before)
    if before is after or (before, after) in ALLOWED:
        turn.enter(after, "why")
        assert (turn.durable.phase, turn.durable.reason) == (after, "why")
    else:
        with pytest.raises(AssertionError, match=f"a job that is {before} cannot become {after}"):
            turn.enter(after)


@holds("A job's phase changes only")
def test_nothing_else_sets_a_phase() -> None:
    with pytest.raises(AssertionError, match="a phase is entered"):
        turn_in(Phase.RUNNING).keep(phase=Phase.WAITING)


def test_no_arrow_leads_out_of_a_job_that_is_over_and_every_living_one_can_end() -> None:
    assert {before for before, _ in ALLOWED} == set(LIVING)
    assert all((phase, end) in ALLOWED for phase in LIVING for end in (Phase.FAILED, Phase.CANCELLED))


def test_every_kind_of_message_that_follows_a_hello_has_a_handler() -> None:
    assert set(MESSAGES) == set(get_args(ToController)) - {AskSeat, Hello}
