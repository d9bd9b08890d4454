"""What a plan is asked for: two questions with the same goal get the same world, but for how far fills have come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal_protos.plan import WorkerId


class Traits(NamedTuple):
    """What a plan depends on in one worker, but for the blocks that it holds."""

    worker: WorkerId
    leaving: bool
    can_train: bool


@dataclass(frozen=True, slots=True)
class Goal:
    """What a plan is asked for. How far fills have come is not in it: they come to an end by themselves."""

    pool: tuple[Traits, ...]
    """Members, then joiners."""
    steps: bool
    promote: bool
    """Fills are done, so that their targets can be promoted."""
