"""TRL's SFTTrainer over Shoal's: the original's losses and metrics, and the same bits and log in every world."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from models.trainer_scripts import Script, column, gpt2, transformers, untimed_log

datasets: Any = importlib.import_module("datasets")
tokenizers: Any = importlib.import_module("tokenizers")
trl: Any = importlib.import_module("trl")
door: Any = importlib.import_module("shoal.integrations.trl")

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = [f"word{number}" for number in range(60)]


@pytest.fixture(autouse=True)
def tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL else sends word of each Trainer to its makers, on a thread."""
    monkeypatch.setenv("CI", "1")


def tokenizer() -> Any:
    words = {word: number for number, word in enumerate(["<pad>", "<end>", *WORDS])}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<end>")


def texts(count: int) -> Any:
    """5 to 11 words each."""
    lines = [" ".join(WORDS[(start * step) % 60] for start in range(5 + step % 7)) for step in range(1, count + 1)]
    return datasets.Dataset.from_dict({"text": lines})


def script(folder: Path, dropout: float = 0.0, given: dict[str, Any] | None = None, **arguments: Any) -> Script:
    return Script(
        folder,
        {"eval_strategy": "epoch", "per_device_eval_batch_size": 2, "dataloader_drop_last": True, **arguments},
        {
            "train_dataset": texts(48), "eval_dataset": texts(10), "data_collator": None,
            "processing_class": tokenizer(), **(given or {}),
        },
        model=lambda: gpt2(dropout), kind="SFTTrainer", libraries=(trl, door),
    )  # fmt: skip


def test_its_losses_and_metrics_are_those_of_the_original(tmp_path: Path) -> None:
    chosen = script(tmp_path, logging_steps=2)
    original, elastic = chosen.original(), chosen.alone()
    names = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
    for name in (*names, "entropy", "mean_token_accuracy", "eval_entropy", "eval_mean_token_accuracy"):
        assert len(column(original, name)) >= 3
        assert column(elastic, name) == pytest.approx(column(original, name), rel=2e-4, abs=1e-6), name


def test_its_bits_and_its_log_are_the_same_through_a_kill_and_a_join(tmp_path: Path) -> None:
    chosen, kept = script(tmp_path, 0.1, logging_steps=2), list[Any]()
    right = chosen.alone()
    with Crew("abc", chosen.task(kept)) as crew:
        crew.train_to(2)
        crew.plant("a", 4, "exchange")
        crew.train_to(7)
        crew.add("d")
        assert crew.finish() == right.fingerprint
    assert len(kept) == 3
    assert all(untimed_log(trainer) == untimed_log(right) for trainer in kept)


def near(original: Any, elastic: Any, within: float, *names: str) -> None:
    for name in names:
        assert len(column(original, name)) >= 2
        assert column(elastic, name) == pytest.approx(column(original, name), rel=within, abs=1e-6), name


PACKED: dict[str, Any] = {"packing": True, "max_length": 24, "bf16": False}
STAGE_3 = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}


@pytest.mark.parametrize(
    ("packed", "deepspeed", "within"),
    [(True, None, 2e-4), (False, None, 0.05), (False, STAGE_3, 0.05)],
    ids=["packed", "adapters", "adapters, stage 3"],
)
def test_packed_samples_and_adapters_train_as_by_the_original_under_its_own_defaults(
    packed: bool, deepspeed: Any, within: float, tmp_path: Path
) -> None:
    """bfloat16, and activations that are computed again."""
    peft: Any = importlib.import_module("peft")
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    plain = replace(
        script(
            tmp_path, 0.0, {} if packed else {"peft_config": lora}, logging_steps=2, learning_rate=0.02,
            **(PACKED if packed else {}),
        ),
        made=trl.SFTConfig,
    )  # fmt: skip
    chosen = replace(plain, arguments={**plain.arguments, "deepspeed": deepspeed})
    original, right, kept = plain.original(), chosen.alone(), list[Any]()
    near(original, right, within, "loss", "step", "eval_loss", "eval_entropy", "eval_mean_token_accuracy")
    with Crew("abc", chosen.task(kept)) as crew:
        crew.train_to(2)
        crew.plant("a", 3, "exchange")
        crew.train_to(3)
        crew.add("d")
        assert crew.finish() == right.fingerprint
    assert len(kept) == 3
    assert all(untimed_log(trainer) == untimed_log(right) for trainer in kept)


class EvaluatesBeside:
    """In the midst of an epoch, under a name of its own."""

    def _maybe_log_save_evaluate(self, *more: Any, **named: Any) -> Any:
        if self.state.global_step == 1:  # type: ignore[attr-defined]
            self.evaluate(texts(5), metric_key_prefix="own")  # type: ignore[attr-defined]
        return super()._maybe_log_save_evaluate(*more, **named)  # type: ignore[misc]


def test_an_evaluation_under_another_name_takes_no_metrics_of_steps(tmp_path: Path) -> None:
    chosen = replace(script(tmp_path, logging_steps=2, num_train_epochs=1), mixin=EvaluatesBeside)
    original, elastic = chosen.original(), chosen.alone()
    near(original, elastic, 2e-4, "entropy", "mean_token_accuracy", "eval_entropy", "eval_mean_token_accuracy")


def test_metrics_of_an_epochs_short_last_step_are_means_over_its_batches(tmp_path: Path) -> None:
    """With 14 batches of steps of 8."""
    elastic = script(
        tmp_path, 0.0, {"train_dataset": texts(42), "shoal": {"lanes": 2}}, logging_steps=1, num_train_epochs=1
    ).alone()
    more = {"gradient_accumulation_steps": 8, "logging_steps": 1, "num_train_epochs": 1}
    original = script(tmp_path, 0.0, {"train_dataset": texts(42)}, **more).original()
    near(original, elastic, 2e-4, "entropy", "mean_token_accuracy")


def test_another_trainer_of_its_is_refused_in_a_sentence() -> None:
    with pytest.raises(ImportError, match="trl's DPOTrainer is not in Shoal: what it counts or draws is one process's"):
        door.DPOTrainer
