"""What of the model a process has, where several processes train a lane together (a cell). Pure.

Parameters are divided in one of four ways (`Division`): among the places of the tensor dimension, among those of the
experts, among both, or not at all. Coordinates of one stage of a pipeline that differ in nothing by which a parameter
is divided have it alike, and keep it together: each is home to an equal share of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shoal.core.cuts import Cut, Dealt
from shoal.core.ties import Copy, Tie


class Division(NamedTuple):
    """Among which places parameters are divided."""

    by_expert: bool = False
    """Those of the experts: no other place of that dimension has them."""
    by_tensor: bool = False
    """Those of the tensor dimension, likewise."""

    @property
    def of_experts(self) -> Division:
        """Among the experts' alone."""
        return self._replace(by_tensor=False)


COMMON = Division()
DIVISIONS = tuple(Division(*which) for which in ((True, True), (True, False), (False, True), (False, False)))
"""In the order of block numbers: those of experts first."""


@dataclass(frozen=True, slots=True)
class CellPart:
    """What of the model a process has: all of it where a cell is one process."""

    coordinates: int = 1
    """How many processes a cell has."""
    coordinate: int = 0
    """Its own place in a cell."""
    own: frozenset[str] = frozenset()
    """Names of the parameters that no other place of the tensor dimension has."""
    summed: frozenset[str] = frozenset()
    """Names of the others of whose gradient each place may have a part; of the rest all have the whole."""
    contexts: int = 1
    """How many coordinates have the same parameters, each with other tokens: all contribute to a gradient."""
    stages: int = 1
    """How many stages a pipeline has: as many coordinates that follow each other have each."""
    cuts: Mapping[str, Cut] = field(default_factory=dict, compare=False)
    """By name, as far as it is known: of the own ones, and of those that would be with more places of `tensor`."""
    adding: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of those that are marked as `summed`, which they are with several places of `tensor`."""
    numbered: int = field(default=0, compare=False)
    """How many stages its model is made of, with whose numbers names begin; 0: it is not made of stages."""
    ties: Mapping[str, Tie] = field(default_factory=dict, compare=False)
    """Of those of which several stages have a copy, by name."""
    copies: Mapping[str, tuple[Copy, ...]] = field(default_factory=dict, compare=False)
    """Of those that several stages at one place have: of what further stages have, by name."""
    experts: int = 1
    """Among how many places experts are divided, each with samples of its own: all contribute to the gradients of what
    is no expert's.
    """
    of_expert: frozenset[str] = frozenset()
    """Names of the parameters that no other place of the experts has."""
    dealt: Mapping[str, Dealt] = field(default_factory=dict, compare=False)
    """By name, as far as it is known: of those, and of those that would be with more places of `expert`."""

    @property
    def place(self) -> int:
        """Its own of the pipeline: the number of its stage."""
        return self.coordinate // self.of_stage

    @property
    def of_stage(self) -> int:
        """How many coordinates have a stage."""
        return self.coordinates // self.stages

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """How many places the dimensions have, in the order of `DIMENSIONS`."""
        return self.stages, self.experts, self.contexts, self.parts

    @property
    def portions(self) -> int:
        """Into how many portions a cell divides what a lane trains: samples among experts, tokens among contexts."""
        return self.contexts * self.experts

    @property
    def parts(self) -> int:
        """How many places the tensor dimension has."""
        return self.of_stage // self.portions

    @property
    def mates(self) -> range:
        """The coordinates that have the same stage, itself among them."""
        return range(self.place * self.of_stage, (self.place + 1) * self.of_stage)

    @property
    def unlike(self) -> list[int]:
        """Of those, one with each part of the stage that there is."""
        return [one for one in self.mates if (one - self.mates[0]) // self.parts % self.contexts == 0]

    @property
    def contributors(self) -> range:
        """The coordinates with the same part of what is no expert's, itself among them, in their order."""
        return self.mates[self.coordinate % self.parts :: self.parts]

    def summed_of(self, placed: Iterable[str]) -> frozenset[str]:
        """Names of those that are `summed` in such a cell. `placed`: of the DTensors."""
        marked = self.adding if self.parts > 1 else frozenset()
        return (marked | frozenset(placed if self.coordinates > 1 else ())) - self.own

    def contributors_to(self, division: Division) -> range:
        """Those among them that have the same parameters of a division."""
        first = self._expert * self.contexts
        return self.contributors[first : first + self.contexts] if division.by_expert else self.contributors

    @property
    def _expert(self) -> int:
        """Its place among the experts'."""
        return (self.coordinate - self.mates[0]) // self.parts // self.contexts

    def pieces(self, division: Division) -> int:
        """Into how many parts parameters are divided."""
        return (self.experts if division.by_expert else 1) * (self.parts if division.by_tensor else 1)

    def piece(self, division: Division) -> int:
        """Which of them it has."""
        expert = self._expert if division.by_expert else 0
        if not division.by_tensor:
            return expert
        return expert * self.parts + self.coordinate % self.parts

    def firsts(self, stage: int, division: Division) -> list[int]:
        """The first coordinate with each of these parts, of a stage."""
        at = (replace(self, coordinate=stage * self.of_stage + one) for one in range(self.of_stage))
        return [one.coordinate for one in at if one.is_first(division)]

    def share(self, division: Division) -> tuple[int, int]:
        """Of the coordinates that have that part as well: its number among them, and how many they are."""
        within = self.coordinate - self.mates[0]
        holders = within // self.parts if division.by_tensor else within
        count = self.of_stage // self.pieces(division)
        return (holders % count if division.by_expert else holders), count

    def is_first(self, division: Division) -> bool:
        """Whether it is the first of the coordinates that have that part."""
        return self.share(division)[0] == 0

    def holders(self, division: Division) -> list[int]:
        """These coordinates, in their order."""
        among = self.mates[self.coordinate % self.parts :: self.parts] if division.by_tensor else self.mates
        count = len(among) // (self.experts if division.by_expert else 1)
        first = self._expert * count if division.by_expert else 0
        return list(among[first : first + count])


WHOLE = CellPart()
