"""All members train a module in the same modes, and an evaluation that leaves its own is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from crew import Crew, Task, undisturbed
from crew_saves import saved
from matrices import shortened
from rule import Edit, holds, rule
from shoal.training.engine import Engine
from shoal_protos.errors import UserError

TASK = Task({"max_steps": 10})


def freezes_its_norm_once(engine: Engine) -> None:
    """At the top of the body, as a script does that trains its last epochs with fixed statistics."""
    if engine.global_step == 2 and not engine.warming_up:
        engine.module.norm.eval()


FREEZING = replace(TASK, in_loop=freezes_its_norm_once)


def evaluates_after_step_2(engine: Engine) -> None:
    engine.step()
    if engine.global_step == 2:
        engine.module.eval()


@rule(
    "… and a mode that was changed between `engine.step` and the next batch never reaches a backward",
    "A change of the world",
    broken_by=Edit(
        "shoal.guards.agreed_values", "            if mode == given != before:\n", "            if False:\n"
    ),
    after="All members train in the same modes",
)
def test_an_evaluation_that_forgets_to_put_the_module_back_is_refused_in_any_world() -> None:
    task = replace(TASK, step=evaluates_after_step_2)
    with pytest.raises(
        UserError,
        match=r"^the module was put into evaluation mode between engine.step and the next batch, and was "
        r"still in it at the backward \(step 3, lane 0\)\. A worker .* Call module.train\(\) after an evaluation",
    ):
        undisturbed(task)
    with Crew("abc", task) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert "the module was put into evaluation mode between engine.step and" in crew.job.durable.reason


def test_a_part_that_is_left_in_another_mode_is_named() -> None:
    def step(engine: Engine) -> None:
        engine.step()
        engine.module.dropout.train(engine.global_step < 3)

    with pytest.raises(UserError, match=r'^part "dropout" of the module was put into evaluation mode between'):
        undisturbed(replace(TASK, step=step))


@holds("… and a mode that was changed")
def test_a_body_that_begins_with_train_may_evaluate_at_its_end() -> None:
    task = replace(TASK, step=evaluates_after_step_2, in_loop=lambda engine: engine.module.train())
    assert undisturbed(task) == undisturbed(TASK)


@rule(
    "All members train in the same modes (`module.train()`, `module.eval()`): joiners, members without lanes and "
    "resuming workers adopt them; any other difference fails the job, and the module is named",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal.guards.agreed_values",
            "            part.training = name not in evaluating\n",
            "            del part\n",
        ),
        Edit(
            "shoal.checkpoint.writer",
            "    if state.layout.stages:\n        content",
            "    if state.layout.part.place:\n        content",
            by="test_stages_go_on_from_a_checkpoint_in_the_modes_that_each_of_them_had",
        ),
    ],
)
@pytest.mark.parametrize("step", shortened([0, 1, 2, 4], 2))
def test_a_joiner_trains_in_the_modes_that_the_job_has_come_to(step: int) -> None:
    """Also where the modes change while it is a member without lanes, whose body does not run."""
    expected = undisturbed(FREEZING)
    assert expected != undisturbed(TASK)
    with Crew("ab", FREEZING) as crew:
        crew.train_to(step)
        crew.add("c")
        assert crew.finish() == expected


@holds("All members train in the same modes")
def test_a_job_goes_on_from_a_checkpoint_in_its_modes(tmp_path: Path) -> None:
    options = {**FREEZING.options, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 4}}}
    with Crew("ab", replace(FREEZING, options=options)) as crew:
        crew.train_to(4)
        saved(crew, 4)
    with Crew("cde", replace(FREEZING, options=options)) as crew:
        assert crew.finish() == undisturbed(FREEZING)
        assert crew.job.durable.history[0].from_step == 4


@holds("All members train in the same modes")
def test_modes_that_differ_fail_the_job_naming_the_part() -> None:
    with Crew("abc", TASK, {"c": FREEZING}) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed"
        assert "rank 2 has trained in other modes than rank 0 at step 3" in crew.job.durable.reason
        assert 'part "norm" of the module is in evaluation mode here and in training mode there' in (
            crew.job.durable.reason
        )
