"""TRL's SFTTrainer, elastic: `from shoal.integrations.trl import SFTTrainer` in place of theirs.

What it does besides the Trainer is its own: it prepares the dataset, computes the loss, and counts. Its counts are of
the micro-batches that a worker trains; here they become those of the step, the same on all workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any, NoReturn

try:
    import trl
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ModuleNotFoundError("trl is not installed: pip install 'trl>=1.16,<2'", name="trl") from None
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from shoal.integrations.transformers.trainer import ElasticTraining

__all__ = ["SFTTrainer"]

METRICS = {"entropy", "mean_token_accuracy", "aux_loss"}
"""Its means over a micro-batch. Its sum of tokens is one process's; `include_num_input_tokens_seen` counts them."""


def __getattr__(name: str) -> NoReturn:
    if name.endswith("Trainer"):
        raise ImportError(
            f"trl's {name} is not in Shoal: what it counts or draws is one process's. SFTTrainer is there; "
            "docs/transformers.md says more."
        )
    raise AttributeError(name)


class StepMetrics(TrainerCallback, ExportableState):  # type: ignore[misc]
    """What was reported of the steps since the last log. Part of the Trainer's state, so a joiner is given it."""

    def __init__(self, trainer: SFTTrainer) -> None:
        self._trainer = trainer
        self.found: dict[str, list[float]] = {}

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"found": self.found}}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """On every worker, once for each committed step."""
        engine = self._trainer.engine
        assert engine is not None, "it trains"
        for name in METRICS & engine.reports.keys():
            self.found.setdefault(name, []).append(engine.reports[name])


class SFTTrainer(ElasticTraining, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer`, elastic."""

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        """As the library's, and the argument `shoal` of the elastic Trainer."""
        super().__init__(model, args if args is not None else trl.SFTConfig("tmp_trainer"), *more, **named)
        self._steps = StepMetrics(self)
        self.add_callback(self._steps)

    def training_step(self, *given: Any, **named: Any) -> Any:
        """As the library's; what it counts of the micro-batch is reported to the step."""
        loss = super().training_step(*given, **named)
        assert self.engine is not None and self._run is not None, "it trains"
        slots = self._run.reader.order.micro_batches / self.current_gradient_accumulation_steps
        self.engine.report(**{name: slots * value for name, value in self._counted("train").items()})
        return loss

    def _take_counts(self) -> dict[str, float]:
        return self._counted("eval")

    def _add_counts(self, counts: Mapping[str, float]) -> None:
        for name, value in counts.items():
            self._metrics["eval"][name].append(value)

    def _counted(self, mode: str) -> dict[str, float]:
        """Of the last micro-batch, once."""
        counted = self._metrics[mode]
        counts = {name: counted[name][-1] for name in sorted(METRICS & counted.keys())}
        counted.clear()
        return counts

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """As the library's, with the metrics of whole steps, or of the evaluation that is logged."""
        is_training = not {"loss", "train_loss"}.isdisjoint(logs)
        found = self._steps.found if is_training else self._metrics["eval"]
        opening = "" if is_training else "eval_"
        logs.update({f"{opening}{name}": fmean(found[name]) for name in sorted(METRICS & found.keys())})
        found.clear()
        super().log(logs, *more, **named)
