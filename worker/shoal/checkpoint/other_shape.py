"""The layout of a checkpoint's model in cells of another shape, and where its values are there. Pure.

It is made by the rules of core/layout.py from what the checkpoint says of each parameter: its place in the order of
registration, its unit, how it is cut and where its expert's number is. So a shape and back is the very layout again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from torch import Tensor

from shoal.checkpoint.named import without_cut, without_number
from shoal.core.cell_part import CellPart, Division
from shoal.core.cuts import Cut, Divided
from shoal.core.laying_out import lay_out
from shoal.core.layout import Layout, Trainable, slots_of_all_stages
from shoal.core.ties import Copy, Tie


def in_shape(layout: Layout, shape: Shape, where: str) -> Layout:
    """The layout of the same model in cells of that shape, at coordinate 0. Raises `UserError`."""
    part = layout.part
    parameters = [
        sorted((slot.parameter for bucket in of_stage for slot in bucket.slots), key=lambda one: one.order)
        for of_stage in layout.by_stage
    ]
    if any(one.order < 0 for one in chain.from_iterable(parameters)):
        raise UserError(
            f"cannot reshape {where}: it does not say in which order its model has its parameters, as it is of an "
            "earlier version of Shoal; let a job of this one go on from it, and save anew."
        )
    if part.sizes == shape.sizes:
        raise UserError(f"cannot reshape {where}: it is of the shape {shape} already.")
    if part.stages != shape.pipeline:
        _check_stages(part, shape, where)
    cut = [one for one in chain.from_iterable(parameters) if one.cut is not None]
    if shape.tensor > 1 and not cut:
        raise UserError(
            f"cannot reshape {where}: it says of no parameter how places of `tensor` divide it; mark those that they "
            "do (DTensor, tensor_model_parallel, shoal.sharded) in the script that saves, and save anew."
        )
    if shape.expert > 1 and not any(one.dealt is not None for one in chain.from_iterable(parameters)):
        raise UserError(
            f"cannot reshape {where}: it says of no parameter that it is an expert's; mark those that are (MoE does, "
            'shoal.sharded with over="expert", allreduce=False) in the script that saves, and save anew.'
        )
    for one in chain.from_iterable(parameters):
        _check(one, part, shape, where)
    again = _laid_out(parameters, part)
    if again.text() != layout.text():
        raise UserError(
            f"cannot reshape {where}: its parameters lie in other blocks than this version of Shoal puts them in; let "
            "a job of this version go on from it, and save anew."
        )
    every = [_with_copies(of_stage) for of_stage in parameters]
    dealt = [_dealt_anew(of_stage, part.experts, shape.expert, where) for of_stage in every]
    stages = dealt if part.stages == shape.pipeline else _at_places(dealt, shape.pipeline)
    there = replace(part, coordinates=shape.processes, contexts=shape.context, stages=shape.pipeline,
                    experts=shape.expert)  # fmt: skip
    of_places = [[_in_shape(one, part, shape) for one in of_stage] for of_stage in stages]
    return _laid_out(_tied_anew(of_places), there)


def _with_copies(of_stage: Sequence[Trainable]) -> list[Trainable]:
    """Those of a place, each as often as its stages have it."""
    found = list[Trainable]()
    for one in of_stage:
        tie = Tie(one.copies[0].tie, (), 0) if one.copies else one.tie
        found.append(replace(one, tie=tie, copies=()))
        found += [replace(found[-1], name=copy.name, order=copy.order, unit=copy.unit) for copy in one.copies]
    return sorted(found, key=lambda one: one.order)


def _tied_anew(stages: Sequence[Sequence[Trainable]]) -> list[list[Trainable]]:
    """With one parameter for all that are tied at a place: the first. Others there are copies of it."""
    found = [list[Trainable]() for _ in stages]
    places: dict[str, tuple[int, ...]] = {}
    for place, of_stage in enumerate(stages):
        for name in {one.tie.name for one in of_stage if one.tie is not None}:
            places[name] = (*places.get(name, ()), place)
    for place, of_stage in enumerate(stages):
        first: dict[str, int] = {}
        for one in of_stage:
            name = one.tie.name if one.tie is not None else ""
            if name in first:
                kept = found[place][first[name]]
                copy = Copy(name, one.name, one.order, one.unit)
                found[place][first[name]] = replace(kept, copies=(*kept.copies, copy))
                continue
            if name:
                first[name] = len(found[place])
            tie = Tie(name, places[name], place) if name and len(places[name]) > 1 else None
            found[place].append(replace(one, tie=tie))
    return found


def _check_stages(part: CellPart, shape: Shape, where: str) -> None:
    """Raises `UserError` where the stages of the model cannot be at so many places."""
    if not part.numbered:
        raise UserError(
            f"cannot reshape {where}: it does not say on which of {shape.pipeline} stages of a pipeline a parameter "
            f"would be, as its model was not made by cell.stages; give --pipeline {part.stages}, as it is."
        )
    if part.numbered % shape.pipeline:
        raise UserError(
            f"cannot reshape {where}: its model is of {part.numbered} stages, which do not divide among "
            f"{shape.pipeline} places of a pipeline."
        )


def number_of(name: str) -> int:
    """Of the stage that a parameter or buffer of numbered stages is of (cells/stages.py)."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def place_of(name: str, places: int) -> int:
    """Its place of a pipeline."""
    return number_of(name) % places


