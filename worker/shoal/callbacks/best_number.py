"""`EarlyStopping` and `SaveBest`: what follows from the best value so far of the loss or of a reported number.

They run on every worker, with the same numbers: so a decision outlives any of them, and it is one. Where they stand is
part of the job's state: `engine.on_step` registers it for checkpoints and joiners.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from shoal_protos.validation import all_of

from shoal.callbacks.step_callback import check_folder
from shoal.training.monitoring import AttachedCallback

if TYPE_CHECKING:
    from shoal.training.engine import Engine

BETTER: Mapping[str, Callable[[float, float], bool]] = {"min": operator.lt, "max": operator.gt}
LOSS = "loss"

log = get_logger("shoal")


def _wrong(number: object, mode: object, smallest_change: object) -> Iterator[str]:
    if not isinstance(number, str):
        yield f"number is {number!r}; expected the name of a number, such as {LOSS!r}."
    if mode not in BETTER:
        yield f"mode is {mode!r}; allowed are {', '.join(BETTER)}."
    if not isinstance(smallest_change, int | float):
        yield f"smallest_change is {smallest_change!r}; expected a number."


class BestNumber(AttachedCallback):
    """Looks at one number after each step, and each evaluation, that has it."""

    def __init__(self, number: str, mode: str, smallest_change: float = 0.0, faults: Iterable[str] = ()) -> None:
        """Raises `UserError` for values that are not allowed, and those of `faults`."""
        name = f"shoal.callbacks.{type(self).__name__}"
        wrong = [*faults, *_wrong(number, mode, smallest_change)]
        if wrong:
            raise UserError(all_of(wrong if len(wrong) > 1 else [f"{name}: {wrong[0]}"], name))
        self.number, self._is_better = number, BETTER[mode]
        self._change = -abs(smallest_change) if mode == "min" else abs(smallest_change)
        self.step = self.best_step = self.worse = 0
        """The last step that was looked at, that of the best number, and numbers since then that were no better."""
        self.best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"step": self.step, "best_step": self.best_step, "worse": self.worse, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.step, self.best_step = state["step"], state["best_step"]
        self.worse, self.best = state["worse"], state["best"]

    def attach(self, engine: Engine) -> None:
        engine.register_state(f"{type(self).__name__} {self.number}", self)
        engine.parts.boundary.add_watcher(lambda: self(engine))
        engine.parts.evaluation.measured.add_listener(lambda numbers: self.on_evaluation(engine, numbers))
        engine.training.add_ending(lambda: self.at_end(engine))

    def __call__(self, engine: Engine) -> None:
        """One committed step, on every worker, perhaps again."""
        step = engine.global_step
        if step < self.step:
            self.load_state_dict({"step": 0, "best_step": 0, "worse": 0, "best": None})  # it started over
        if step == self.step:
            return
        self.step = step
        value = engine.loss if self.number == LOSS else _of_the_step(engine).get(self.number)
        if value is not None:
            self._judge(engine, value)

    def on_evaluation(self, engine: Engine, numbers: Mapping[str, float]) -> None:
        """An evaluation after the last step, on every worker, once."""
        value = numbers.get(self.number)
        if value is not None:
            self._judge(engine, value)

    def at_end(self, engine: Engine) -> None:
        """The loop is over."""
        if self.best is None and engine.rank == 0:
            log.warning("number_never_reported", callback=type(self).__name__, number=self.number,
                        reported=sorted(engine.reports), means="it has done nothing in the whole job")  # fmt: skip

    def _judge(self, engine: Engine, value: float) -> None:
        step = engine.global_step
        if not math.isnan(value) and (self.best is None or self._is_better(value, self.best + self._change)):
            self.best, self.best_step, self.worse = value, step, 0
            self.on_best(engine)
        else:
            self.worse += 1
            self.on_worse(engine)

    def on_best(self, engine: Engine) -> None:
        """The number is the best so far."""

    def on_worse(self, engine: Engine) -> None:
        """It is no better."""


def _of_the_step(engine: Engine) -> Mapping[str, float]:
    """Numbers that the step's vote has carried. `on_evaluation` hears of those that were measured after it, which a
    member may have before it comes to this.
    """
    record = engine.context.state.record
    return {**record.reports, **record.evaluations} if record is not None else {}


class EarlyStopping(BestNumber):
    """`engine.on_step(EarlyStopping("validation_loss", patience=3))`: calls `engine.stop()` when the number was no
    better so many times in a row.
    """

    def __init__(self, number: str = LOSS, patience: int = 3, mode: str = "min", smallest_change: float = 0.0) -> None:
        """`number`: the loss, or what the script reports. Raises `UserError` for values that are not allowed."""
        fits = isinstance(patience, int) and patience >= 1
        super().__init__(
            number, mode, smallest_change, () if fits else [f"patience is {patience!r}; expected a number from 1."]
        )
        self._patience = patience

    def on_worse(self, engine: Engine) -> None:
        if self.worse == self._patience:
            if engine.rank == 0:
                log.info("early_stopping", number=self.number, best=self.best, best_step=self.best_step, step=self.step)
            engine.stop()


class SaveBest(BestNumber):
    """`engine.on_step(SaveBest("best.safetensors", "validation_loss"))`: exports the model, once, when the number is
    the best so far. Of an evaluation right after a step the weights are those that it has measured.
    """

    def __init__(self, path: str | Path, number: str = LOSS, mode: str = "min") -> None:
        """Raises `UserError` for values that are not allowed, or a folder that cannot be written."""
        super().__init__(number, mode)
        self._path = Path(path)
        check_folder("SaveBest", self._path.parent)
        if self._path.is_dir():
            raise UserError(f"shoal.callbacks.SaveBest: {self._path} is a folder; name a file in it.")

    def on_best(self, engine: Engine) -> None:
        engine.export(self._path)
