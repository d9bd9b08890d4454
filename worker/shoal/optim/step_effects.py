"""What an optimizer's steps do beside training: asked of itself, once, for all who act on it.

Made by the held blocks, when training state is made; they, the optimizer's steps and what a run is given go by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.optim import Optimizer

from shoal.core.layout import Layout
from shoal.optim.twin import (
    carried,
    changed_values,
    numbers_in,
    own,
    probing_twin_of,
    with_no_empty_group,
    without_hooks_on_all,
)

STEPS = 3
"""ASGD averages from its second step on."""

Kind = tuple[int, torch.dtype]
"""The group of a parameter, and what its optimizer computes in."""


@dataclass(frozen=True, slots=True)
class StepEffects:
    """Nothing: of an optimizer that could not be tried, and was taken at the script's word."""

    moved: frozenset[str] = frozenset()
    """Keys of groups whose values a step changes."""
    numbers: Mapping[Kind, Mapping[str, type]] = field(default_factory=dict)
    """Keys of numbers in the state that are no tensors, with their types after the first step."""
    only_counts: bool = False
    """Whether each number that is kept of a parameter, tensors without dimensions too, grows by one with every step;
    also where there are none. A parameter that has missed steps then has the others' numbers less these. NAdam's
    product of momenta, or ASGD's averaging rate, is no such number.
    """


def effects_of_steps(optimizer: Optimizer, layout: Layout) -> StepEffects:
    """Seen in steps of a twin on two elements of each kind."""
    twin = probing_twin_of(optimizer)
    kinds = {(bucket.group, bucket.wide_dtype) for bucket in layout.buckets if not bucket.is_frozen}
    probed = {kind: torch.zeros(2, dtype=kind[1], device=layout.device) for kind in sorted(kinds, key=str)}
    for (group, _), one in probed.items():
        twin.param_groups[group]["params"].append(one)
    first = [own(group) for group in twin.param_groups]
    numbers, seen = list[dict[Kind, dict[str, type]]](), list[list[float]]()
    try:
        with without_hooks_on_all(), with_no_empty_group(twin):
            for _ in range(STEPS):
                for one in probed.values():
                    one.grad = torch.ones_like(one)
                twin.step()
                numbers.append({kind: numbers_in(twin.state[one]) for kind, one in probed.items()})
                states = [carried(twin.state[one]) for one in probed.values()]
                seen.append([float(value) for state in states for value in state.values() if not value.dim()])
    except Exception:  # of the script's class, which may raise anything
        return StepEffects()
    groups = enumerate(zip(twin.param_groups, first, strict=True))
    moved = frozenset(key for number, (now, then) in groups for key in changed_values(now, then, number))
    counts = all(now == [number + 1 for number in before] for before, now in pairwise(seen))
    return StepEffects(moved, numbers[0], counts)
