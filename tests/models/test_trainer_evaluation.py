"""An evaluation of a Trainer by several workers: shared by their lanes, the original's to the last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from crew import Crew, Killed
from models.trainer_scripts import Script, Sequences, padded, untimed_log
from rule import Edit, holds, rule

pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = 11
"""Of the evaluation: 43 samples, four at a time; the last batch has three."""


class Looks:
    """Notes the batches that a worker predicts, and what `compute_metrics` is given."""

    def __init__(self, *more: Any, **named: Any) -> None:
        super().__init__(*more, **named)
        self.predicted: list[int] = []
        self.seen: list[Any] = []
        self.compute_metrics = self.look

    def prediction_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        self.predicted.append(len(inputs["input_ids"]))
        return super().prediction_step(model, inputs, *more, **named)  # type: ignore[misc]

    def look(self, found: Any) -> dict[str, float]:
        self.seen.append(found)
        guesses, labels = numpy.argmax(found.predictions[:, :-1], -1), found.label_ids[:, 1:]
        return {"accuracy": float((guesses == labels)[labels != -100].mean())}


ARGUMENTS: dict[str, Any] = {
    "eval_strategy": "epoch", "per_device_eval_batch_size": 4, "num_train_epochs": 2, "learning_rate": 0.0,
}  # fmt: skip
"""The weights stay, so that they are the original's in each bit."""


def script(folder: Path, mixin: type = Looks, **more: Any) -> Script:
    given = {"eval_dataset": Sequences(), **more.pop("given", {})}
    return Script(folder, {**ARGUMENTS, **more}, given, mixin=mixin)


def assert_same(mine: Any, theirs: Any) -> None:
    """Both have been given the same, in each bit, and have come to the same numbers."""
    assert len(mine.seen) == len(theirs.seen) == 2
    for one, other in zip(mine.seen, theirs.seen, strict=True):
        assert numpy.array_equal(one.predictions, other.predictions)
        assert numpy.array_equal(one.label_ids, other.label_ids)
    names = ("eval_loss", "eval_accuracy")
    logs = [[[log[name] for name in names] for log in t.state.log_history if names[0] in log] for t in (mine, theirs)]
    assert logs[0] == logs[1]


@rule(
    "Each worker of a Trainer evaluates the batches of its lanes, and the outputs of the others come to it in the "
    "samples' order: numbers are the original's to the last digit, in every world",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.integrations.transformers.shared_evaluation",
            "            compute([number for number in range(len(batches)) if number % lanes in world.lanes])\n",
            "",
        ),
        Edit(
            "shoal.integrations.transformers.shared_evaluation",
            "                outputs.update(self._of_others(",
            "                Outputs(self._of_others(",
        ),
        Edit(
            "shoal.integrations.transformers.shared_evaluation",
            '            seed_everything(seed, step, 0, 0, purpose="evaluation")\n',
            "",
            by="test_an_evaluation_that_draws_random_numbers_has_the_same_ones_in_every_world",
        ),
        Edit(
            "shoal.training.boundary",
            "        if self._context.world is not world:\n            return False\n",
            "",
            by="test_a_worker_that_dies_in_an_evaluation_changes_no_number",
        ),
    ],
)
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_all_predictions_come_to_all_workers_and_each_has_made_its_part(names: str, tmp_path: Path) -> None:
    original, kept = script(tmp_path / "original").original(), list[Any]()
    with Crew(names, script(tmp_path / "crew").task(kept)) as crew:
        crew.finish()
    for trainer in kept:
        assert_same(trainer, original)
    parts = [len(trainer.predicted) for trainer in kept]
    assert sum(parts) == 2 * BATCHES and all(0 < part < 2 * BATCHES for part in parts[1:])


def dies_at(batch: int) -> type:
    """Worker b is killed before it predicts a batch of its own, and the others know of it before their first one."""

    class Dies(Looks):
        def prediction_step(self, *more: Any, **named: Any) -> Any:
            link, number = self.engine.context.link, len(self.predicted)  # type: ignore[attr-defined]
            if link.worker == "b" and number == batch:
                raise Killed
            while link.worker != "b" and not (number or link.stopping):
                link.pause(0.1)
            return super().prediction_step(*more, **named)

    return Dies


