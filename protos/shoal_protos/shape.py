"""The shape of a cell: how many processes train a lane together, and what tells their places apart.

A coordinate is a place in a cell, a number from 0; its index in each dimension follows from the shape. A shape is a
constant of its job. Used by the job's description, the controller's seats and the planner; nothing here knows who has
a coordinate. Pure: standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MOST_PROCESSES = 1024
"""Most processes of a cell."""
DIMENSIONS = ("pipeline", "expert", "context", "tensor")
"""From the slowest to the fastest: coordinates that follow each other differ in the last one."""
_INDEX_NAMES = {"pipeline": "stage"}
"""How people call a place in a dimension, where not by the dimension's own name."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes by dimension; of one process where nothing is said."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    tight: tuple[str, ...] = ()
    """Dimensions within which a cell's processes share a host."""

    @property
    def processes(self) -> int:
        """Of one cell: its coordinates are the numbers below."""
        return self.tensor * self.pipeline * self.context * self.expert

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `DIMENSIONS`."""
        return tuple(getattr(self, dimension) for dimension in DIMENSIONS)

    @property
    def coordinates(self) -> range:
        """All places of a cell."""
        return range(self.processes)

    @property
    def portions(self) -> int:
        """Into how many portions a cell divides what a lane trains: samples among experts, tokens among contexts."""
        return self.context * self.expert

    def most_members(self, lanes: int) -> int:
        """So many processes can train so many lanes at once: every cell trains one at least."""
        return lanes * self.processes

    def index(self, coordinate: int) -> dict[str, int]:
        """The place of a coordinate in every dimension."""
        found: dict[str, int] = {}
        for dimension in reversed(DIMENSIONS):
            coordinate, found[dimension] = divmod(coordinate, getattr(self, dimension))
        return found

    def place(self, coordinate: int) -> dict[str, int]:
        """The same in the dimensions of which there is more than one."""
        return {name: index for name, index in self.index(coordinate).items() if getattr(self, name) > 1}

    def places(self, coordinate: int, dimension: str) -> tuple[int, ...]:
        """The coordinates that differ from this one in a dimension alone, itself among them, in their order."""
        own = {**self.index(coordinate), dimension: 0}
        return tuple(one for one in self.coordinates if {**self.index(one), dimension: 0} == own)

    @property
    def tight_parts(self) -> tuple[tuple[int, ...], ...]:
        """All coordinates, by those that share a host: they differ in tight dimensions only."""
        apart = [dimension for dimension in DIMENSIONS if dimension not in self.tight]
        parts: dict[tuple[int, ...], list[int]] = {}
        for coordinate in self.coordinates:
            index = self.index(coordinate)
            parts.setdefault(tuple(index[name] for name in apart), []).append(coordinate)
        return tuple(map(tuple, parts.values()))

    def alike(self, coordinate: int) -> tuple[int, ...]:
        """The coordinates of a cell that have the same stage and the same tokens as this one: they differ in the
        tensor dimension alone.
        """
        own = self.index(coordinate)
        same = ("pipeline", "expert", "context")
        return tuple(other for other in self.coordinates if all(self.index(other)[one] == own[one] for one in same))

    def named(self, coordinate: int) -> str:
        """A coordinate as people read it: `coordinate 3 (stage 1, tensor 1)`."""
        index = self.index(coordinate)
        sized = [dimension for dimension in DIMENSIONS if getattr(self, dimension) > 1]
        parts = ", ".join(f"{_INDEX_NAMES.get(name, name)} {index[name]}" for name in sized)
        return f"coordinate {coordinate}{f' ({parts})' if parts else ''}"

    def __str__(self) -> str:
        sized = [f"{name} {getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) > 1]
        tight = f" (tight: {', '.join(self.tight)})" if self.tight else ""
        return f"{', '.join(sized) or 'one process'}{tight}"


ONE = Shape()
"""The shape of a job that says nothing: a cell is one process."""


def full_cells(coordinates: Iterable[int], processes: int) -> int:
    """How many cells processes at these coordinates make: the fewest at any one coordinate."""
    counts = Counter(coordinates)
    return min(counts[coordinate] for coordinate in range(processes))


def absent(coordinates: Iterable[int], processes: int) -> Iterator[int]:
    """The coordinates that none of these processes has."""
    there = frozenset(coordinates)
    return (coordinate for coordinate in range(processes) if coordinate not in there)


def broken_shape(shape: Shape) -> str:
    """Why there is no such shape; empty where there is."""
    for dimension in DIMENSIONS:
        if (size := getattr(shape, dimension)) < 1:
            return f"its {dimension} is {size}; expected 1 or more"
    if shape.processes > MOST_PROCESSES:
        return f"it has {shape.processes} processes; expected at most {MOST_PROCESSES}"
    strange = [name for name in shape.tight if name not in DIMENSIONS]
    return f"its tight dimension {strange[0]!r:.60} is none of {', '.join(DIMENSIONS)}" if strange else ""
