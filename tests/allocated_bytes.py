"""The most bytes that torch's CPU allocator had given out at any time while something ran, beyond those before it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def most_bytes(act: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    found = sorted((one.start_ns(), one.nbytes()) for one in results.events() if one.name() == "[memory]")
    return max(accumulate(size for _, size in found), default=0)
