"""Optimizers and schedulers that a script gives beside the config's section of that name: both must say the same.

What the section leaves "auto" is as the object has it. Called when an engine is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shoal_protos.errors import UserError
from shoal_protos.text import shown
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.config.document import Optimizer as OptimizerSection
from shoal.config.document import Scheduler as SchedulerSection

OTHER_NAMES = {"adam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw"}
"""What DeepSpeed's Adam is: it decouples weight decay."""

TOTALS = ("total_steps", "T_max", "total_iters", "num_training_steps")
"""Attributes of torch's schedulers, and arguments of the functions of a LambdaLR (transformers' schedules), with the
number of their steps.
"""


def check_scheduled(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Raises `UserError` where a schedule is another optimizer's: no rate that trains would ever change."""
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UserError(
            f"the scheduler, a {type(scheduler).__name__}, sets the rates of another optimizer than the one that "
            f"trains ({type(optimizer).__name__}). Build it over the optimizer that is given (optimizer=), or name "
            "both in the config."
        )


def check_total(scheduler: LRScheduler, micro_batches: int, steps_per_epoch: int, last_step: int) -> None:
    """Raises `UserError` if a scheduler counts a DataLoader's micro-batches over the job's epochs instead of steps: the
    job would end before most of the schedule.
    """
    functions = [given.keywords for given in getattr(scheduler, "lr_lambdas", ()) if isinstance(given, partial)]
    for name in TOTALS:
        total = next((given[name] for given in functions if name in given), getattr(scheduler, name, None))
        if not isinstance(total, int) or not total or total % micro_batches or total == last_step:
            continue
        epochs = total // micro_batches
        if epochs * steps_per_epoch == last_step:
            raise UserError(
                f"the {type(scheduler).__name__}'s {name} is {total}, which is len(loader) {micro_batches} × {epochs} "
                f"{'epoch' if epochs == 1 else 'epochs'}: the loader has micro-batches, and the job makes {last_step} "
                f"steps ({steps_per_epoch} in an epoch). Give it {last_step}, or a loader with the batch of a step."
            )


def optimizer_differs(section: OptimizerSection, given: Optimizer) -> Iterator[str]:
    """A sentence for each value of the section that the object does not have."""
    name, kind = section.type.lower(), type(given).__name__
    if kind.lower() not in (name, OTHER_NAMES.get(name)):
        yield _other_class("optimizer", section.type, kind)
        return
    for key, value in section.params.items():
        # a schedule that begins below its base has moved the rate already
        found = [group.get(f"initial_{key}", group[key]) for group in given.param_groups if key in group]
        odd = next((one for one in found if not _same(one, value)), None)
        if value != "auto" and odd is not None:
            yield _other_value("optimizer", key, value, odd)


def scheduler_differs(section: SchedulerSection, given: LRScheduler) -> Iterator[str]:
    """A sentence for each value of the section that the object does not have, as far as it shows."""
    kind = type(given).__name__
    if kind.lower() != section.type.lower():
        if any(value != "auto" for value in section.params.values()):
            yield _other_class("scheduler", section.type, kind)
        return
    for key, value in section.params.items():
        found = getattr(given, key, value)
        if value != "auto" and not _same(found, value):
            yield _other_value("scheduler", key, value, found)


def _same(found: object, value: object) -> bool:
    return found == (tuple(value) if isinstance(found, tuple) and isinstance(value, list) else value)


def _other_class(section: str, name: str, kind: str) -> str:
    return f"`{section}.type` is {shown(name)}, and the script gives a {kind}; keep one of them."


def _other_value(section: str, key: str, value: object, found: object) -> str:
    return (
        f"`{section}.params.{key}` is {shown(value)}, and the {section} that the script gives has {shown(found)}; keep "
        'one, or write "auto".'
    )
