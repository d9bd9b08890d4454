"""Hyper-parameters: what the optimizer's groups hold beside parameters. Read each step, hashed into the vote, sent to
joiners (a scheduler's state alone would not set them), written into checkpoints.

They are plain values: numbers, truth values, strings, None, and tuples of them, so they survive JSON bit by bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor
from torch.optim import Optimizer

Group = Mapping[str, Any]
DIGEST_BYTES = 16
PLAIN = frozenset({type(None), bool, int, float, str})
"""Most values are of these types, and read at each step."""


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """One mapping a group, in the groups' order, keys sorted; tensors of one element as Python numbers."""
    return [_plain_group(number, group) for number, group in enumerate(optimizer.param_groups)]


def _is_plain_tuple(value: Any) -> bool:
    """As betas are."""
    return type(value) is tuple and PLAIN.issuperset(map(type, value))


def _plain_group(number: int, group: Group) -> dict[str, Any]:
    return {
        key: value
        if type(value) in PLAIN or _is_plain_tuple(value)
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
