"""What scripts use of the Trainer besides its loop: callbacks, metrics, checkpoints, PEFT, DeepSpeed; refusals."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from crew import Crew
from crew_saves import saved
from models.trainer_scripts import (
    STEPS,
    Script,
    Sequences,
    column,
    gpt2,
    transformers,
    untimed_log,
)
from rule import holds
from shoal_protos.errors import UserError
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")


class Seen(transformers.TrainerCallback):  # type: ignore[misc]
    """What a callback is told, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name == "on_pre_optimizer_step":
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **_: Any) -> None:
            self.events.append(f"{name} {state.global_step}")

        return note


def test_callbacks_are_told_in_the_order_of_the_original(tmp_path: Path) -> None:
    script = Script(tmp_path, {"eval_strategy": "epoch", "num_train_epochs": 2}, {"callbacks": lambda: [Seen()]})
    original, elastic = script.original(), script.alone()
    seen = [next(one for one in t.callback_handler.callbacks if isinstance(one, Seen)) for t in (original, elastic)]
    left_out = ("on_pre_optimizer_step", "on_substep_end")
    events = [[event for event in one.events if event.split()[0] not in left_out] for one in seen]
    assert events[1] == events[0]


def test_the_progress_bar_is_that_of_whoever_is_rank_0(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Bar(transformers.ProgressCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            super().on_step_end(args, state, control, **named)
            if self.training_bar is not None:
                assert self.training_bar.total == STEPS
                seen.append((state.global_step, self.training_bar.n))

    with Crew("abc", Script(tmp_path, given={"callbacks": lambda: [Bar()]}).task()) as crew:
        crew.train_to(3)
        crew.plant("a", 5, "exchange")
        crew.finish()
    assert seen == [(step, step) for step in range(1, STEPS + 1)]


class OwnLoss:
    """An override as scripts have it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        loss = loss / (num_items_in_batch if num_items_in_batch is not None else (labels[:, 1:] != -100).sum())
        return (loss, outputs) if return_outputs else loss


def accuracy(found: Any) -> dict[str, float]:
    guesses, labels = numpy.argmax(found.predictions[:, :-1], -1), found.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != -100].mean())}


def test_an_override_of_the_loss_metrics_and_predictions_are_those_of_the_original(tmp_path: Path) -> None:
    predicted: list[Any] = []
    script = Script(
        tmp_path, {"eval_strategy": "epoch", "per_device_eval_batch_size": 4}, {"compute_metrics": accuracy},
        mixin=OwnLoss, after=lambda trainer: predicted.append(trainer.predict(Sequences(6))),
    )  # fmt: skip
    original, elastic = script.original(), script.alone()
    for name in ("loss", "eval_loss", "eval_accuracy"):
        assert column(elastic, name) == pytest.approx(column(original, name), rel=1e-3), name
    assert numpy.allclose(predicted[0].predictions, predicted[1].predictions, atol=1e-3)
    assert predicted[1].metrics["test_accuracy"] == pytest.approx(predicted[0].metrics["test_accuracy"])


def test_a_model_that_takes_no_count_of_items_has_the_mean_over_batches_of_the_original(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(self.embedding(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)}

    script = Script(tmp_path, {"num_train_epochs": 2}, model=Plain)
    original, elastic = script.original(), script.alone()
    assert column(elastic, "loss") == pytest.approx(column(original, "loss"), rel=1e-4)


# ---- checkpoints

SAVING = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}


def test_a_saved_folder_is_a_model_and_training_goes_on_from_it_to_the_same_bits(tmp_path: Path) -> None:
    whole = Script(tmp_path / "whole", SAVING, model=lambda: gpt2(0.1)).alone()
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == [
        "checkpoint-10", f"checkpoint-{STEPS}", "checkpoint-5", "elastic",
    ]  # fmt: skip
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whole" / f"checkpoint-{STEPS}")
    for mine, theirs in zip(loaded.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    others = {**SAVING, "save_steps": 3, "save_total_limit": 2, "dataloader_num_workers": 1}
    again = Script(tmp_path / "again", others, model=lambda: gpt2(0.1), resume=str(tmp_path / "whole/checkpoint-5"))
    resumed = again.alone()
    assert resumed.fingerprint == whole.fingerprint
    assert untimed_log(resumed) == untimed_log(whole)
    assert {path.name for path in (tmp_path / "again").glob("checkpoint-*")} == {"checkpoint-9", f"checkpoint-{STEPS}"}
    newest = Script(tmp_path / "whole", others, model=lambda: gpt2(0.1), resume=True).alone()
    assert newest.fingerprint == whole.fingerprint


@holds("After each commit a Trainer's callbacks")
def test_all_go_back_to_a_checkpoint_with_the_log_of_its_step(tmp_path: Path) -> None:
    right = Script(tmp_path / "right", SAVING).alone()
    kept: list[Any] = []
    deepspeed = {"zero_optimization": {"stage": 2}, "shoal": {"mirrors": 0}, "gradient_clipping": "auto"}
    with Crew("abc", Script(tmp_path / "lost", {**SAVING, "deepspeed": deepspeed}).task(kept)) as crew:
        crew.train_to(5)
        saved(crew, 5)
        crew.kill("b")
        assert crew.finish() == right.fingerprint
        assert [world.from_step for world in crew.job.durable.history if world.reason.value == "restore"] == [5]
    assert all(column(trainer, "loss") == column(right, "loss") for trainer in kept)


def test_the_best_model_is_saved_and_loaded_in_the_end(tmp_path: Path) -> None:
    arguments = {**SAVING, "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1,
                 "learning_rate": 0.3, "warmup_steps": 0}  # fmt: skip
    original, elastic = Script(tmp_path / "1", arguments).original(), Script(tmp_path / "2", arguments).alone()
    best = elastic.state.best_model_checkpoint
    assert Path(best).name == Path(original.state.best_model_checkpoint).name
    loaded = transformers.GPT2LMHeadModel.from_pretrained(best)
    for mine, theirs in zip(loaded.parameters(), elastic.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_evaluations_and_the_best_metric_are_those_of_the_step_measured(tmp_path: Path) -> None:
    """Of three workers, of which one is lost after the first evaluation."""
    arguments = {**SAVING, "save_steps": 4, "eval_steps": 4, "load_best_model_at_end": True, "learning_rate": 0.3,
                 "warmup_steps": 0}  # fmt: skip
    with Crew("abc", Script(tmp_path, arguments).task(kept := list[Any]())) as crew:
        crew.train_to(5)
        crew.kill("a")
        crew.finish()
    state = kept[0].state
    losses = {log["step"]: log["eval_loss"] for log in state.log_history if "eval_loss" in log}
    for step, loss in losses.items():
        load = partial(transformers.GPT2LMHeadModel.from_pretrained, tmp_path / f"checkpoint-{step}")
        again = Script(tmp_path / "again", model=load).trainer(transformers).evaluate()["eval_loss"]
        assert again == pytest.approx(loss, rel=1e-6)
    assert sorted(losses) == [4, 8, STEPS] and len(set(losses.values())) == 3
    assert (state.best_metric, state.best_global_step) == min((loss, step) for step, loss in losses.items())
    best = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{state.best_global_step}")
    for mine, theirs in zip(kept[0].model.parameters(), best.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_early_stopping_stops_all_alike(tmp_path: Path) -> None:
    arguments = {**SAVING, "save_steps": 2, "eval_steps": 2, "metric_for_best_model": "loss", "learning_rate": 0.5,
                 "load_best_model_at_end": True, "num_train_epochs": 10, "warmup_steps": 0}  # fmt: skip
    given = {"callbacks": lambda: [transformers.EarlyStoppingCallback(2)]}
    original = Script(tmp_path / "1", arguments, given).original()
    right = Script(tmp_path / "2", arguments, given).alone()
    assert right.state.global_step == original.state.global_step < 40
    with Crew("abc", Script(tmp_path / "3", arguments, given).task()) as crew:
        crew.train_to(3)
        crew.kill("a")
        assert crew.finish() == right.fingerprint


class Stops(Seen):
    """At a step: on all workers, or by the word of rank 0 alone."""

    def __init__(self, step: int, alone: bool = False) -> None:
        super().__init__()
        self.step, self.alone = step, alone

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and (state.is_world_process_zero or not self.alone):
            control.should_training_stop = True

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name == "on_step_end" else super().__getattribute__(name)


@pytest.mark.parametrize("alone", [False, True], ids=["on all workers", "on rank 0"])
def test_a_callback_that_stops_training_stops_all_that_count_at_the_step_whose_weights_they_have(
    alone: bool, tmp_path: Path
) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 5}
    Script(tmp_path / "right", arguments).alone()
    right = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "right" / "checkpoint-5")
    kept: list[Any] = []
    given = {"callbacks": lambda: [Stops(5, alone)]}
    with Crew("abc", Script(tmp_path / "crew", arguments, given).task(kept)) as crew:
        crew.finish()
        assert crew.job.durable.step == 5
    assert [path.name[:17] for path in (tmp_path / "crew" / "elastic").glob("step-*")] == ["step-000000000005"]
    for trainer in kept:
        assert trainer.state.global_step == trainer.engine.global_step == 5
        for mine, other in zip(trainer.model.parameters(), right.parameters(), strict=True):
            assert torch.equal(mine, other)
        stops = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Stops))
        assert alone or not {"on_step_begin 5", "on_substep_end 5"} & set(stops.events), "the step after is not begun"


def test_a_stop_that_was_asked_for_before_all_go_back_comes_at_its_step_again(tmp_path: Path) -> None:
    given = {"callbacks": lambda: [Stops(9)]}
    right, kept = Script(tmp_path / "right", SAVING, given).alone(), list[Any]()
    deepspeed = {"zero_optimization": {"stage": 2}, "shoal": {"mirrors": 0}, "gradient_clipping": "auto"}
    with Crew("abc", Script(tmp_path / "lost", {**SAVING, "deepspeed": deepspeed}, given).task(kept)) as crew:
        crew.train_to(5)
        saved(crew, 5)
        crew.plant("b", 10, "exchange")
        assert crew.finish() == right.fingerprint
        assert [world.from_step for world in crew.job.durable.history if world.reason.value == "restore"] == [5]
    assert [trainer.state.global_step for trainer in kept] == [9, 9]


# ---- other doors


def test_an_adapter_of_peft_is_trained_and_saved(tmp_path: Path) -> None:
    peft: Any = importlib.import_module("peft")

    def adapted() -> Any:
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return peft.get_peft_model(gpt2(), lora)

    script = Script(tmp_path, {"save_strategy": "epoch", "learning_rate": 0.05}, model=adapted)
    original = Script(tmp_path / "plain", {"learning_rate": 0.05}, model=adapted).original()
    elastic = script.alone()
    assert column(elastic, "loss") == pytest.approx(column(original, "loss"), rel=1e-3)
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path / f"checkpoint-{STEPS}")
    trained = dict(elastic.model.named_parameters())
    assert any("lora_B" in name for name in trained)
    for name, value in loaded.named_parameters():
        assert torch.equal(value, trained[name]), name
    with Crew("ab", Script(tmp_path / "crew", {"learning_rate": 0.05}, model=adapted).task()) as crew:
        crew.train_to(4)
        crew.kill("b")
        assert crew.finish() == elastic.fingerprint


# ---- half precision


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[], Any]:
    """`from_pretrained` of a checkpoint in bfloat16."""
    gpt2().bfloat16().save_pretrained(tmp_path / "bf16")
    return partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path / "bf16")


def frozen(part: str, load: Callable[[], Any]) -> Any:
    model = load()
    model.get_submodule(part).requires_grad_(False)
    return model


def test_a_model_that_is_loaded_in_bfloat16_is_trained_in_float32(
    loaded: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert next(loaded().parameters()).dtype is torch.bfloat16
    right = Script(tmp_path / "right", model=lambda: loaded().float()).alone()
    assert "trained_in_float32" not in capsys.readouterr().err
    elastic = Script(tmp_path / "mine", model=loaded).alone()
    assert capsys.readouterr().err.count("trained_in_float32") == 1
    assert elastic.fingerprint == right.fingerprint and column(elastic, "loss") == column(right, "loss")


@pytest.mark.parametrize("part", ["transformer.h", "transformer.wte", "transformer.h.0.ln_1"])
def test_a_frozen_part_of_it_stays_in_bfloat16_beside_what_is_trained(
    part: str, loaded: Callable[[], Any], tmp_path: Path
) -> None:
    script = Script(tmp_path / "mine", {"eval_strategy": "epoch"}, model=partial(frozen, part, loaded))
    elastic, whole = (
        script.alone(),
        Script(tmp_path / "right", model=partial(frozen, part, lambda: loaded().float())).alone(),
    )
    dtypes = {name: one.dtype for name, one in elastic.model.named_parameters()}
    assert all(dtypes[name] is torch.float32 for name, one in elastic.model.named_parameters() if one.requires_grad)
    matrices = [name for name, one in elastic.model.named_parameters() if not one.requires_grad and one.dim() > 1]
    assert all(dtypes[name] is torch.bfloat16 for name in matrices)
    assert column(elastic, "loss") == pytest.approx(column(whole, "loss"), rel=0.02)
    with Crew("ab", replace(script, folder=tmp_path / "crew").task()) as crew:
        assert crew.finish() == elastic.fingerprint


def test_a_deepspeed_section_keeps_it_in_bfloat16_with_float32_masters(
    loaded: Callable[[], Any], tmp_path: Path
) -> None:
    arguments = {"bf16": True, "deepspeed": {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}}
    script = Script(tmp_path / "mine", arguments, model=loaded)
    elastic, whole = script.alone(), Script(tmp_path / "right", model=lambda: loaded().float()).alone()
    assert {one.dtype for one in elastic.model.parameters()} == {torch.bfloat16}
    assert {one.parameter.dtype for one in elastic.engine.context.state.held.segments.in_order} == {torch.float32}
    assert column(elastic, "loss") == pytest.approx(column(whole, "loss"), rel=0.02)
    with Crew("ab", replace(script, folder=tmp_path / "crew").task()) as crew:
        assert crew.finish() == elastic.fingerprint


def test_half_precision_by_the_arguments_holds_beside_a_deepspeed_configuration_without_such_a_section(
    tmp_path: Path,
) -> None:
    arguments = {"bf16": True, "num_train_epochs": 1}
    beside = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
    right = Script(tmp_path / "right", arguments).alone()
    elastic = Script(tmp_path / "mine", {**arguments, "deepspeed": beside}).alone()
    assert elastic.fingerprint == right.fingerprint
    assert elastic.fingerprint != Script(tmp_path / "float32", {"num_train_epochs": 1}).alone().fingerprint


# ---- DeepSpeed

DS_CONFIG = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True,
                          "stage3_gather_16bit_weights_on_model_save": True},
}  # fmt: skip


def test_a_deepspeed_configuration_is_filled_in_and_stage_3_is_evaluated_and_saved(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(DS_CONFIG))
    script = Script(tmp_path, {**SAVING, "deepspeed": str(file)})
    elastic = script.alone()
    config = elastic.engine.context.config
    assert (config.train_batch_size, config.lanes, config.stage, config.gradient_clipping) == (12, 4, 3, 1.0)
    assert elastic.optimizer.param_groups[0]["betas"] == (0.9, 0.999) or elastic.optimizer.param_groups[0]["betas"] == [
        0.9,
        0.999,
    ]
    kept: list[Any] = []
    with Crew("ab", Script(tmp_path / "crew", {**SAVING, "deepspeed": DS_CONFIG}).task(kept)) as crew:
        assert crew.finish() == elastic.fingerprint
    assert [column(trainer, "eval_loss") for trainer in kept] == [column(elastic, "eval_loss")] * 2
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "crew" / f"checkpoint-{STEPS}")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    for mine, other in zip(loaded.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_numbers_that_file_and_arguments_give_differently_are_named_all_at_once(tmp_path: Path) -> None:
    config = {**DS_CONFIG, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 5}
    with pytest.raises(UserError, match=r"`train_micro_batch_size_per_gpu` is 5 .*3.*`gradient_clipping` is 0.5"):
        Script(tmp_path, {"deepspeed": config}).alone()
    elasticity = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [3]}
    with pytest.raises(
        UserError, match="`elasticity` is on in the DeepSpeed configuration, and the Trainer's arguments"
    ):
        Script(tmp_path, {"deepspeed": {**DS_CONFIG, "elasticity": elasticity}}).alone()


@pytest.mark.parametrize(
    ("file", "lanes"),
    [
        ({"train_batch_size": 24}, 4),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 3}, 4),
        ({"train_batch_size": 12.0}, 2),
    ],
)
def test_a_deepspeed_batch_of_several_processes_is_as_many_lanes_with_the_samples_of_their_steps(
    file: dict[str, Any], lanes: int, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"gradient_clipping": "auto", "zero_optimization": {"stage": 2}, **file}))
    given = ["--deepspeed", str(path), "--output_dir", str(tmp_path)]
    (parsed,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(given)
    arguments = {"gradient_accumulation_steps": 2, "deepspeed": parsed.deepspeed}
    script = Script(tmp_path / "mine", arguments)
    elastic = script.alone()
    config = elastic.engine.context.config
    assert (config.lanes, config.micro_batches_per_lane, config.train_batch_size) == (lanes, 2, lanes * 2 * 3)
    original = Script(tmp_path / "right", {"gradient_accumulation_steps": 2 * lanes}).original()
    assert elastic.state.global_step == original.state.global_step
    for name in ("loss", "grad_norm", "learning_rate", "epoch"):
        assert column(elastic, name) == pytest.approx(column(original, name), rel=2e-4), name
    with Crew("abc"[:lanes], replace(script, folder=tmp_path / "crew").task()) as crew:
        crew.train_to(2)
        crew.kill("b")
        assert crew.finish() == elastic.fingerprint


@pytest.mark.parametrize("batch", [13, 3])
def test_a_deepspeed_batch_that_is_no_number_of_processes_is_refused_with_both_numbers(
    batch: int, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=f"`train_batch_size` is {batch} in the DeepSpeed configuration and 6 by the arg"
    ):
        Script(tmp_path, {"gradient_accumulation_steps": 2, "deepspeed": {"train_batch_size": batch}}).alone()


def test_lanes_stand_for_the_processes_that_a_script_was_written_for(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 2}
    elastic = Script(tmp_path, arguments, {"shoal": {"lanes": 2}}).alone()
    original = Script(tmp_path).original()
    assert elastic.engine.context.config.train_batch_size == 12
    assert column(elastic, "loss") == pytest.approx(column(original, "loss"), rel=2e-4)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Has a length, and no numbered samples."""

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 8


class Plain:
    """A loader that only goes over its batches."""

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Plain, "a Plain without `dataset`, `batch_sampler`, `collate_fn`"),
        (lambda: torch.utils.data.DataLoader(Stream()), "a DataLoader without numbered samples"),
        (lambda: torch.utils.data.DataLoader(Sequences(), batch_size=None), "a DataLoader without `batch_sampler`"),
    ],
    ids=["no DataLoader", "a stream", "no batches"],
)
def test_a_loader_of_the_script_that_cannot_be_read_by_number_is_refused_in_a_sentence(
    make: Any, found: str, tmp_path: Path
) -> None:
    class Own:
        def get_train_dataloader(self) -> Any:
            return make()

    with pytest.raises(
        UserError, match=f"`get_train_dataloader` gave {found}, .*DataLoader over a dataset with __len__"
    ):
        Script(tmp_path, mixin=Own).alone()


def test_what_cannot_be_honoured_is_said_all_at_once(tmp_path: Path) -> None:
    class Clips(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Would clip."""

    arguments = {"optim": "lomo", "auto_find_batch_size": True, "ignore_data_skip": True, "max_steps": 5}
    given = {"callbacks": lambda: [Clips()], "train_dataset": Stream()}
    with pytest.raises(UserError) as refused:
        Script(tmp_path, arguments, given).alone()
    sentence = str(refused.value)
    for name in ("5 things", "`optim`", "`auto_find_batch_size`", "`ignore_data_skip`", "Clips", "Stream"):
        assert name in sentence, sentence