@holds("Each worker of a Trainer evaluates")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_worker_that_dies_in_an_evaluation_changes_no_number(batch: int, stage: int, tmp_path: Path) -> None:
    deepspeed = {"zero_optimization": {"stage": stage}, "gradient_clipping": "auto"}
    more = {"deepspeed": deepspeed, "learning_rate": 3e-3, "save_strategy": "epoch"}
    right, kept = script(tmp_path / "right", **more).alone(), list[Any]()
    with Crew("abc", script(tmp_path / "crew", dies_at(batch), **more).task(kept)) as crew:
        assert crew.finish() == right.fingerprint
    assert len(kept) == 2
    for trainer in kept:
        assert_same(trainer, right)
        assert untimed_log(trainer) == untimed_log(right)


class Leaves(Looks):
    """Rank 0 makes no evaluation that is due, but another one."""

    def _maybe_log_save_evaluate(self, *more: Any, **named: Any) -> Any:
        engine = self.engine  # type: ignore[attr-defined]
        if engine.rank == 0 and self.control.should_evaluate:  # type: ignore[has-type]
            self.control.should_evaluate = False  # type: ignore[has-type]
            self.evaluate(Sequences(10), metric_key_prefix="own")  # type: ignore[attr-defined]
        return super()._maybe_log_save_evaluate(*more, **named)  # type: ignore[misc]


@holds("Each worker of a Trainer evaluates")
def test_a_worker_that_evaluates_something_else_or_nothing_keeps_no_other_waiting(tmp_path: Path) -> None:
    original, kept = script(tmp_path / "original").original(), list[Any]()
    with Crew("abc", script(tmp_path / "crew", Leaves).task(kept)) as crew:
        crew.finish()
    assert sorted(len(trainer.seen) for trainer in kept) == [2, 2, 2]
    for trainer in kept:
        if not any("own_loss" in log for log in trainer.state.log_history):
            assert_same(trainer, original)


@holds("Each worker of a Trainer evaluates")
@pytest.mark.parametrize("more", [{}, {"include_for_metrics": ["inputs"]}], ids=["shared", "whole"])
def test_an_evaluation_that_draws_random_numbers_has_the_same_ones_in_every_world(
    more: dict[str, Any], tmp_path: Path
) -> None:
    def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = padded(samples)
        hidden = torch.rand(batch["labels"].shape) < 0.2
        return {**batch, "labels": batch["labels"].masked_fill(hidden, -100)}

    given = {"data_collator": masked}
    right, kept = script(tmp_path / "right", given=given, **more).alone(), list[Any]()
    with Crew("ab", script(tmp_path / "crew", given=given, **more).task(kept)) as crew:
        crew.finish()
    for trainer in kept:
        assert_same(trainer, right)


class Box(dict[str, Any]):
    """A mapping that cannot be sent."""


class Boxes(Looks):
    """Gives its predictions in one."""

    def prediction_step(self, *more: Any, **named: Any) -> Any:
        loss, logits, labels = super().prediction_step(*more, **named)
        return loss, Box(scores=logits), labels

    def look(self, found: Any) -> dict[str, float]:
        self.seen.append(found)
        return {"mean": float(found.predictions["scores"].mean())}


def test_outputs_that_cannot_be_sent_are_computed_whole_by_each_worker_and_that_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, kept = script(tmp_path / "right", Boxes).alone(), list[Any]()
    assert "evaluation_is_whole" not in capsys.readouterr().err
    with Crew("ab", script(tmp_path / "crew", Boxes).task(kept)) as crew:
        crew.finish()
    assert [len(trainer.predicted) for trainer in kept] == [2 * BATCHES] * 2
    assert all(untimed_log(trainer) == untimed_log(right) for trainer in kept)
    assert capsys.readouterr().err.count("evaluation_is_whole") == 2, "once by each"
