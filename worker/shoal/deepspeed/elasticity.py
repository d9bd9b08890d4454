"""`deepspeed.elasticity`: the batch that the section of this name means, with DeepSpeed's signature and errors.

For scripts that ask before they start a job. A job's own batch follows from the same arithmetic (config/training.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from shoal_protos.elastic_batch import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    ElasticityUnknownVersion,
    elastic_batch,
    micro_batch_of,
)
from shoal_protos.elastic_section import VERSIONS, Elasticity
from shoal_protos.text import shown
from shoal_protos.validation import all_of, sentence

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
]


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,  # noqa: ARG001
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """Returns the batch and the counts of workers that divide it; for a world, or where it is asked for, also its
    micro-batch. `world_size` 0: that of the environment (`WORLD_SIZE`), where one is needed.

    Raises `ElasticityError`.
    """
    section = _section_of(ds_config)
    world = world_size or _world_of_environment()
    if not world and (section.version == "0.2" or return_microbatch):
        raise ElasticityConfigError(
            f"elasticity {section.version} needs the number of workers; give world_size, or set WORLD_SIZE in the "
            "environment"
        )
    found = elastic_batch(section, world)
    counts = list(found.counts)
    if world_size > 0 or (return_microbatch and section.version == "0.1"):
        if world not in counts:
            raise ElasticityIncompatibleWorldSize(f"{world} workers do not divide the batch {found.batch}; {counts} do")
        return found.batch, counts, micro_batch_of(found, world, section.micro_batch_sizes)
    return (found.batch, counts, found.micro_batch) if return_microbatch else (found.batch, counts)


def _section_of(config: Mapping[str, Any]) -> Elasticity:
    """Raises `ElasticityError`."""
    given = config.get("elasticity") if isinstance(config, Mapping) else None
    if not isinstance(given, Mapping):
        raise ElasticityConfigError(f"ds_config has no section elasticity; it is {shown(config)}")
    if not given.get("enabled", False):
        raise ElasticityConfigError("the section elasticity is off; set its `enabled` to true")
    version = given.get("version", "0.2")
    if str(version) not in VERSIONS.values():
        raise ElasticityUnknownVersion(f"`elasticity.version` is {shown(version)}; expected 0.1 or 0.2")
    known = {key: value for key, value in given.items() if key in Elasticity.model_fields}
    try:
        section = Elasticity.model_validate(known)
    except ValidationError as error:
        faults = [sentence(fault, "ds_config", Elasticity, "elasticity") for fault in error.errors()]
        raise ElasticityConfigError(all_of(faults, "ds_config")) from None
    if not all(isinstance(micro, int) for micro in known["micro_batch_sizes"]):
        raise ElasticityConfigError(
            f"`elasticity.micro_batch_sizes` is {shown(known['micro_batch_sizes'])}; expected a list of integers"
        )
    if section.model_parallel_size > 1 and section.version == "0.1":
        raise ElasticityConfigError(
            f"`elasticity.model_parallel_size` is {section.model_parallel_size}; version 0.1 knows none"
        )
    return section


def _world_of_environment() -> int:
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isascii() and given.isdecimal() else 0