def _at_places(parameters: Sequence[Sequence[Trainable]], places: int) -> list[list[Trainable]]:
    """The parameters of numbered stages, by place of a pipeline in their order there.

    Their units are numbered anew: those with even numbers are left over between others (core/units.py), so where one
    stage ends with such and the next begins with such, they are one.
    """
    found: list[list[Trainable]] = [[] for _ in range(places)]
    latest: dict[int, Trainable] = {}
    ordered = sorted(chain.from_iterable(parameters), key=lambda one: (number_of(one.name), one.order))
    for one in ordered:
        place = place_of(one.name, places)
        unit, before = one.unit % 2, latest.get(place)
        if before is not None:
            are_of_one = number_of(before.name) == number_of(one.name)
            is_same = before.unit == one.unit if are_of_one else before.unit % 2 == one.unit % 2 == 0
            unit = found[place][-1].unit if is_same else found[place][-1].unit + 2 - (before.unit + one.unit) % 2
        latest[place] = one
        found[place].append(replace(one, order=len(found[place]), unit=unit))
    return found


def _check(one: Trainable, part: CellPart, shape: Shape, where: str) -> None:
    """Raises `UserError` for a parameter that cannot be divided so."""
    if one.own and one.cut is None:
        raise UserError(f"cannot reshape {where}: {without_cut(one.name)}")
    if one.division.by_expert and one.dealt is None and part.experts != shape.expert:
        raise UserError(f"cannot reshape {where}: {without_number(one.name)}")
    whole = one.whole_shape(part.parts, part.experts)
    if one.cut is not None and not one.cut.divides(whole, shape.tensor):
        stride = f" with {one.cut.stride} pieces each" if one.cut.stride > 1 else ""
        raise UserError(
            f'cannot reshape {where}: parameter "{one.name}" of shape {whole} is cut along dimension {one.cut.dim}, '
            f"whose {whole[one.cut.dim]} do not divide into {shape.tensor} equal parts{stride}."
        )
    if one.dealt is not None and not one.dealt.is_named and whole[one.dealt.dim] % shape.expert:
        raise UserError(
            f'cannot reshape {where}: parameter "{one.name}" of shape {whole} is of {whole[one.dealt.dim]} experts, '
            f"along dimension {one.dealt.dim}, which do not divide among {shape.expert} places."
        )


