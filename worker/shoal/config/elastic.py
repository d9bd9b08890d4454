"""The sizes of a batch that DeepSpeed's section `elasticity` determines, and of how many workers it knows.

Called by `load.py` in the place of `training.py`, where the section is on. The arithmetic is
`shoal_protos.elastic_batch`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shoal_protos.elastic_batch import ElasticBatch, ElasticLanes, batch_and_lanes
from shoal_protos.errors import UserError
from shoal_protos.text import plural

from shoal.config.document import Document
from shoal.config.training import ACCUMULATION, BATCH, LANES, MICRO, PER_LANE, Sizes

WANTED = "SHOAL_WANTED_WORKERS"
"""The variable by which a launcher tells workers for how many of them the job was submitted."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """What the section comes to."""

    found: ElasticBatch
    lanes: ElasticLanes
    workers: int | None
    """The number that version 0.2 has looked at."""
    least: int
    """Fewest workers that the section is for."""
    most: int
    """Most workers."""

    @property
    def sizes(self) -> Sizes:
        lanes = self.lanes
        return Sizes(self.found.batch, lanes.micro_batch, lanes.lanes, lanes.micro_batches_per_lane)


def elastic_of(document: Document, environment: Mapping[str, str] = os.environ) -> Elastic | None:
    """None where the section is off. Raises `UserError`."""
    section = document.elasticity
    if section is None:
        return None
    if section.model_parallel_size > 1:
        raise UserError(
            f"`elasticity.model_parallel_size` is {section.model_parallel_size}, which is not supported: every lane "
            "runs the whole model."
        )
    if not section.ignore_non_elastic_batch_info:
        _refuse_batch_keys(document)
    submitted = _workers_at_submission(environment, is_needed=section.version == "0.2")
    if submitted is not None and not section.min_gpus <= submitted <= section.max_gpus:
        raise UserError(
            f"the job was submitted with {plural(submitted, 'worker')}, and `elasticity.min_gpus` is "
            f"{section.min_gpus}, `elasticity.max_gpus` {section.max_gpus}; submit it with a number "
            "between them, or change the section."
        )
    workers = (submitted or 1) if section.version == "0.2" else None
    found, lanes = batch_and_lanes(section, document.zero_optimization.stage, workers)
    _compare(document, lanes)
    return Elastic(found, lanes, workers, section.min_gpus, min(section.max_gpus, lanes.lanes))


def _refuse_batch_keys(document: Document) -> None:
    given = [f"`{key}`" for key in (BATCH, MICRO, ACCUMULATION) if getattr(document, key) not in (None, "auto")]
    if given:
        raise UserError(
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} given beside `elasticity`, which determines "
            "the batch; leave out the one or the other, or set `elasticity.ignore_non_elastic_batch_info`."
        )


def _compare(document: Document, found: ElasticLanes) -> None:
    shoal = document.shoal
    both = {LANES: (shoal.lanes, found.lanes), PER_LANE: (shoal.micro_batches_per_lane, found.micro_batches_per_lane)}
    for key, (given, meant) in both.items():
        if given is not None and given != meant:
            raise UserError(f"`{key}` is {given}, and `elasticity` makes it {meant}; leave it out.")


def _workers_at_submission(environment: Mapping[str, str], is_needed: bool) -> int | None:
    """None for a script that trains alone, and where no number is needed nor told. Raises `UserError`."""
    given = environment.get(WANTED, "")
    if given.isascii() and given.isdecimal() and int(given) > 0:
        return int(given)
    if given or (is_needed and environment.get("SHOAL_CONTROLLER")):
        raise UserError(
            f"`elasticity.version` 0.2 makes the batch for the number of workers that the job was submitted with, and "
            f"{WANTED} is {given or 'not set'}; set it to the job's `workers.wanted` on every worker that no launcher "
            "starts, or take version 0.1, which needs no number."
        )
    return None
