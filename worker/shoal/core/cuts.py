"""How a parameter is divided among the places of a cell, and how its parts become the whole. Pure.

Places of the tensor dimension have parts that are cut along a dimension. Places of the experts have experts each, which
are numbered in turn: those of the first place come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Rows of a part, along the dimension of its cut, that lie in a part of another division."""

    source: int
    """The place there."""
    first: int
    """The first row there."""
    at: int
    """The first row here."""
    length: int


class Divided(NamedTuple):
    """The part of one of several places, and among how many the whole is divided elsewhere."""

    place: int
    places: int
    sources: int


ReadOfPlace = Callable[[int, int, int], Tensor]  # (elements,)
"""What a place has of a whole: its elements from the second number to before the third, flat."""


class Cut(NamedTuple):
    """All places have parts of one shape."""

    dim: int
    """Along which the parts follow each other."""
    stride: int = 1
    """So many pieces a place has of it: the first ones of all places come first, then the second ones, and so on. More
    than one where several matrices are fused, each of which is cut, as Megatron does.
    """

    @property
    def in_pieces(self) -> str:
        """How many pieces a place has, as the end of a sentence; empty where it is one."""
        return f", {self.stride} pieces a place" if self.stride > 1 else ""

    def whole_shape(self, shape: tuple[int, ...], places: int) -> tuple[int, ...]:
        """Of the whole, whose parts have this shape."""
        return (*shape[: self.dim], shape[self.dim] * places, *shape[self.dim + 1 :])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a part can have this shape."""
        return self.dim < len(shape) and shape[self.dim] % self.stride == 0

    def part_shape(self, whole: tuple[int, ...], places: int) -> tuple[int, ...]:
        """Of a part of a whole of this shape, which `divides`."""
        return (*whole[: self.dim], whole[self.dim] // places, *whole[self.dim + 1 :])

    def divides(self, whole: tuple[int, ...], places: int) -> bool:
        """Whether a whole of this shape can be cut into so many equal parts."""
        return self.dim < len(whole) and whole[self.dim] % (places * self.stride if places > 1 else 1) == 0

    def rows(self, size: int, of: Divided) -> list[Rows]:
        """Of which rows a part is made, ascending. `size`: rows of the whole."""
        found = []
        for at, first, count in self._runs(size, of.place, of.places):
            for source in range(of.sources):
                for there, start, length in self._runs(size, source, of.sources):
                    low, high = max(first, start), min(first + count, start + length)
                    if low < high:
                        found.append(Rows(source, there + low - start, at + low - first, high - low))
        return sorted(found, key=lambda rows: rows.at)

    def _runs(self, size: int, place: int, places: int) -> list[tuple[int, int, int]]:
        """Rows of a part that follow each other in the whole too: where they begin in it, there, and how many."""
        pieces = self.stride if places > 1 else 1
        length = size // (places * pieces)
        return [(piece * length, (piece * places + place) * length, length) for piece in range(pieces)]

    def taken(
        self, read: ReadOfPlace, whole: tuple[int, ...], of: Divided, first: int, values: Tensor, most: int
    ) -> None:
        """Fills in elements of a part, flat, from `first` on. `read`: what a place has of the whole where that is
        divided otherwise; it is asked for `most` elements at a time, about.
        """
        inner, size, last = math.prod(whole[self.dim + 1 :]), whole[self.dim], first + len(values)
        here, there = size // of.places * inner, size // of.sources * inner  # elements of an index before the dimension
        rows, step = self.rows(size, of), max(1, most // there)
        for begin in range(first // here, -(-last // here), step):
            end = min(begin + step, -(-last // here))
            low, high = max(first, begin * here), min(last, end * here)
            if there > most:
                _copy_runs(read, rows, inner, (begin * here, begin * there), values[low - first : high - first], low)
                continue
            made = values.new_empty(end - begin, size // of.places, inner)
            for source in {one.source for one in rows}:
                found = read(source, begin * there, end * there).view(end - begin, size // of.sources, inner)
                for one in rows:
                    if one.source == source:
                        made[:, one.at : one.at + one.length] = found[:, one.first : one.first + one.length]
            values[low - first : high - first] = made.view(-1)[low - begin * here : high - begin * here]

    def join(
        self,
        parts: Sequence[Tensor],  # by place, each of the part's shape
        whole: Tensor,  # of the whole's shape
    ) -> None:
        """Fills the whole in."""
        for place, part in enumerate(parts):
            strips = self.strips(whole, place, len(parts))
            for strip, piece in zip(strips, part.chunk(self.stride, self.dim), strict=True):
                strip.copy_(piece)

    def strips(
        self,
        whole: Tensor,  # of any shape
        place: int,
        places: int,
    ) -> list[Tensor]:
        """Views of the pieces of a whole that a place has, as torch cuts it: the last ones may be shorter, or none."""
        pieces = (piece.chunk(places, self.dim) for piece in whole.chunk(self.stride, self.dim))
        return [of_places[place] for of_places in pieces if place < len(of_places)]

    def part(
        self,
        whole: Tensor,  # of any shape
        place: int,
        places: int,
    ) -> Tensor:  # of the part's shape
        """What a place has of a whole that `divides`; a view where that is one piece."""
        strips = self.strips(whole, place, places)
        return strips[0] if len(strips) == 1 else torch.cat(strips, self.dim)


class Dealt(NamedTuple):
    """Where an expert's parameter has the expert's number, by which experts are dealt to places: in its name, where it
    is of one of a list of modules, or along a dimension, where one tensor has all experts of a place.
    """

    dim: int = -1
    """Along which experts lie; -1: its name has the number."""
    level: int = 0
    """So many parts of the name follow the number."""
    of_place: int = 1
    """So many experts a place's list has."""

    @property
    def is_named(self) -> bool:
        """Whether each expert has a parameter of its own."""
        return self.dim < 0

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter can be one of these."""
        if not self.is_named:
            return self.dim < len(shape)
        parts = name.split(".")
        return self.level < len(parts) and parts[-1 - self.level].isdecimal() and self.number(name) < self.of_place

    def number(self, name: str) -> int:
        """Of the expert that the name is of, within its place."""
        return int(name.split(".")[-1 - self.level])

    def named(self, name: str, number: int) -> str:
        """The same parameter of another expert."""
        parts = name.split(".")
        parts[-1 - self.level] = str(number)
        return ".".join(parts)

    def list_of(self, name: str) -> str:
        """What the names of all experts of its list begin with."""
        return "".join(f"{part}." for part in name.split(".")[: -1 - self.level])

    def whole_name(self, name: str, place: int) -> str:
        """Among the experts of all places, where a place has it under this name."""
        return self.named(name, place * self.of_place + self.number(name)) if self.is_named else name

    def found(self, name: str, other: int) -> tuple[int, str]:
        """Where the expert is that has this name among those of all places, if a place has `other` of them: which place
        has it, and its name there.
        """
        place, number = divmod(self.number(name), other)
        return place, self.named(name, number)


def _copy_runs(
    read: ReadOfPlace,
    rows: Sequence[Rows],
    inner: int,
    begin: tuple[int, int],
    values: Tensor,  # (elements,)
    first: int,
) -> None:
    """Of one index before the dimension, which begins at these elements here and in a part there: the elements of a
    part from `first` on.
    """
    here, there = begin
    for one in rows:
        low, high = here + one.at * inner, here + (one.at + one.length) * inner
        start, stop = max(low, first), min(high, first + len(values))
        if start < stop:
            shift = there + one.first * inner - low
            values[start - first : stop - first] = read(one.source, start + shift, stop + shift)
