"""Blocks as symbols: what a block's state is after each step, if every update was applied once and in order.

A worker's copy goes through the same function with what it really has; a lost, doubled or foreign update gives another
value for ever. The reference is shared by all seeds of a process.
"""

from __future__ import annotations

PRIME = (1 << 61) - 1
MOST_BLOCKS = 256


def initial(block: int) -> int:
    return block + 1


def updated(value: int, block: int, step: int) -> int:
    """The update of one step."""
    return (value * 1000003 + step * 7919 + block * 104729 + 1) % PRIME


_right: list[list[int]] = [[initial(block) for block in range(MOST_BLOCKS)]]


def right(step: int) -> list[int]:
    """What every block is after `step`."""
    while len(_right) <= step:
        last, number = _right[-1], len(_right)
        _right.append([updated(value, block, number) for block, value in enumerate(last)])
    return _right[step]
