"""What a run is given, and what of it replaces what a checkpoint has.

Given are the values that the optimizer's groups have at the start (the rate as `initial_lr`, where a scheduler has put
one there) and the schedule's own keys. A checkpoint keeps them beside what was moved since. So a value that script or
config have changed is told from one that training has moved: only the first replaces what was saved. Called by the
state of training, by its description and where a checkpoint is taken up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.core.plain import decode, encode
from shoal.optim.hyper import Group, hyper_parameters, in_place_of
from shoal.optim.schedules import Schedule, class_of, momenta_of, scale_rates, schedule_values, take_keys
from shoal.optim.several import pairs_of

RATE, BASE = "lr", "initial_lr"
OF_SCHEDULES = (BASE, "max_lr", "min_lr", "base_momentum", "max_momentum")
"""What schedulers put into groups for themselves."""
LONGEST = 200
"""Characters of a value in a description."""
MOST_NAMED = 8

Changed = Mapping[int, tuple[Any, Any]]
"""By group, the old and the new value."""
Moved = Mapping[int, Collection[str]]
"""By group, the keys of values that steps of the optimizer change."""


@dataclass(frozen=True, slots=True)
class ValuesOfRun:
    """What a run was given."""

    groups: Sequence[Group]
    schedule: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OtherValues:
    """What script or config have changed since the checkpoint's run began."""

    taken: tuple[str, ...] = ()
    """The new values hold; each as `lr: 0.1 → 0.2`."""
    kept: tuple[str, ...] = ()
    """The saved ones stay, for the schedule cannot go on from the middle with others."""

    def __str__(self) -> str:
        """A sentence; empty where nothing differs."""
        parts = [f"taken: {', '.join(self.taken)}"] if self.taken else []
        parts += [f"not taken, so the saved schedule goes on: {', '.join(self.kept)}"] if self.kept else []
        return f"other values are given than to the checkpoint's run; {'; '.join(parts)}" if parts else ""


class GivenHyperParameters:
    """Those of this process; made before anything moves them."""

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None, moved: Moved) -> None:
        """Raises `UserError` for a scheduler that cannot be saved."""
        self._parts, first = list[_OfOptimizer](), 0
        for member, over in pairs_of(optimizer, scheduler):
            numbers = range(first, first + len(member.param_groups))
            self._parts.append(_OfOptimizer(member, over, moved, numbers, len(optimizer.param_groups)))
            first = numbers.stop
        groups = [group for part in self._parts for group in part.values.groups]
        schedules = [
            (self._name(index, key), value)
            for index, part in enumerate(self._parts)
            for key, value in part.values.schedule.items()
        ]
        self.values = ValuesOfRun(groups, dict(schedules))

    def _name(self, part: int, key: str) -> str:
        """What a value of the schedule of one of several optimizers is called."""
        return f"{part}.{key}" if len(self._parts) > 1 else key

    def texts(self) -> dict[str, str]:
        """What all workers of a run must agree in, by name."""
        groups, schedule = self.values.groups, self.values.schedule
        keys = dict.fromkeys(key for group in groups for key in group)
        values = {key: [group.get(key, "not set") for group in groups] for key in keys}
        return {f"{key} of the optimizer's groups": _short(value) for key, value in values.items()} | {
            f"{key} of the scheduler": _short([value]) for key, value in schedule.items()
        }

    def begin_schedules_anew(self, goes_on: Collection[int]) -> None:
        """The checkpoint's schedulers are of another kind: these stand where they began, with the rates as saved; but
        those over the optimizers of these numbers.
        """
        for index, part in enumerate(self._parts):
            if index not in goes_on:
                part.begin_schedule_anew()

    def replace(self, saved: ValuesOfRun, goes_on: Collection[int]) -> OtherValues:
        """Called once optimizer and scheduler have what was saved. What differs from `saved` now, which the
        checkpoint's run was given, replaces it: in groups, and as the base of a schedule. `goes_on`: numbers of the
        optimizers whose saved schedule does.
        """
        outcomes, at = list[OtherValues](), 0
        for index, part in enumerate(self._parts):
            groups = saved.groups[at : at + len(part.values.groups)]
            at += len(groups)
            own = {key: self._name(index, key) for key in part.values.schedule}
            schedule = {key: saved.schedule[name] for key, name in own.items() if name in saved.schedule}
            outcomes.append(part.replace(ValuesOfRun(groups, schedule), index in goes_on))
        return OtherValues(
            tuple(text for one in outcomes for text in one.taken), tuple(text for one in outcomes for text in one.kept)
        )


