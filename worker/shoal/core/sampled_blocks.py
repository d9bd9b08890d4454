"""Which blocks' copies are compared beside a step. Pure: all members come to the same answer."""

from __future__ import annotations

from shoal_protos.runs import Runs


def sampled(step: int, blocks: int, every_steps: int) -> Runs:
    """Every block once in any `every_steps` steps that follow each other, at even distances: so the work of a step is
    spread over the owners, however long their runs of blocks are.
    """
    return Runs.of(range(step % every_steps, blocks, every_steps))
