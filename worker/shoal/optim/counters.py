"""Whether an optimizer only counts steps in the numbers that it keeps of a parameter: asked of the optimizer itself.

A parameter that has missed steps then has the others' numbers less these. NAdam's product of momenta, or ASGD's
averaging rate, is no such number. Called once, when training state is made.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.optim import Optimizer

from shoal.core.layout import Layout
from shoal.optim.twin import carried, probing_twin_of, without_hooks_on_all

STEPS = 3
"""ASGD averages from its second step on."""


def only_counts_steps(optimizer: Optimizer, layout: Layout) -> bool:
    """Whether each of those numbers grows by one with every step; also where there are none."""
    twin = probing_twin_of(optimizer)
    kinds = {(bucket.group, bucket.wide_dtype) for bucket in layout.buckets if not bucket.is_frozen}
    probed = [(group, torch.zeros(2, dtype=dtype, device=layout.device)) for group, dtype in sorted(kinds, key=str)]
    for group, one in probed:
        twin.param_groups[group]["params"].append(one)
    seen: list[list[float]] = []
    try:
        with without_hooks_on_all():
            for _ in range(STEPS):
                for _, one in probed:
                    one.grad = torch.ones_like(one)
                twin.step()
                states = [carried(twin.state[one]) for _, one in probed]
                seen.append([float(value) for state in states for value in state.values() if not value.dim()])
    except Exception:  # one that could not be tried, and was taken at the script's word
        return False
    return all(now == [number + 1 for number in before] for before, now in pairwise(seen))