def _dealt_anew(of_stage: Sequence[Trainable], before: int, after: int, where: str) -> list[Trainable]:
    """With those experts of lists that a place has of `after` places, where it had those of `before`. Raises
    `UserError`.
    """
    lists: dict[str, list[Trainable]] = {}
    for one in of_stage if before != after else ():
        if one.dealt is not None and one.dealt.is_named:
            lists.setdefault(one.dealt.list_of(one.name), []).append(one)
    found = list[Trainable]()
    for one in of_stage:
        start = one.dealt.list_of(one.name) if one.dealt is not None and one.dealt.is_named else ""
        if start not in lists:
            found.append(one)
        elif one is lists[start][0]:
            found += _experts(start, lists[start], before, after, where)
    return [replace(one, order=order) for order, one in enumerate(found)]


def _experts(start: str, every: Sequence[Trainable], before: int, after: int, where: str) -> list[Trainable]:
    """The parameters of those of a list. Raises `UserError`."""
    by_number: dict[int, list[Trainable]] = {}
    count = 0
    for one in every:
        assert one.dealt is not None
        number, count = one.dealt.number(one.name), one.dealt.of_place
        by_number.setdefault(number, []).append(replace(one, name=one.dealt.named(one.name, 0)))
    first, total = by_number.get(0, []), count * before
    if total % after:
        raise UserError(
            f"cannot reshape {where}: its experts {start}0 to {start}{total - 1} are {total}, which do not divide "
            f"among {after} places."
        )
    if tie := next((one.tie.name for one in every if one.tie is not None), ""):
        raise UserError(
            f'cannot reshape {where}: experts {start}0 to {start}{count - 1} are tied (shoal.tied, "{tie}") '
            f"with those of other stages, place by place, and would be at others; give --expert {before}, as it is."
        )
    if len({one.unit for one in every}) > 1:
        raise UserError(
            f"cannot reshape {where}: experts {start}0 to {start}{count - 1} are units of their own, which other "
            "places would have otherwise; name the class of the layers that they are in (shoal.units), and save anew."
        )
    if len(by_number) < count or any(mine != first for mine in by_number.values()):
        raise UserError(
            f"cannot reshape {where}: experts {start}0 to {start}{count - 1} have not the same parameters, in shape, "
            "dtype and group of the optimizer; expected experts that are alike."
        )
    here = total // after
    return [
        replace(one, name=one.dealt.named(one.name, number), dealt=one.dealt._replace(of_place=here))
        for number in range(here)
        for one in first
        if one.dealt is not None
    ]


def _in_shape(one: Trainable, part: CellPart, shape: Shape) -> Trainable:
    """The part that a place of that shape has."""
    found = one.whole_shape(part.parts, part.experts)
    if one.cut is not None:
        found = one.cut.part_shape(found, shape.tensor)
    if one.dealt is not None and not one.dealt.is_named:
        found = Cut(one.dealt.dim).part_shape(found, shape.expert)
    by_expert = shape.expert > 1 and (one.dealt is not None or one.division.by_expert)
    return replace(one, shape=found, division=Division(by_expert, one.cut is not None and shape.tensor > 1))


def _laid_out(stages: Sequence[Sequence[Trainable]], cell: CellPart) -> Layout:
    """Of the parameters of each stage in such cells, in their order, whose shapes are theirs there."""
    own = frozenset(one.name for one in chain.from_iterable(stages) if one.own)
    of_expert = frozenset(one.name for one in chain.from_iterable(stages) if one.division.by_expert)
    adding = frozenset(one.name for one in chain.from_iterable(stages) if one.adds)
    part = replace(cell, own=own, of_expert=of_expert, adding=adding)
    summed = part.summed_of(one.name for one in chain.from_iterable(stages) if one.wrapped)
    marked = [
        [replace(one, summed=one.name in summed or one.tie is not None) for one in of_stage] for of_stage in stages
    ]
    return lay_out(marked[0], part=part, stages=marked if part.stages > 1 else ())


# ---- where values are


