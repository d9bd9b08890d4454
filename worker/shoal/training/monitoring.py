"""The monitoring that a config asks for: progress lines, trackers, and one line of all that was settled.

`check_monitoring` and `show` are called when an engine is made. The trackers' packages, two of which are optional, are
checked on every worker, because each of them may become rank 0 (`missing_packages`). The rest runs on rank 0, once for
each committed step: `StepNumbers` has the numbers under DeepSpeed's names, over the number of samples trained.

The trackers keep these numbers: CSV files, TensorBoard, Weights & Biases. A tracker opens when it gets its first
numbers, and goes on with what an earlier rank 0 has begun: one run through every change of the world. A job that goes
back to a checkpoint writes the steps since then once more.
"""

from __future__ import annotations

import csv
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger

from shoal.config.document import CsvMonitor, TensorBoard, Wandb
from shoal.config.sentences import all_of
from shoal.config.training import Monitoring
from shoal.optim.schedules import class_of
from shoal.optim.several import title_of

if TYPE_CHECKING:
    from shoal.training.engine import Engine


FLUSH_SECONDS = 10
"""A worker may be killed at any time; TensorBoard's own two minutes would be lost with it."""


log = get_logger("shoal")


class Tracker(Protocol):
    """Keeps numbers by name."""

    def write(self, named: dict[str, float], samples: int) -> None:
        """Write the numbers of one step. May raise any error of its package."""


class CsvFiles:
    """One file for each name, with DeepSpeed's file names and first lines."""

    def __init__(self, section: CsvMonitor) -> None:
        self._folder = folder_of(section)

    def write(self, named: dict[str, float], samples: int) -> None:
        for name, value in named.items():
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])


class TensorBoardFiles:
    """A file of events for each worker that was rank 0, in one folder, which TensorBoard shows as one run."""

    def __init__(self, section: TensorBoard) -> None:
        self._folder = folder_of(section)
        self._writer: Any = None

    def write(self, named: dict[str, float], samples: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSH_SECONDS)
        for name, value in named.items():
            self._writer.add_scalar(name, value, samples)


class WandbRun:
    """One run of Weights & Biases, which whoever becomes rank 0 goes on with."""

    def __init__(self, section: Wandb, job: str, run: str) -> None:
        self._section, self._job, self._id = section, job, run
        self._run: Any = None

    def write(self, named: dict[str, float], samples: int) -> None:
        if self._run is None:
            import wandb

            section = self._section
            self._run = wandb.init(
                project=section.project, entity=section.team, group=section.group, name=self._job or None,
                id=self._id or None, resume="allow",
            )  # fmt: skip
        self._run.log(named | {"Train/Samples": samples})


def folder_of(section: CsvMonitor | TensorBoard) -> Path:
    """Where it writes."""
    return Path(section.output_path or ".") / section.job_name


def trackers(monitoring: Monitoring, job: str, run: str) -> list[Tracker]:
    """Those that the config asks for. `run`: what tells this run of the job from others."""
    found: list[Tracker] = []
    if monitoring.csv is not None:
        found.append(CsvFiles(monitoring.csv))
    if monitoring.tensorboard is not None:
        found.append(TensorBoardFiles(monitoring.tensorboard))
    if monitoring.wandb is not None:
        found.append(WandbRun(monitoring.wandb, job, run))
    return found


def missing_packages(monitoring: Monitoring) -> Iterator[str]:
    """Return a sentence for each configured tracker whose package cannot be used."""
    for package in ("tensorboard", "wandb"):
        if getattr(monitoring, package) is not None and (why := why_unusable(package)):
            yield f"`{package}.enabled` is true, and the package {package} {why}, or set it to false."


def places_that_cannot_be_written(monitoring: Monitoring) -> Iterator[str]:
    """A sentence for each folder that cannot be made."""
    for key in ("csv", "tensorboard"):
        section: CsvMonitor | TensorBoard | None = getattr(monitoring, key)
        if section is None:
            continue
        name = "csv_monitor" if key == "csv" else key
        try:
            folder_of(section).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            yield (
                f"`{name}.output_path`: {folder_of(section)} cannot be made ({error.strerror}); name a folder that all "
                "workers can write."
            )


class AttachedCallback(ABC):
    """A callback that hears of more than steps, such as the objects of `shoal.callbacks`."""

    @abstractmethod
    def __call__(self, engine: Engine) -> None:
        """One committed step."""

    @abstractmethod
    def attach(self, engine: Engine) -> None:
        """Register all that it wants to hear; called once, by `engine.on_step`."""


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
        "optimizer": title_of(state.optimizer),
        "groups": _plain(groups),
        "scheduler": class_of(state.scheduler) or None,
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
        if repairs := self._blocks_in_repair():
            shown["repairs"] = repairs
        log.info("progress", **shown)
        self._line_began, self._steps, self._sums = now, 0, {}

    def _blocks_in_repair(self) -> int:
        """How many blocks get their second copy in this world, where the step took longer for it."""
        context = self._engine.context
        if context.world is None or not 0 < context.boundaries <= context.world.plan.boundaries:
            return 0  # a slice goes at each of the plan's boundaries, and the step has passed its own
        return len(context.world.plan.second_copies)


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Of one committed step."""

    step: int
    samples: int
    """Trained so far: of all steps."""
    loss: float
    rates: list[float]
    """Of the optimizer's groups, as the next step has them."""
    loss_scale: float | None
    reports: dict[str, float]
    """What the script has reported, by name."""
    milliseconds: dict[str, float]
    """By phase, where times are wanted: of this worker, in its loop."""

    @classmethod
    def of(cls, engine: Engine, milliseconds: dict[str, float]) -> StepNumbers:
        state, config = engine.context.state, engine.context.config
        rates = [float(group["lr"]) for group in state.optimizer.param_groups]
        scale = state.loss_scale.scale if state.loss_scale is not None else None
        samples = engine.global_step * config.train_batch_size
        return cls(engine.global_step, samples, engine.loss, rates, scale, engine.reports, milliseconds)

    def named(self) -> dict[str, float]:
        """By the names under which DeepSpeed writes them; what scripts report under its own."""
        found = {"train_loss": self.loss, "lr": self.rates[0]}
        if self.loss_scale is not None:
            found["loss_scale"] = self.loss_scale
        found |= {f"elapsed_time_ms_{phase}": value for phase, value in self.milliseconds.items()}
        return {f"Train/Samples/{name}": value for name, value in found.items()} | self.reports


THROUGH = {"tensorboard": "torch.utils.tensorboard"}
"""Modules of torch through which packages are used."""


def why_unusable(package: str) -> str:
    """Return the end of a sentence about the package; empty if it can be imported."""
    try:
        import_module(package)
        import_module(THROUGH.get(package, package))
    except Exception as error:  # a package may raise anything at import
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return f"is not installed: pip install {package}"
        return f"cannot be imported ({type(error).__name__}: {error}): mend it"
    return ""
