"""The Trainer's door: the original's losses, the same bits and the same log in every world and through faults."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Killed
from models.trainer_scripts import (
    SAMPLES,
    STEPS,
    STEPS_PER_EPOCH,
    Library,
    Script,
    Sequences,
    column,
    gpt2,
    untimed_log,
)
from rule import Edit, holds, rule
from shoal.training.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore")


def near(script: Script) -> tuple[Any, Any]:
    """Trains it by the original and by Shoal, and compares what both log.

    Both sum gradients in other orders, so weights differ in a last bit now and then. In bfloat16 that may round a value
    of a later forward to its neighbour, on processors that compute in it.
    """
    original, elastic = script.original(), script.alone()
    within = 2**-9 if script.arguments.get("bf16") else 2e-4
    for name in ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss"):
        assert column(elastic, name) == pytest.approx(column(original, name), rel=within, abs=1e-6), name
    assert elastic.state.global_step == original.state.global_step
    return original, elastic


@rule(
    "The Trainer's loss of a micro-batch is divided by the items of the whole step, over all lanes, and a place "
    "without samples adds nothing: so losses are the original's, also in an epoch's short last step",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.integrations.transformers.step_reader",
            "        items = sum(counted) if len(counted) == len(found) else None\n",
            "        items = counted[0] if len(counted) == len(found) else None\n",
            by="test_losses_norms_and_rates_are_those_of_the_original",
        ),
        Edit(
            "shoal.integrations.transformers.elastic_run",
            "loss * self.reader.order.micro_batches",
            "loss * 1",
            by="test_losses_norms_and_rates_are_those_of_the_original",
        ),
        Edit(
            "shoal.integrations.transformers.step_reader",
            "batches[number] if number < len(batches) else []",
            "batches[number % len(batches)]",
            by="test_losses_norms_and_rates_are_those_of_the_original",
        ),
    ],
)
def test_losses_norms_and_rates_are_those_of_the_original(tmp_path: Path) -> None:
    script = Script(tmp_path, {"eval_strategy": "epoch", "lr_scheduler_type": "cosine"})
    original, elastic = near(script)
    assert len(column(elastic, "loss")) == STEPS
    assert elastic.state.total_flos == original.state.total_flos
    for mine, theirs in zip(elastic.model.parameters(), original.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@holds("The Trainer's loss of a micro-batch")
@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 1, "max_steps": 6},
        {"max_grad_norm": 0.0, "label_smoothing_factor": 0.1},
        {"max_grad_norm": 0.05, "data_seed": 11, "optim": "sgd"},
        {"dataloader_drop_last": True, "lr_scheduler_type": "constant_with_warmup"},
        {"bf16": True},
        {"gradient_checkpointing": True, "logging_strategy": "epoch"},
        {"train_sampling_strategy": "sequential", "logging_steps": 3, "logging_first_step": True},
        {"num_train_epochs": 1.5, "eval_strategy": "steps", "eval_steps": 3},
    ],
    ids=lambda arguments: ",".join(arguments),
)
def test_arguments_mean_what_they_mean_to_the_original(arguments: dict[str, Any], tmp_path: Path) -> None:
    near(Script(tmp_path, arguments))


class Dropout:
    """A script whose bits depend on the lanes' random numbers, that evaluates and logs."""

    @staticmethod
    def script(folder: Path, **more: Any) -> Script:
        arguments = {"eval_strategy": "epoch", **more.pop("arguments", {})}
        return Script(folder, arguments, model=lambda: gpt2(0.1), **more)


@rule(
    "After each commit a Trainer's callbacks run on every worker with the same numbers, once, and its log and "
    "counters are in checkpoints and given to joiners",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.integrations.transformers.elastic_run",
            "trainer.state.global_step >= state.step:",
            "trainer.state.global_step > state.step:",
            by="test_a_steps_callbacks_run_once_though_its_boundary_is_gone_through_again",
        ),
        Edit(
            "shoal.integrations.transformers.elastic_run",
            "        self.engine.register_state(NAME, self.kept)\n",
            "",
            by="test_they_are_the_same_through_a_kill_and_a_join",
        ),
    ],
)
@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd"])
def test_bits_and_logs_are_the_same_in_worlds_of_1_to_4(names: str, tmp_path: Path) -> None:
    script, kept = Dropout.script(tmp_path), list[Any]()
    right = script.alone()
    with Crew(names, script.task(kept)) as crew:
        assert crew.finish() == right.fingerprint
    assert len(kept) == len(names)
    assert all(untimed_log(trainer) == untimed_log(right) for trainer in kept)


@rule(
    "What a Trainer's samplers draw comes from the seed and the epoch alone, so whoever joins in an epoch's "
    "middle reads its order",
    "Data, evaluations and the doors",
    broken_by=Edit(
        "shoal.integrations.transformers.step_reader",
        '            seed_from(f"{self._seed} order of epoch {epoch}")\n',
        "",
        by="test_samples_are_grouped_by_length_alike_in_every_world",
    ),
)
@holds("After each commit a Trainer's callbacks")
@pytest.mark.parametrize("point", ["exchange", "vote", "hand_out"])
def test_they_are_the_same_through_a_kill_and_a_join(point: str, tmp_path: Path) -> None:
    script, kept = Dropout.script(tmp_path), list[Any]()
    right = script.alone()
    with Crew("abc", script.task(kept)) as crew:
        crew.train_to(2)
        crew.plant("a", STEPS_PER_EPOCH, point)
        crew.train_to(6)
        crew.add("d")
        crew.train_to(9)
        assert crew.finish() == right.fingerprint
    assert len(kept) == 3
    assert all(untimed_log(trainer) == untimed_log(right) for trainer in kept)