class OldNames:
    """Under which names a layout has what another one has of the same model."""

    def __init__(self, before: Layout, after: Layout) -> None:
        self._before, self._after = before.part, after.part
        self._parameters = {slot.parameter.name: slot.parameter for slot in slots_of_all_stages(after)}
        self._first = {
            copy.name: slot.parameter.name for slot in slots_of_all_stages(before) for copy in slot.parameter.copies
        }

    def of(self, name: str, expert: int) -> tuple[int, str]:
        """What a place of the experts has under a name: which place has it before, and its name there. Of what lies on
        several places, or is common to them, the place is the first one.
        """
        now, before, after = self._parameters[name], self._before.experts, self._after.experts
        if now.dealt is None or not now.dealt.is_named:
            place = expert if now.division.by_expert and before == after else 0
            return place, self._first.get(name, name)
        whole = now.dealt.whole_name(name, expert) if now.division.by_expert else name
        place, old = now.dealt.found(whole, now.dealt.of_place * (after if now.division.by_expert else 1) // before)
        return place, self._first.get(old, old)

    def sources(self, name: str, expert: int) -> list[tuple[int, str]]:
        """The parameters before of which that is made which a place of the experts has under a name, as of `of`."""
        now, (place, old) = self._parameters[name], self.of(name, expert)
        if now.copies:
            return [(place, one) for one in self.copies_of(name)]
        if now.dealt is None or now.dealt.is_named or self._before.experts == self._after.experts:
            return [(place, old)]
        return [(one, old) for one in range(self._before.experts)]

    def copies_of(self, name: str) -> list[str]:
        """What was several parameters, which stages at one place have as one now; its first one's name comes first."""
        names = (name, *(copy.name for copy in self._parameters[name].copies))
        return list(dict.fromkeys(self._first.get(one, one) for one in names))

    def all_of(self, name: str) -> list[str]:
        """What all places have under a name: their names before, each once."""
        if self._parameters[name].copies:
            return self.copies_of(name)
        return list(dict.fromkeys(self.of(name, expert)[1] for expert in range(self._after.experts)))


ReadOfPlaces = Callable[[int, int, int, int], Tensor]  # (elements,)
"""What a place of the experts and one of the tensor dimension have of a parameter: elements from the third number to
before the fourth, flat.
"""


@dataclass(frozen=True, slots=True)
class Recut:
    """A parameter that places of one shape have, as places of another have it."""

    was: Trainable
    there: CellPart
    expert: int
    """Where it is on one place of the experts: there."""
    here: CellPart
    most: int
    """So many elements are read at a time, about."""

    def taken(
        self,
        read: ReadOfPlaces,
        first: int,
        values: Tensor,  # (elements,)
    ) -> Tensor:  # the same
        """Fills in elements of the part here, flat, from `first` on."""
        dealt, there, here = self.was.dealt, self.there, self.here
        last = first + len(values)
        if dealt is None or dealt.is_named or there.experts == here.experts:
            return values.copy_(self._of_expert(read, values, self.expert, first, last))
        along, of = Cut(dealt.dim), Divided(here.piece(Division(by_expert=True)), here.experts, there.experts)
        part = replace(self.was, division=Division(by_expert=there.experts > 1))
        shape = part.whole_shape(1, there.experts)
        if self.was.cut is not None:
            shape = self.was.cut.part_shape(self.was.cut.whole_shape(shape, self._parts), here.parts)
        along.taken(partial(self._of_expert, read, values), shape, of, first, values, self.most)
        return values

    @property
    def _parts(self) -> int:
        """In how many it is cut there."""
        return self.there.parts if self.was.own else 1

    def _of_expert(self, read: ReadOfPlaces, like: Tensor, expert: int, first: int, last: int) -> Tensor:
        # (last - first,)
        """What a place of the experts there has of the part of a place of the tensor dimension here."""
        was, tensor = self.was, self.here.coordinate % self.here.parts
        if was.cut is None or self._parts == self.here.parts:
            return read(expert, tensor if was.own else 0, first, last)
        values, whole = like.new_empty(last - first), was.cut.whole_shape(was.shape, self._parts)
        of = Divided(tensor, self.here.parts, self._parts)
        was.cut.taken(partial(read, expert), whole, of, first, values, self.most)
        return values
