"""A script for the Trainer of Hugging Face, for tests: a small GPT-2, sequences of unequal length, an odd number.

43 samples in batches of 3 are 15 batches; in steps of 4 the last one has 3, and its last batch 1 sample.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from crew import Opened, Task
from shoal.training.engine import Engine
from shoal.training.start import Given, engine_with
from torch import Tensor

transformers: Any = importlib.import_module("transformers")
door: Any = importlib.import_module("shoal.integrations.transformers")
transformers.utils.logging.disable_progress_bar()  # it starts a thread

WORDS, SAMPLES, STEPS_PER_EPOCH, EPOCHS = 64, 43, 4, 3
STEPS = EPOCHS * STEPS_PER_EPOCH


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """5 to 11 tokens each."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randint(0, 3, (5 + index % 7,), generator=torch.Generator().manual_seed(index))
        tokens = (torch.arange(len(noise)) * (index % 5 + 1) + noise) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Labels of what was filled up do not count."""
    tokens = [sample["input_ids"] for sample in samples]
    fill = torch.nn.utils.rnn.pad_sequence
    labels = fill([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {
        "input_ids": fill(tokens, batch_first=True),
        "attention_mask": (labels != -100).long(),
        "labels": labels,
    }


def gpt2(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Library(logging.Handler):
    """What the library's own logger says meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.logged = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.logged += record.getMessage() + "\n"

    def __enter__(self) -> Self:
        transformers.utils.logging.add_handler(self)
        return self

    def __exit__(self, *_: object) -> None:
        transformers.utils.logging.remove_handler(self)


@dataclass(frozen=True)
class Script:
    """What a script says. `arguments`: of TrainingArguments; `given`: of the Trainer."""

    folder: Path
    arguments: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], Any] = gpt2
    resume: str | bool | None = None
    kind: str = "Trainer"
    mixin: type = object
    """Overrides, before the Trainer's class."""
    made: Callable[..., Any] = transformers.TrainingArguments
    """What makes the arguments."""
    libraries: tuple[Any, Any] = (transformers, door)
    """Of the original, and of Shoal's."""
    after: Callable[[Any], None] = lambda _: None
    """What the script does with the Trainer in the end."""

    def trainer(self, library: Any, mixin: type = object) -> Any:
        usual = {
            "output_dir": str(self.folder), "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4,
            "num_train_epochs": EPOCHS, "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1, "seed": 7,
            "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
            "log_level": "error",
        }  # fmt: skip
        args = self.made(**{**usual, **self.arguments})
        kinds = tuple(kind for kind in (mixin, self.mixin) if kind is not object)
        of = type("Mine", (*kinds, getattr(library, self.kind)), {})
        usual_given = {"train_dataset": Sequences(), "eval_dataset": Sequences(10), "data_collator": padded}
        given = {name: make() if name == "callbacks" else make for name, make in self.given.items()}
        return of(model=self.model(), args=args, **{**usual_given, **given})

    def original(self) -> Any:
        """The library's own Trainer, trained."""
        trainer = self.trainer(self.libraries[0])
        trainer.train(resume_from_checkpoint=self.resume)
        self.after(trainer)
        return trainer

    def alone(self) -> Any:
        """Shoal's, in a world of one."""
        trainer = self.trainer(self.libraries[1])
        trainer.train(resume_from_checkpoint=self.resume)
        self.after(trainer)
        return trainer

    def task(self, kept: list[Any] | None = None, prepare: Callable[[Engine], None] = lambda _: None) -> Task:
        """Of a crew. `kept`: takes the Trainers of all who come to the end. `prepare`: called with each new engine."""

        def whole(opened: Opened) -> None:
            class InCrew:
                def _engine_of(self, given: Given) -> Engine:
                    engine = engine_with(given, lambda *_: (opened.link, opened.faults))
                    opened.made(engine)
                    prepare(engine)
                    return engine

                def training_step(self, *more: Any, **named: Any) -> Tensor:
                    opened.before()
                    loss: Tensor = super().training_step(*more, **named)  # type: ignore[misc]
                    return loss

            trainer = self.trainer(self.libraries[1], InCrew)
            trainer.train(resume_from_checkpoint=self.resume)
            self.after(trainer)
            if kept is not None:
                kept.append(trainer)

        return Task(whole=whole)


def column(trainer: Any, name: str) -> list[float]:
    """A number of all logs that have it."""
    return [log[name] for log in trainer.state.log_history if name in log]


def untimed_log(trainer: Any) -> list[dict[str, Any]]:
    """The log without what depends on the clock."""
    timed = ("runtime", "per_second", "preparation_time")
    return [
        {name: value for name, value in log.items() if not any(part in name for part in timed)}
        for log in trainer.state.log_history
    ]