class _OfOptimizer:
    """What one was given, with the scheduler over it."""

    def __init__(
        self, optimizer: Optimizer, scheduler: LRScheduler | None, moved: Moved, numbers: range, of: int
    ) -> None:
        """`numbers`: of its groups, among so many in all."""
        self._optimizer, self._scheduler, self._numbers, self._of = optimizer, scheduler, numbers, of
        self._first, self._beside = hyper_parameters(optimizer), dict[str, Tensor]()
        state = scheduler.state_dict() if scheduler is not None else None
        self._schedule = encode(state, self._beside, "the scheduler's state")
        groups = zip(numbers, self._first, strict=True)
        self.values = ValuesOfRun(
            [_given(group, moved.get(number, ()), scheduler) for number, group in groups], schedule_values(scheduler)
        )

    def begin_schedule_anew(self) -> None:
        """See above."""
        if self._scheduler is None:
            return
        self._scheduler.load_state_dict(decode(self._schedule, self._beside))
        for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
            group.update({key: first[key] for key in OF_SCHEDULES if key in first})

    def replace(self, saved: ValuesOfRun, goes_on: bool) -> OtherValues:
        """See above."""
        changes, scheduler = _changes(self.values.groups, saved.groups), self._scheduler
        rates = changes.pop(RATE, {}) if scheduler is not None else {}
        for key, changed in changes.items():
            _set(self._optimizer, key, {number: new for number, (_, new) in changed.items()})
        taken = [text for key, changed in changes.items() for text in self._named(key, changed)]
        if scheduler is None:
            return OtherValues(tuple(taken))
        scheduled = self._replace_in_schedule(scheduler, saved, goes_on, rates)
        return OtherValues((*taken, *scheduled.taken), scheduled.kept)

    def _replace_in_schedule(
        self, scheduler: LRScheduler, saved: ValuesOfRun, goes_on: bool, rates: Changed
    ) -> OtherValues:
        """`rates`: the bases that differ."""
        of_rates = self._named(RATE, rates)
        if not goes_on:
            _set(scheduler.optimizer, RATE, {number: self._first[number][RATE] for number in rates})
            return OtherValues(of_rates)
        now, then = self.values.schedule, saved.schedule
        keys = [key for key in now if key in then and _differs(now[key], then[key])]
        of_keys = tuple(f"{key} of {class_of(scheduler)}: {_arrow(then[key], now[key])}" for key in keys)
        if isinstance(scheduler, Schedule):
            if rates or keys:
                scheduler.go_on_with({number: new for number, (_, new) in rates.items()})
            return OtherValues((*of_rates, *of_keys))
        if keys and take_keys(scheduler, decode(self._schedule, self._beside), keys, rates):
            return OtherValues((*of_rates, *of_keys))
        if scale_rates(scheduler, rates):
            return OtherValues(of_rates, of_keys)
        return OtherValues((), (*of_rates, *of_keys))

    def _named(self, key: str, changed: Changed) -> tuple[str, ...]:
        """By group, unless all have changed alike."""
        arrows = [_arrow(*pair) for pair in changed.values()]
        if len(arrows) == self._of and len(set(arrows)) == 1:
            return (f"{key}: {arrows[0]}",)
        named = [f"{key} of group {self._numbers[own]}: {arrow}" for own, arrow in zip(changed, arrows, strict=True)]
        more = [f"{key} of {len(named) - MOST_NAMED} more groups"] if len(named) > MOST_NAMED else []
        return (*named[:MOST_NAMED], *more)


def _given(group: Group, moved: Collection[str], scheduler: LRScheduler | None) -> dict[str, Any]:
    """Without what steps of the optimizer move, or the scheduler."""
    momenta = momenta_of(scheduler)
    values = {key: value for key, value in group.items() if key not in moved}
    if scheduler is not None:
        if RATE in values:
            values[RATE] = group.get(BASE, group[RATE])
        values = {key: value for key, value in values.items() if key not in (*OF_SCHEDULES, *momenta)}
    if "betas" in momenta and "betas" in group:
        values["betas"] = (None, *group["betas"][1:])
    return values


def _set(optimizer: Optimizer, key: str, values: Mapping[int, Any]) -> None:
    """By group. Where a tuple has None, a schedule moves the value, and it stays."""
    for number, new in values.items():
        group = optimizer.param_groups[number]
        current = group.get(key)
        if isinstance(new, tuple) and isinstance(current, list | tuple) and len(new) == len(current):
            new = tuple(was if one is None else one for one, was in zip(new, current, strict=True))
        group[key] = in_place_of(current, new)


def _changes(now: Sequence[Group], then: Sequence[Group]) -> dict[str, dict[int, tuple[Any, Any]]]:
    """By key that both have, and group: the old and the new value."""
    changes: dict[str, dict[int, tuple[Any, Any]]] = {}
    for number, (here, there) in enumerate(zip(now, then, strict=True)):
        for key in here:
            if key in there and _differs(here[key], there[key]):
                changes.setdefault(key, {})[number] = there[key], here[key]
    return changes


def _differs(one: Any, other: Any) -> bool:
    """0 and 0.0 do not, nor do two that are no numbers."""
    are_numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return repr(one) != repr(other) and not (are_numbers and one == other)


def _arrow(old: Any, new: Any) -> str:
    return f"{_short([old])} → {_short([new])}"


def _short(values: Sequence[Any]) -> str:
    """One where all are the same; a long text by its beginning and a digest."""
    alike = all(repr(value) == repr(values[0]) for value in values)
    text = json.dumps(values[0] if alike else list(values), default=repr)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters, SHA-256 {digest}…)"
