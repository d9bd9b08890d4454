"""What a config asks to be shown of a job: progress lines, trackers, one line of all that was settled.

`check_monitoring` and `show` are called by whoever makes an engine; the rest runs on rank 0, once for each step.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from shoal_protos.errors import UserError

from shoal.callbacks.step_numbers import StepNumbers
from shoal.callbacks.trackers import Tracker, missing_packages, places_that_cannot_be_written, trackers
from shoal.config.monitoring import Monitoring
from shoal.config.sentences import all_of
from shoal.logs import get_logger

if TYPE_CHECKING:
    from shoal.training.engine import Engine

log = get_logger("shoal")


def check_monitoring(monitoring: Monitoring) -> None:
    """Raises `UserError` for all packages that cannot be used, and all places that cannot be written."""
    if faults := [*missing_packages(monitoring), *places_that_cannot_be_written(monitoring)]:
        raise UserError(all_of(faults))


def show(engine: Engine) -> None:
    """From now on the engine's steps are shown as its config asks."""
    monitoring = engine.context.config.monitoring
    if monitoring.dump:
        log.info("state", **settled(engine))
    if monitoring.steps_per_line is None and not monitoring.has_writers:
        return
    job = engine.context.link.job
    observer = _Observer(engine, monitoring.steps_per_line, trackers(monitoring, job.name, job.run))
    engine.parts.boundary.add_observer(observer.on_step)
    engine.parts.evaluation.measured.add_observer(observer.on_evaluation)


def settled(engine: Engine) -> dict[str, Any]:
    """What an engine trains by, for people: the whole configuration, the model's size, the optimizer's groups."""
    state = engine.context.state
    groups = [
        {name: value for name, value in group.items() if name != "params"} | {"parameters": len(group["params"])}
        for group in state.optimizer.param_groups
    ]
    return {
        "config": _plain(engine.context.config),
        "parameters": sum(parameter.numel() for parameter in engine.module.parameters()),
        "trained_parameters": sum(slot.parameter.elements for b in state.layout.buckets for slot in b.slots),
        "blocks": state.layout.blocks,
        "block_elements": state.layout.block_elements,
        "optimizer": type(state.optimizer).__name__,
        "groups": _plain(groups),
        "scheduler": type(state.scheduler).__name__ if state.scheduler is not None else None,
        "device": str(engine.device),
        "last_step": state.last_step or None,
    }


def _plain(value: Any) -> Any:
    """As JSON can have it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class _Observer:
    """Rank 0's: of every committed step."""

    def __init__(self, engine: Engine, steps_per_line: int | None, writers: list[Tracker]) -> None:
        self._engine, self._every, self._writers = engine, steps_per_line, writers
        self._line_began, self._steps = time.monotonic(), 0
        self._sums: dict[str, float] = {}
        """Milliseconds by phase, of the steps since the last line."""

    def on_step(self) -> None:
        times = {phase: 1000 * seconds for phase, seconds in self._engine.times.take().items()}
        numbers = StepNumbers.of(self._engine, times)
        self._steps += 1
        for phase, spent in times.items():
            self._sums[phase] = self._sums.get(phase, 0.0) + spent
        if self._every is not None and numbers.step % self._every == 0:
            self._line(numbers)
        self._write(numbers.named(), numbers)

    def on_evaluation(self, numbers: dict[str, float]) -> None:
        """Of an evaluation after the last step."""
        self._write(numbers, StepNumbers.of(self._engine, {}))

    def _write(self, named: dict[str, float], at: StepNumbers) -> None:
        for writer in tuple(self._writers):
            try:
                writer.write(named, at.samples)
            except Exception as error:  # a tracker may raise any error, and training continues without it
                self._writers.remove(writer)
                log.error("tracker_failed", tracker=type(writer).__name__, step=at.step, reason=str(error),
                          means="it gets no more numbers from this worker")  # fmt: skip

    def _line(self, numbers: StepNumbers) -> None:
        now = time.monotonic()
        seconds = max(now - self._line_began, 1e-9)
        samples = self._steps * self._engine.context.config.train_batch_size
        shown: dict[str, Any] = {"step": numbers.step, "loss": numbers.loss, "lr": numbers.rates}
        if numbers.loss_scale is not None:
            shown["loss_scale"] = numbers.loss_scale
        if numbers.reports:
            shown["reports"] = numbers.reports
        shown["samples_per_second"] = round(samples / seconds, 1)
        if self._sums:
            shown["milliseconds"] = {phase: round(spent / self._steps, 2) for phase, spent in self._sums.items()}
        log.info("progress", **shown)
        self._line_began, self._steps, self._sums = now, 0, {}