@holds("After each commit a Trainer's callbacks")
def test_a_steps_callbacks_run_once_though_its_boundary_is_gone_through_again(tmp_path: Path) -> None:
    """Rank 0 dies in a callback of the engine's, so the next world owes it: on all workers, which have run the
    Trainer's.
    """

    def dies(engine: Engine) -> None:
        if engine.global_step == 2 and engine.context.link.worker == "a":
            raise Killed

    script, kept = Dropout.script(tmp_path), list[Any]()
    right = script.alone()
    with Crew("abc", script.task(kept, prepare=lambda engine: engine.on_step(dies))) as crew:
        assert crew.finish() == right.fingerprint
    assert len(kept) == 2
    assert all(untimed_log(trainer) == untimed_log(right) for trainer in kept)


@holds("What a Trainer's samplers draw comes")
def test_samples_are_grouped_by_length_alike_in_every_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library draws that order from whatever was drawn before, so it cannot be the original's."""
    listed = [Sequences()[index] for index in range(SAMPLES)]
    script = Script(tmp_path, {"train_sampling_strategy": "group_by_length"}, {"train_dataset": listed})
    right = script.alone()
    assert "and not the original's" in capsys.readouterr().err, "it is said"
    order, lengths = right.engine.context.loop.fetcher.sampler, [len(one["input_ids"]) for one in listed]
    epochs = []
    for epoch in range(2):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        batches = [order.indices(step, lane, micro) for step in steps for lane, micro in order.places]
        spread = [max(found) - min(found) for batch in batches if (found := [lengths[one] for one in batch])]
        assert sorted(one for batch in batches for one in batch) == list(range(SAMPLES))
        assert sum(spread) <= 2 * len(spread), "of 0 to 6, in batches of 3"
        epochs.append(batches)
    assert epochs[0] != epochs[1]
    with Crew("abc", script.task()) as crew:
        crew.train_to(2)
        crew.plant("a", STEPS_PER_EPOCH + 1, "exchange")
        crew.train_to(6)
        crew.add("d")
        assert crew.finish() == right.fingerprint


class NotAlwaysFinite:
    """Every third batch or so has a loss of nan, whose gradient is as it would be."""

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, *more, **named)  # type: ignore[misc]
        return loss + torch.tensor(torch.nan) if int(inputs["input_ids"].sum()) % 3 == 0 else loss


@pytest.mark.parametrize("filtered", [True, False])
def test_losses_that_are_not_finite_end_nothing_and_are_filtered_in_the_log_as_by_the_original(
    filtered: bool, tmp_path: Path
) -> None:
    arguments = {"gradient_accumulation_steps": 1, "logging_steps": 2, "logging_nan_inf_filter": filtered}
    script = Script(tmp_path, {**arguments, "num_train_epochs": 2}, mixin=NotAlwaysFinite)
    original, elastic = script.original(), script.alone()
    losses = column(elastic, "loss")
    assert losses == pytest.approx(column(original, "loss"), rel=2e-4, nan_ok=True)
    assert any(map(math.isnan, losses)) is not filtered
    assert elastic.state.global_step == original.state.global_step == 30


class Recorded(Sequences):
    """Leaves the number of each process that reads, and draws random numbers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (self.folder / str(os.getpid())).touch()
        sample = super().__getitem__(index)
        return {name: torch.roll(tokens, int(torch.randint(0, 5, ()))) for name, tokens in sample.items()}


def test_samples_are_read_by_as_many_processes_as_the_arguments_say_with_the_same_bits(tmp_path: Path) -> None:
    fingerprints = []
    for processes in (0, 2):
        arguments = {
            "dataloader_num_workers": processes,
            "num_train_epochs": 2,
            "dataloader_persistent_workers": bool(processes),
        }
        script = Script(tmp_path, arguments, {"train_dataset": Recorded(tmp_path / str(processes))})
        fingerprints.append(script.alone().fingerprint)
    assert fingerprints[0] == fingerprints[1]
    readers = [sorted(path.name for path in (tmp_path / str(count)).iterdir()) for count in (0, 2)]
    assert readers[0] == [str(os.getpid())] and len(readers[1]) == 2 and str(os.getpid()) not in readers[1]
    assert not multiprocessing.active_children(), "they end with the training"


def test_the_order_of_samples_can_be_given_to_processes_that_are_spawned(tmp_path: Path) -> None:
    order = Script(tmp_path, {"num_train_epochs": 1}).alone().engine.context.loop.fetcher.sampler
    places = [(step, lane, 0) for step in range(9) for lane in range(4)]
    given = pickle.loads(pickle.dumps(order))
    assert [given.indices(*place) for place in places] == [order.indices(*place) for place in places]


def test_the_start_of_training_is_logged_as_by_the_library(tmp_path: Path) -> None:
    logs = []
    for start in (Script.original, Script.alone):
        with Library() as library:
            start(Script(tmp_path, {"log_level": "info", "num_train_epochs": 1}))
        logs.append(library.logged[library.logged.index("***** Running training") :].splitlines()[:9])
    assert logs[1] == logs[0]


def test_fp16_trains_near_float32_with_the_same_bits_in_every_world(tmp_path: Path) -> None:
    """accelerate refuses it without a GPU, so there is no original. The scale comes down first."""
    script = Script(tmp_path, {"fp16": True, "num_train_epochs": 4})
    right = script.alone()
    with Crew("abc", script.task()) as crew:
        crew.train_to(2)
        crew.plant("b", 7, "exchange")
        assert crew.finish() == right.fingerprint
    assert column(right, "loss")[-1] < 0.9 * column(right, "loss")[0]
