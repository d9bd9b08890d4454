"""Which checkpoints a run's training goes back to, and which ones were given up when it went back to an older one.

The manifest keeps it, so that a folder tells it without any controller. Several runs may share a folder: what is of
none of a run's lineage is not its to count or to delete.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.layout_entry import Count, Entry, RunName

MOST_BRANCHES = 64
"""How far back it is remembered: retention has long deleted what is older, but for every n-th."""


class Branch(Entry):
    """Training went on from a checkpoint: what was saved after it and before the generation `began` was given up."""

    run: RunName
    """Run of the checkpoint."""
    generation: Count
    step: Count
    began: Count
    """The first generation that went on from it."""


Lineage = tuple[Branch, ...]
"""Newest first."""


def gone_on(run: str, generation: int, step: int, before: Lineage, began: int) -> Lineage:
    """The lineage of a world that goes on from a checkpoint whose own lineage is `before`."""
    return (Branch(run=run, generation=generation, step=step, began=began), *before)[:MOST_BRANCHES]


def is_given_up(generation: int, step: int, lineage: Sequence[Branch]) -> bool:
    """Whether training went back behind this save and on without it."""
    return any((b.generation, b.step) < (generation, step) and generation < b.began for b in lineage)
