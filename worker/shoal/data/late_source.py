"""In place of a dataset that a script gives only when its loop begins: nothing can be read, and no length is known.

Made by the door for DeepSpeed (deepspeed/own_loader.py), which gives the fetcher the real one in time.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shoal_protos.errors import UserError

from shoal.core.stream_position import Bookmark
from shoal.data.source import Place

NONE_YET = "deepspeed.initialize got no training_data, and no loop over a DataLoader has begun"


class NoOrder:
    """Of no samples."""

    samples = 0

    @property
    def steps_per_epoch(self) -> NoReturn:
        raise UserError(f"{NONE_YET}; how long an epoch is follows from its dataset.")

    def last_step(self, max_steps: int | None, epochs: int | None) -> int:
        """Raises `UserError` for epochs of an unknown length."""
        if epochs is not None:
            raise UserError(
                f"`shoal.epochs` is {epochs}, and deepspeed.initialize got no training_data; give it the dataset, or "
                "leave `shoal.epochs` out: the job then ends with the script's own loop over its DataLoader."
            )
        return max_steps or 0


class LateSource:
    """A `Source` that has none."""

    dataset: Any = None
    keeps_lanes = False

    def __init__(self) -> None:
        self.sampler: Any = NoOrder()

    def check(self) -> None:
        raise UserError(f"{NONE_YET}; loop over a DataLoader, or give initialize the dataset.")

    def read(self, place: Place, bookmark: Bookmark | None = None) -> NoReturn:
        raise AssertionError(f"{place} was to be read from {bookmark}, and check comes first")

    def samples(self, place: Place) -> str:
        return f"nothing, for {place}"
