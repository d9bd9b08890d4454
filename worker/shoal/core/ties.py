"""Which parameters of a pipeline's stages are copies of each other: they begin and end each step with the same values.

A script names them alike (`shoal.tied`). Each stage keeps a copy of its own, in blocks of its own. Stages at one place
have one parameter, which knows as what their copies would be registered. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from shoal_protos.errors import UserError


@dataclass(frozen=True, slots=True, order=True)
class Tie:
    """What one copy has to do with the others."""

    name: str
    """That all of them have."""
    places: tuple[int, ...]
    """Of the pipeline, that have one each, ascending."""
    place: int
    """Its own."""

    @property
    def is_first(self) -> bool:
        """Whether no earlier stage has a copy: it counts for all of them in what is added up over parameters."""
        return self.place == self.places[0]


class Copy(NamedTuple):
    """As what a parameter that a stage has from another one at its place would be registered there."""

    tie: str
    name: str
    order: int
    """Among the parameters of its place, these copies among them."""
    unit: int


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that a script has marked."""

    parameter: str
    tie: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def ties_of(places: Sequence[Sequence[TiedParameter]]) -> dict[str, Tie]:
    """By parameter. `places`: what each place of a pipeline has. Raises `UserError` for ties that cannot be."""
    found: dict[str, dict[int, TiedParameter]] = {}
    for place, marked in enumerate(places):
        for one in marked:
            other = found.setdefault(one.tie, {}).setdefault(place, one)
            if other is not one:
                raise UserError(
                    f'parameters "{other.parameter}" and "{one.parameter}" are tied as "{one.tie}", and one process '
                    "has both; make them one nn.Parameter, or give the pipeline a place for each of their stages."
                )
    for copies in found.values() if len(places) > 1 else ():
        _check(list(copies.values()))
    return {
        one.parameter: Tie(name, tuple(sorted(copies)), place)
        for name, copies in found.items()
        for place, one in copies.items()
        if len(places) > 1
    }


def _check(copies: Sequence[TiedParameter]) -> None:
    first, *others = copies
    if not others:
        raise UserError(
            f'parameter "{first.parameter}" is tied as "{first.tie}", and no other stage has a parameter of that name; '
            f'mark its copy there by shoal.tied(parameter, "{first.tie}").'
        )
    for one in others:
        if (one.shape, one.dtype) != (first.shape, first.dtype):
            raise UserError(
                f'parameters "{first.parameter}" of shape {first.shape} and "{one.parameter}" of shape {one.shape} '
                f'({first.dtype} and {one.dtype}) are tied as "{one.tie}"; expected one shape and one dtype.'
            )


def check_groups(ties: Mapping[str, Tie], groups: Mapping[str, int]) -> None:
    """Raises `UserError` where the optimizer updates copies in different ways. `groups`: by parameter, its number."""
    for name, one, other in _unlike(ties, groups):
        raise UserError(
            f'parameters "{one}" and "{other}" are tied as "{name}", and the optimizer has them in different groups; '
            "put them into the same one."
        )


def check_divisions(ties: Mapping[str, Tie], ways: Mapping[str, str]) -> None:
    """Raises `UserError` where one copy is divided among the places of a cell and another one in another way, or not at
    all. `ways`: by parameter, in words.
    """
    for name, one, other in _unlike(ties, ways):
        raise UserError(
            f'parameters "{one}" and "{other}" are tied as "{name}", and "{one}" is {ways[one]}, "{other}" '
            f"{ways[other]}: what places have of one is no copy of what they have of the other; divide both alike."
        )


def _unlike(ties: Mapping[str, Tie], of: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    """Names of ties, and two copies of each that are not alike in this."""
    for name in sorted({tie.name for tie in ties.values()}):
        first, *others = (one for one, tie in ties.items() if tie.name == name)
        if (other := next((one for one in others if of[one] != of[first]), None)) is not None:
            yield name, first, other
