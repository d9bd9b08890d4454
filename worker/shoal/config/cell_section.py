"""The shape of a job's cells, from its config: what it is, and what it does not work with yet.

Called by `load.py` and `training.py`. DeepSpeed's names of the sizes have become those of the section `shoal.cell` by
then (`shoal_protos.old_config_keys`). Where a cell is one process nothing here changes anything. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal_protos.shape import Shape, broken_shape

from shoal.config.document import Cell, Document


def shape_in(section: Cell) -> Shape:
    """What a checked section says."""
    return Shape(**section.model_dump())


def impossible(shape: Shape) -> Iterator[str]:
    """Why there are no such cells."""
    if why := broken_shape(shape):
        yield f"`shoal.cell` is no shape: {why}."


def cell_faults(document: Document) -> Iterator[str]:
    """What cells of several processes cannot be, or do not work with yet."""
    shape = shape_in(document.shoal.cell)
    yield from impossible(shape)
    if shape.expert > 1 and document.elasticity is not None:
        yield f"`elasticity` determines no batch yet of cells that divide samples ({shape}); give the batch's sizes."
