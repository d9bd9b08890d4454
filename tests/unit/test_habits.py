"""Habits of other libraries: they work with an engine, or the error says what is meant, and in which line."""

from __future__ import annotations

from typing import Any

import pytest
import shoal
import torch
from crew import Task, engine_of
from shoal.checkpoint.failure import sentence_of
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import MEANT, PUBLIC
from shoal_protos.errors import JobFailed, UserError
from tqdm import tqdm

OPTIONS: dict[str, Any] = {"max_steps": 3, "micro_batches_per_lane": 2}


def test_a_progress_bar_knows_how_many_batches_the_loop_has_and_comes_to_its_end() -> None:
    engine = engine_of(Task(OPTIONS), AloneLink(), Faults([]))
    lanes = engine.context.config.lanes
    assert engine and len(engine) == 3 * lanes * 2
    with tqdm(engine, disable=True) as bar:
        assert bar.total == len(engine)
        seen = 0
        for batch in bar:
            seen += 1
            engine.backward(engine(**batch))
            engine.step()
    assert (seen, len(engine), bool(engine)) == (bar.total, 0, True)


@pytest.mark.parametrize("name", MEANT)
def test_a_name_of_another_library_says_what_takes_its_place(name: str) -> None:
    assert name not in PUBLIC
    engine = engine_of(Task(OPTIONS), AloneLink(), Faults([]))
    with pytest.raises(AttributeError, match=f"^an engine has no `{name}`: ") as refused:
        getattr(engine, name)
    assert MEANT[name] in str(refused.value) and not hasattr(engine, name)


def test_any_other_name_is_the_models_or_near_to_one_or_all_are_told() -> None:
    engine = engine_of(Task(OPTIONS), AloneLink(), Faults([]))
    for name, sentence in {
        "named_parameters": "the model has it, engine.module.named_parameters",
        "backwards": r"did you mean engine.backward\?",
        "xyz": "it has averaged, backward, buffer, device, ",
    }.items():
        with pytest.raises(AttributeError, match=f"an engine has no `{name}`: {sentence}"):
            getattr(engine, name)
    with pytest.raises(AttributeError, match=r"^__deepcopy__$"):
        engine.__deepcopy__
    with pytest.raises(UserError, match=r"has no argument data; expected model, .* Instead of data=: dataset=\."):
        shoal.initialize(torch.nn.Linear(1, 1), {}, data=[])  # type: ignore[call-arg]


def refused(act: Any) -> str:
    with pytest.raises(UserError) as found:
        act()
    return sentence_of(found.value)


def test_a_refusal_that_a_line_of_the_script_has_caused_names_it() -> None:
    engine = engine_of(Task(OPTIONS), AloneLink(), Faults([]))
    script = compile("def act(engine):\n\n    engine.backward(1.0)\n", "/project/train.py", "exec")
    names: dict[str, Any] = {}
    exec(script, names)
    assert refused(lambda: names["act"](engine)).endswith(" (train.py:3)")
    in_a_shell = compile("engine.backward(1.0)", "<stdin>", "exec")
    assert refused(lambda: exec(in_a_shell, {"engine": engine})).rpartition(" ")[2].startswith("(test_habits.py:")

    fault = compile("initialize(model, {}, [1])", "/project/train.py", "exec")
    named = {"initialize": shoal.initialize, "model": torch.nn.Linear(1, 1)}
    assert refused(lambda: exec(fault, named)).endswith("(train.py:1)"), "several faults are raised by a helper"

    def several() -> None:
        raise UserError("two faults:\n  - one\n  - two")

    assert refused(several).splitlines()[3].startswith("(test_habits.py:")
    assert sentence_of(JobFailed("worker w1 failed")) == "worker w1 failed", "no line of this script has caused that"
