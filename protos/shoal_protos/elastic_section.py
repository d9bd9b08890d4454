"""The section `elasticity` of a training config: DeepSpeed's keys, as models check them. Data; no arithmetic here.

What comes of it is in `elastic_batch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from shoal_protos.config_file import whole
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from shoal_protos.validation import Allowed, raise_all, wrong_value

MOST_BATCH = 10**9
MOST_MICRO_BATCHES = 16
"""Candidates are tried one by one, and their divisors are looked for: these keep that below a second."""
COUNT = "a whole number from 1 to 10^9"
MICRO_BATCHES = f"a list of 1 to {MOST_MICRO_BATCHES} whole numbers from 1 to 10^9"
SWITCH = "true or false"
VERSIONS = {0.1: "0.1", 0.2: "0.2"}


def _as_text(version: object) -> object:
    """DeepSpeed takes numbers and text."""
    return VERSIONS.get(version, version) if isinstance(version, float) else version


Count = Annotated[int, BeforeValidator(whole), Field(ge=1, le=MOST_BATCH)]
Minutes = Annotated[int, BeforeValidator(whole), Field(ge=0)]


class Elasticity(BaseModel):
    """`elasticity`: DeepSpeed's section, where it is on: batch, micro-batch and lanes follow from the largest batch and
    from the micro-batches that fit into memory (deepspeed.md). The batch keys of the top level are left out then."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    enabled: Annotated[Literal[True], Allowed(SWITCH)]
    """Whether it is on; where it is false, or not given, nothing in the section is looked at."""
    max_train_batch_size: Annotated[Count, Allowed(COUNT)]
    """The largest batch."""
    micro_batch_sizes: Annotated[
        Annotated[tuple[Count, ...], Field(strict=False)],
        Allowed(MICRO_BATCHES),
    ]
    """Samples of one forward pass, of which one is chosen."""
    min_gpus: Annotated[Count, Allowed(COUNT)] = 1
    """Fewest workers for which the batch is looked for."""
    max_gpus: Annotated[Count, Allowed(COUNT)] = 10_000
    """Most workers for which it is looked for."""
    version: Annotated[Literal["0.1", "0.2"], BeforeValidator(_as_text), Allowed("0.1 or 0.2")] = "0.2"
    """0.1: the batch follows from the other keys alone. 0.2: it is made for whole nodes, and where the number of
    workers does not divide it, for that number: the one that the job was submitted with (`workers.wanted`), 1 for a
    script that trains alone. It stays for the whole run, as workers come and go."""
    prefer_larger_batch: Annotated[bool, Allowed(SWITCH)] = True
    """Which of two batches is taken that equally many numbers of workers divide."""
    num_gpus_per_node: Annotated[Count, Allowed(COUNT)] = 1
    """Workers that come and go together, for version 0.2. Shoal does not need whole nodes."""
    model_parallel_size: Annotated[Count, Allowed(COUNT)] = 1
    """1, or the number of processes of a cell (`shoal.cell`)."""
    min_time: Annotated[Minutes, Allowed("a whole number of at least 0")] = 0
    """Means nothing here."""
    ignore_non_elastic_batch_info: Annotated[bool, Allowed(SWITCH)] = False
    """True: batch keys of the top level are left alone. False: they are refused beside this section."""

    @model_validator(mode="after")
    def _fits_together(self) -> Elasticity:
        raise_all(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        if not 1 <= len(self.micro_batch_sizes) <= MOST_MICRO_BATCHES:
            yield wrong_value("elasticity.micro_batch_sizes", list(self.micro_batch_sizes), MICRO_BATCHES)
        if self.min_gpus > self.max_gpus:
            yield wrong_value("elasticity.max_gpus", self.max_gpus, f"`elasticity.min_gpus` {self.min_gpus} or more")


def counted_in_cells(section: Elasticity, shape: Shape) -> Elasticity:
    """`elasticity` with cells in the place of workers: a batch is divided among those who train different samples.
    Raises `UserError`.
    """
    processes, parallel = shape.processes, section.model_parallel_size
    if parallel not in (1, processes):
        raise UserError(
            f"`elasticity.model_parallel_size` is {parallel}, and the cells of `shoal.cell` are of "
            f"{shape}; make them agree, or leave it out."
        )
    for key in ("min_gpus", "max_gpus"):
        if key in section.model_fields_set and (count := getattr(section, key)) % processes:
            raise UserError(
                f"`elasticity.{key}` is {count}; expected a multiple of {processes}, the processes of a cell "
                f"(`shoal.cell`: {shape})."
            )
    keys = ("min_gpus", "max_gpus", "num_gpus_per_node")
    counts = {key: max(1, getattr(section, key) // processes) for key in keys}
    return section.model_copy(update={**counts, "model_parallel_size": 1})
