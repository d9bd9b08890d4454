"""Batch arithmetic: train_batch_size = micro-batch × lanes × micro-batches per lane. Pure.

Any three give the fourth, and two of the first three the third where a lane has one micro-batch. A batch without a
micro-batch and without lanes, as DeepSpeed's own documents write it, is divided into as many lanes as fit, from the
file alone: so they are the same alone and on any number of workers. `load.py` calls it once; every contradiction gets
its figures in one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import MOST_LANES

BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
LANES = "shoal.lanes"
PER_LANE = "shoal.micro_batches_per_lane"
ACCUMULATION = "gradient_accumulation_steps"
LANES_UNSAID = 8
"""At most so many lanes has a job of which only the batch is given."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the file says, and after `settle` what holds. None: not said, or "auto"."""

    train_batch_size: int | None
    micro_batch_size: int | None
    lanes: int | None
    micro_batches_per_lane: int | None


def per_lane(micro_batches_per_lane: int | None, accumulation: int | None) -> int | None:
    """DeepSpeed's gradient_accumulation_steps is another name for a lane's micro-batches."""
    if micro_batches_per_lane and accumulation and micro_batches_per_lane != accumulation:
        raise UserError(
            f"`{PER_LANE}` is {micro_batches_per_lane} and `{ACCUMULATION}` is {accumulation}; both say how many "
            "micro-batches a lane accumulates. Give one of them."
        )
    return micro_batches_per_lane or accumulation


def settle(given: Sizes) -> Sizes:
    """All four, or the sentence that says why they do not fit together."""
    batch, micro, lanes, accumulated = (
        given.train_batch_size,
        given.micro_batch_size,
        given.lanes,
        given.micro_batches_per_lane or 1,
    )
    if batch is None:
        if micro is None or lanes is None:
            raise UserError(_too_few(given))
        return Sizes(micro * lanes * accumulated, micro, lanes, accumulated)
    if micro is None and lanes is None:
        parts = _divide(batch, accumulated, "micro-batches", f"{PER_LANE} {accumulated}")
        lanes = next(lanes for lanes in range(LANES_UNSAID, 0, -1) if parts % lanes == 0)
    if lanes is None:
        assert micro is not None
        lanes = _divide(batch, micro * accumulated, "lanes", f"{MICRO} {micro} × {PER_LANE} {accumulated}")
        if lanes > MOST_LANES:
            raise UserError(
                f"`{BATCH}` {batch} and `{MICRO}` {micro} make {lanes} lanes; at most {MOST_LANES} are allowed. "
                f"Raise `{MICRO}` or `{PER_LANE}`."
            )
    if micro is not None and given.micro_batches_per_lane is None and batch % (micro * lanes) == 0:
        accumulated = batch // (micro * lanes)
    if micro is None:
        micro = _divide(batch, lanes * accumulated, "micro-batches", f"{LANES} {lanes} × {PER_LANE} {accumulated}")
    if batch != micro * lanes * accumulated:
        raise UserError(_contradiction(Sizes(batch, micro, lanes, accumulated)))
    return Sizes(batch, micro, lanes, accumulated)


def _too_few(given: Sizes) -> str:
    names = {BATCH: given.train_batch_size, MICRO: given.micro_batch_size, LANES: given.lanes}
    known = [f"`{name}` {value}" for name, value in names.items() if value is not None]
    return (
        f"two of `{BATCH}`, `{MICRO}` and `{LANES}` are needed to derive the third; "
        f"{'only ' + known[0] if known else 'none of them'} is given."
    )


def _divide(batch: int, by: int, parts: str, shown: str) -> int:
    if batch % by:
        raise UserError(
            f"`{BATCH}` {batch} does not divide into {parts}: {shown} is {by}, and {batch} / {by} is not whole."
        )
    return batch // by


def _contradiction(sizes: Sizes) -> str:
    batch, micro, lanes, accumulated = (
        sizes.train_batch_size, sizes.micro_batch_size, sizes.lanes, sizes.micro_batches_per_lane,
    )  # fmt: skip
    assert batch and micro and lanes and accumulated
    product = micro * lanes * accumulated
    sentence = (
        f"`{BATCH}` is {batch}, but `{MICRO}` {micro} × `{LANES}` {lanes} × `{PER_LANE}` {accumulated} is {product}."
    )
    return f"{sentence} Leave one of them out."
