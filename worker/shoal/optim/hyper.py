"""Hyper-parameters: what the optimizer's groups hold beside parameters.

Read each step, hashed into the vote, sent to joiners (a scheduler's state alone would not set them), written into
checkpoints. They are plain values: numbers, truth values, strings, None, and tuples of them, so they survive JSON bit
by bit.

Optimizer and scheduler stay the place where they are read and set, but from `shoal.initialize` on the engine calls both
(`take_over`): calls that would change parameters beside the blocks, move the schedule once per lane, or read and write
state that lies in the blocks of all workers are refused, each with one sentence.

Groups can be stepped in turn, as the networks of a GAN or of an actor and its critic are: `engine.turn` sets it at the
top of the loop's body. Whose turn it is stands in the groups, so the vote compares it, and joiners, members without
lanes and checkpoints take it over like rates and decays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any, NoReturn

import torch
from shoal_protos.errors import UserError
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.optim.several import members_of, names_by_group, schedulers_of

Group = Mapping[str, Any]
DIGEST_BYTES = 16
PLAIN = frozenset({type(None), bool, int, float, str})
"""Most values are of these types, and read at each step."""
LEAST_RATE = 1e-3
"""In a trial."""


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """One mapping a group, in the groups' order, keys sorted; tensors of one element as Python numbers."""
    return [_plain_group(number, group) for number, group in enumerate(optimizer.param_groups)]


def is_plain_tuple(value: Any) -> bool:
    """As betas are."""
    return type(value) is tuple and PLAIN.issuperset(map(type, value))


def _plain_group(number: int, group: Group) -> dict[str, Any]:
    return {
        key: value
        if type(value) in PLAIN or is_plain_tuple(value)
        else plain_value(value, f"{key} of optimizer group {number}")
        for key, value in sorted(group.items())
        if key != "params"
    }


def plain_value(value: Any, where: str) -> Any:
    """The value as it travels. Raises `UserError` for one that is none of these. `where`: what it is called."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(plain_value(item, where) for item in value)
    raise UserError(f"{where} is {type(value).__name__}; hyper-parameters must be numbers, strings or tuples of them.")


def digest(hyper: Sequence[Group]) -> bytes:
    """16 bytes that are equal exactly where all values are equal in type and bits."""
    text = json.dumps(list(hyper), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"shoal.hyper").digest()


def are_untouched(mine: Sequence[Group], before: Sequence[Group]) -> bool:
    """Whether these surely are the values of before, because they are the same objects: as at most steps."""
    return len(mine) == len(before) and all(
        list(now) == list(then) and all(map(is_, now.values(), then.values()))
        for now, then in zip(mine, before, strict=True)
    )


def first_difference(mine: Sequence[Group], others: Sequence[Group]) -> str:
    """The first value that differs, naming group and key; empty where none does."""
    if are_untouched(mine, others) or repr(mine) == repr(others):
        return ""
    for number, (here, there) in enumerate(zip(mine, others, strict=False)):
        for key in sorted(here.keys() | there.keys()):
            found, expected = (json.dumps(group[key]) if key in group else "not set" for group in (here, there))
            if found != expected:
                return f"{key} of optimizer group {number} is {found} here and {expected} there"
    if len(mine) != len(others):
        return f"the optimizer has {len(mine)} groups here and {len(others)} there"
    return ""


def load_into(optimizer: Optimizer, hyper: Sequence[Group]) -> None:
    """Set the groups' values. One that is a tensor (`capturable`) stays that tensor and is overwritten; a list stays
    one, for an optimizer may write into it.
    """
    if len(hyper) != len(optimizer.param_groups):
        raise UserError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the job's has {len(hyper)}. "
            "Start it with the job's script and config."
        )
    for group, values in zip(optimizer.param_groups, hyper, strict=True):
        for key, value in values.items():
            group[key] = in_place_of(group.get(key), value)


def in_place_of(old: Any, value: Any) -> Any:
    """What stands in a group where `old` stood, so that it has the value: see `load_into`."""
    if isinstance(old, Tensor):
        with torch.no_grad():
            return old.fill_(value)
    if isinstance(value, list | tuple):
        before = old if isinstance(old, list | tuple) and len(old) == len(value) else [None] * len(value)
        kind = list if isinstance(old, list) else tuple
        return kind(in_place_of(was, item) for was, item in zip(before, value, strict=True))
    return value


STEP = "the engine calls the optimizer; remove optimizer.step() from the loop and call engine.step()."
ADD_GROUP = (
    "optimizer.add_param_group was called after shoal.initialize; give the optimizer all its parameters before, "
    "the layout is fixed from then on."
)
HOOK_ADVICE = (
    "it would never be called, because the engine steps blocks of the optimizer. Put its work in the loop after "
    "engine.step(), or in a callback (engine.on_step)."
)
HOOK = f"a step hook was registered on the optimizer after shoal.initialize; {HOOK_ADVICE}"
STATE_DICT = (
    "the optimizer's state lies in blocks on all workers, not in this object. Save with engine.save_checkpoint() and "
    "`shoal.checkpoint.path`; any number of workers can resume from that."
)
LOAD_STATE_DICT = (
    "optimizer.load_state_dict was called in the loop, where the optimizer's state lies in blocks on all workers. "
    "Call it before shoal.initialize, or resume by `shoal.checkpoint.resume`."
)
SCHEDULE = (
    "the engine calls the scheduler once per optimizer step; remove scheduler.step() from the loop, where it would run "
    "once per micro-batch."
)


def take_over(optimizer: Optimizer, scheduler: LRScheduler | None, in_loop: Callable[[], bool]) -> None:
    """Called once by `shoal.initialize`. `in_loop`: whether state lies in blocks already."""
    for one in dict.fromkeys((optimizer, *members_of(optimizer))):
        _take_over_optimizer(one, in_loop)
    for each in schedulers_of(scheduler):
        _take_over_scheduler(each)


def _take_over_optimizer(optimizer: Optimizer, in_loop: Callable[[], bool]) -> None:
    step = _refusing(STEP)
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.add_param_group = _refusing(ADD_GROUP)  # type: ignore[method-assign]
    optimizer.register_step_pre_hook = _refusing(HOOK)  # type: ignore[method-assign]
    optimizer.register_step_post_hook = _refusing(HOOK)  # type: ignore[method-assign]
    optimizer.state_dict = _refusing(STATE_DICT)  # type: ignore[method-assign]
    load = optimizer.load_state_dict

    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        if in_loop():
            raise UserError(LOAD_STATE_DICT)
        load(*args, **kwargs)

    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _take_over_scheduler(scheduler: LRScheduler) -> None:
    if not isinstance(scheduler, _Taken):
        kind = type(scheduler)
        # not on the object: a scheduler's attributes are its state_dict
        scheduler.__class__ = type(kind.__name__, (_Taken, kind), {"__module__": kind.__module__})


def _refusing(sentence: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise UserError(sentence)

    return refuse


class _Taken:
    """Stands before a scheduler's own class."""

    def step(self, *_: object, **__: object) -> NoReturn:
        raise UserError(SCHEDULE)


