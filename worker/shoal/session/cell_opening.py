"""`shoal.cell`: a script's cell before its model is built: its shape from arguments or the config, its seat from the
controller.

Called by scripts, once; a further call gives the same cell. Sizes are checked where the config's are. Where a cell is
one process no controller is asked, and `torch.distributed` stays as it is until a mesh or group is wanted: libraries
that find it initialized take the process for one of a distributed job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal_protos.errors import UserError
from shoal_protos.shape import DIMENSIONS, ONE, Shape

from shoal.cells.cell import Cell
from shoal.config.load import shape_of
from shoal.session.error_hook import tell_errors_in_a_sentence
from shoal.session.seat import take_seat

ALIASES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "sequence_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}
"""Megatron's and DeepSpeed's names of dimensions."""

_opened: list[Cell] = []
"""That of this process, once it has one."""


def cell(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    tensor: int | None = None,
    pipeline: int | None = None,
    context: int | None = None,
    expert: int | None = None,
    tight: Sequence[str] | None = None,
    **sizes: int,
) -> Cell:
    """This process's cell. To be called before the model is built: its place decides which part of it is built here.

    `config`: as for `shoal.initialize`, whose section `shoal.cell` says the shape. `tensor`, `pipeline`, `context`,
    `expert`: processes of a cell in each dimension. `tight`: dimensions within which they are on one host. `sizes`: the
    dimensions by Megatron's names. Raises `UserError`.
    """
    tell_errors_in_a_sentence()
    named = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert, "tight": tight}
    shape = _shape(config, {name: value for name, value in named.items() if value is not None}, sizes)
    seat = take_seat(shape)
    if not _opened:
        _opened.append(Cell(shape, seat.coordinate))
    return _opened[0]


def opened_cell() -> Cell | None:
    """This process's cell, where its script has opened it."""
    return _opened[0] if _opened else None


def _shape(config: str | Path | Mapping[str, Any] | None, named: dict[str, Any], sizes: Mapping[str, Any]) -> Shape:
    """What arguments and config say alike. Raises `UserError`."""
    for alias, size in sizes.items():
        if alias not in ALIASES:
            raise UserError(
                f"shoal.cell has no argument {alias!r:.60}; expected {', '.join((*DIMENSIONS, 'tight', *ALIASES))}."
            )
        dimension = ALIASES[alias]
        _agree(f"`{dimension}`", named.setdefault(dimension, size), f"`{alias}`", size)
    given = shape_of({"shoal": {"cell": named}}) if named else ONE
    if config is None:
        return given
    shape = shape_of(config)
    for name in named:
        _agree(
            f"the argument `{name}`", getattr(given, name), f"the config's `shoal.cell.{name}`", getattr(shape, name)
        )
    return shape


def _agree(first: str, one: object, second: str, other: object) -> None:
    if one != other:
        raise UserError(f"shoal.cell is told two shapes: {first} is {one}, and {second} is {other}; leave one out.")
