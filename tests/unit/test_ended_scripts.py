"""Where nothing says a job's last step, a member of a cell may wait for one whose script has ended."""

from __future__ import annotations

from dataclasses import replace

from machine_driver import MADE_OF, training
from rule import Edit, holds, rule
from shoal_protos.activity import StepPhase

LANES = StepPhase.LANES


@rule(
    "A member of a cell that waits for one whose script has ended, where nothing says which step is the last, fails "
    "the job once it has waited for the limit after that end, and not before",
    "A change of the world",
    broken_by=[
        Edit("shoal_controller.core.machine.phases.running", "(exchanges or in_vain)", "exchanges"),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "min(_steady(process, activity).seconds, said_after) > limit",
            "_steady(process, activity).seconds > limit",
            by="test_what_a_member_has_waited_for_that_came_as_the_others_script_ended_fails_no_job",
        ),
        Edit(
            "shoal_controller.core.machine.phases.worker_messages",
            "(known.activity.position, known.status.ended), (message.activity.position, message.status.ended)",
            "known.activity.position, message.activity.position",
            by="test_what_a_member_has_waited_for_that_came_as_the_others_script_ended_fails_no_job",
        ),
    ],
)
def test_a_member_that_waits_in_a_lane_for_one_whose_script_has_ended_fails_the_job() -> None:
    job = training(made_of=replace(MADE_OF, max_steps=0))
    job.beat("w0", ended=True)
    job.does("w1", 2, LANES, "w0")
    job.does("w2", 2, LANES)
    job.wait(9)
    assert not job.view.phase.is_over
    job.wait(4)
    assert job.view.reason.startswith("the script of worker w0 has ended at step 1, and worker w1 goes on with step 2;")


@holds("A member of a cell that waits for one")
def test_what_a_member_has_waited_for_that_came_as_the_others_script_ended_fails_no_job() -> None:
    """w1 says late that it has it: what workers say is not of one instant."""
    job = training(made_of=replace(MADE_OF, max_steps=0))
    job.does("w0", 2, LANES)
    job.does("w1", 2, LANES, "w0")
    job.wait(30)
    job.beat("w0", ended=True)
    job.wait(2)
    assert not job.view.phase.is_over
    job.does("w1", 2, LANES)
    job.wait(30)
    assert not job.view.phase.is_over