def advance(scheduler: LRScheduler, loss: float | None) -> None:
    """One step of the schedule, by the engine. `loss`: of the step, for schedulers that look at it."""
    for one in schedulers_of(scheduler):
        _advance(one, loss)


def _advance(scheduler: LRScheduler, loss: float | None) -> None:
    own: Any = super(_Taken, scheduler) if isinstance(scheduler, _Taken) else scheduler
    if isinstance(scheduler, ReduceLROnPlateau):
        own.step(loss if loss is not None else 0.0)
    else:
        own.step()


def rated(group: Group) -> dict[str, Any]:
    """The group for a trial, with a rate: where a schedule begins with one of 0 no step would show anything."""
    rate = group.get("lr")
    if not isinstance(rate, int | float | Tensor) or float(rate) >= LEAST_RATE:
        return {**group}
    return {**group, "lr": torch.full_like(rate, LEAST_RATE) if isinstance(rate, Tensor) else LEAST_RATE}


TURN = "turn"
"""A key of an optimizer's group: whether the next update is one of it."""


def has_turn(group: Mapping[str, Any]) -> bool:
    """Whether the next update is one of this group."""
    return bool(group.get(TURN, True))


def without_turn(optimizer: Optimizer) -> list[str]:
    """Names of the groups that the next update leaves as they are; numbers of those that have none."""
    groups = enumerate(zip(optimizer.param_groups, names_by_group(optimizer), strict=True))
    return [", ".join(sorted(names)) or f"group {number}" for number, (group, names) in groups if not has_turn(group)]


def set_turn(optimizer: Optimizer, names: Collection[str]) -> None:
    """From now on only these groups are updated, each by its name or its optimizer's. Raises `UserError` for names that
    neither has.
    """
    by_group = names_by_group(optimizer)
    known = [name for own in by_group for name in sorted(own)]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        have = ", ".join(dict.fromkeys(known)) or 'none (give each a "name" beside its "params")'
        raise UserError(
            f"engine.turn got {', '.join(map(repr, unknown)) or 'no name'}; expected names of the optimizer's groups: "
            f"{have}."
        )
    for group, own in zip(optimizer.param_groups, by_group, strict=True):
        group[TURN] = not own.isdisjoint(names)
