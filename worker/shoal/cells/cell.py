"""What a script knows of its cell: its place, and the groups and meshes that its layers communicate over.

All of it is constant for the life of a process, so that scripts, modules and compiled graphs may keep it. Made by
`shoal.cell` (session/cell_opening.py), which also takes the seat; nothing here asks a controller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from shoal_protos.errors import UserError
from shoal_protos.shape import DIMENSIONS, Shape
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.cells.hub import CellHub, set_hub
from shoal.cells.process_group import init
from shoal.cells.stages import Stages, built_stages
from shoal.data.seeds import RandomState, seed_from


class Cell:
    """The processes that train a lane together, as one of them sees it."""

    def __init__(self, shape: Shape, coordinate: int) -> None:
        """Of several processes: makes the cell the default group of `torch.distributed`. Raises `UserError` where the
        script has made one.
        """
        self._shape, self._coordinate = shape, coordinate
        self._index = shape.index(coordinate)
        if shape.processes > 1:
            hub = CellHub(shape, coordinate)
            _init(hub)
            set_hub(hub)
            places = {"RANK": coordinate, "LOCAL_RANK": coordinate, "WORLD_SIZE": shape.processes}
            os.environ.update({name: str(number) for name, number in places.items()})

    @property
    def shape(self) -> Shape:
        """Its processes by dimension."""
        return self._shape

    @property
    def coordinate(self) -> int:
        """This process's place: its rank in `torch.distributed`."""
        return self._coordinate

    def index(self, dimension: str) -> int:
        """This process's place in a dimension."""
        return self._index[_known(dimension)]

    def size(self, dimension: str) -> int:
        """How many places a dimension has."""
        return int(getattr(self._shape, _known(dimension)))

    @property
    def is_first_stage(self) -> bool:
        """Whether this process has the first stage of the pipeline."""
        return self.index("pipeline") == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process has the last stage of the pipeline, which makes the loss."""
        return self.index("pipeline") == self.size("pipeline") - 1

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All dimensions, those of one place too: `mesh["tensor"]` is for `parallelize_module`."""
        if self._shape.processes == 1:
            _init(CellHub(self._shape, 0))
        sizes = tuple(self.size(dimension) for dimension in DIMENSIONS)
        return init_device_mesh("cpu", sizes, mesh_dim_names=DIMENSIONS)

    def group(self, dimension: str) -> Any:
        """The process group of a dimension: those who differ from this process in it alone."""
        return self.mesh.get_group(_known(dimension))

    def stages(self, build: Callable[[int], nn.Module], count: int | None = None) -> Stages:
        """The stages of a pipeline's model that this process has: a `ModuleDict` by their numbers, for
        `shoal.initialize`.

        `build`: makes stage `number`; called for all of them, for others' stages under `torch.device("meta")`.
        `count`: of all stages, a multiple of the pipeline's places, for an interleaved schedule; by default one each.
        Raises `UserError`.
        """
        places = self.size("pipeline")
        return built_stages(build, places if count is None else count, self.index("pipeline"), places)

    @contextmanager
    def sharded_random(self, dimension: str = "tensor") -> Iterator[None]:
        """Within it random numbers differ between the places of a dimension, as those for shards must; without it they
        are the same on the whole cell.

        They go by one number that is drawn outside, which is how activation checkpointing repeats them.
        """
        place = f"{dimension} {self.index(dimension)}"
        number = int(torch.randint(1 << 62, ()))
        outside = RandomState.save()
        seed_from(f"{number} {place}")
        try:
            yield
        finally:
            outside.restore()


def _init(hub: CellHub) -> None:
    if dist.is_initialized():
        raise UserError(
            "torch.distributed was initialized by the script, and shoal.cell makes the cell its default group; leave "
            "init_process_group out, and call shoal.cell before anything that calls it."
        )
    init(hub)


def _known(dimension: str) -> str:
    if dimension not in DIMENSIONS:
        raise UserError(f"{dimension!r:.60} is no dimension of a cell; expected one of {', '.join(DIMENSIONS)}.")
    return dimension
