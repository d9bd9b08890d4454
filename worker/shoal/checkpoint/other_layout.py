"""A checkpoint of another layout than this job's model has: in what they differ, and what of it is taken by name.

The same layout: blocks are read as they are, training goes on. Another one is an error that names the first parameter
that differs, unless `checkpoint.allow` names the difference: then parameters and buffers that match by name are taken,
all others keep their initial values, and training begins at step 0 with a fresh optimizer (fine-tuning).

What is taken are values that parameters in another layout begin with: read in parts, so a worker has never more of them
than of values that it makes: what it keeps, and a tensor or a stretch of blocks. Every part is verified. Names that are
tied in the module stand for the one under which the module knows the tensor. Called by restore.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks.loaded_state import MASTER
from shoal.cells.stages import places_of
from shoal.checkpoint.manifest import Manifest, StateEntry, buffer_tensor
from shoal.checkpoint.named import Known, check_cuts, names, tied_names
from shoal.checkpoint.other_shape import ReadOfPlaces, Recut
from shoal.checkpoint.reader import Reader
from shoal.checkpoint.snapshot import PARAMETERS
from shoal.core.cell_part import COMMON, WHOLE, Division
from shoal.core.container import DTYPES
from shoal.core.layout import Bucket, Layout, ListsOfExperts, Slot, slots_of_all_stages
from shoal.core.units import named_parameters
from shoal.exchange.buffer_joins import have_same_bits
from shoal.exchange.module_buffers import persistent_buffers

ALLOWED = ("new", "missing")
"""`new`: of the model, unknown to the checkpoint. `missing`: of the checkpoint, unknown to the model."""

A_VALUE_EACH = "a value for each element"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Tensors by name: what is taken from the checkpoint, what keeps its initial value, what is left behind."""

    taken: tuple[str, ...]
    new: tuple[str, ...]
    missing: tuple[str, ...]
    has_optimizer: bool = False
    """Whether optimizer states are taken too."""

    def __str__(self) -> str:
        parts = [f"{len(self.taken)} tensors are taken by name"]
        if self.new:
            parts.append(f"{_listed(self.new)} keep their initial values")
        if self.missing:
            parts.append(f"{_listed(self.missing)} of the checkpoint are left out")
        optimizer = "the optimizer states that came with them" if self.has_optimizer else "a fresh optimizer"
        return f"{'; '.join(parts)}; training begins at step 0 with {optimizer}."


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def difference(manifest: Manifest, layout: Layout, optimizer: str, forms: Sequence[str]) -> str | None:
    """What keeps blocks of a training state from being read as they are, one sentence; None where nothing does.

    `optimizer`, `forms`: its name, and by group what of its state it alone can read.
    """
    theirs, ours = list(slots_of_all_stages(manifest.blocks)), list(slots_of_all_stages(layout))
    named = {slot.parameter.name: slot for slot in theirs}
    pairs = [(named.get(wanted.parameter.name), wanted) for wanted in ours]
    is_same_model = len(theirs) == len(ours) and all(found for found, _ in pairs)
    if is_same_model and manifest.optimizer != optimizer:
        return f"its optimizer is {manifest.optimizer}, this job's is {optimizer}."
    for found, wanted in chain(pairs if is_same_model else (), zip_longest(theirs, ours)):
        sentence = _parameters_differ(found, wanted)
        if sentence:
            return sentence
    if manifest.blocks.text() != layout.text():
        return _blocks_differ(manifest.blocks, layout)
    for group, (found, wanted) in enumerate(zip(manifest.forms, forms, strict=False)):
        if found != wanted:
            kept, keeps = found or A_VALUE_EACH, wanted or A_VALUE_EACH
            return f"its optimizer keeps {kept} as state of group {group}, this job's {keeps}."
    return None


def _blocks_differ(theirs: Layout, ours: Layout) -> str:
    mine, other = (
        {bucket.slots[0].parameter.name for buckets in one.by_stage for bucket in buckets if bucket.slots}
        for one in (ours, theirs)
    )
    for whose, only in (("the checkpoint", other - mine), ("the model", mine - other)):
        if only:
            return (
                f'it was written with other units: only in {whose} a bucket begins with parameter "{min(only)}". '
                "Give `shoal.units` as it was."
            )
    return "its parameters lie in other blocks: it was written by another version of Shoal."


def _parameters_differ(found: Slot | None, wanted: Slot | None) -> str | None:
    if found is None or wanted is None:
        only = found or wanted
        assert only is not None
        whose = "the checkpoint" if wanted is None else "the model"
        return f'only {whose} has parameter "{only.parameter.name}".'
    mine, theirs = wanted.parameter, found.parameter
    if mine.name != theirs.name:
        return f'parameter "{mine.name}" of the model is where the checkpoint has "{theirs.name}".'
    for kind in ("shape", "dtype"):
        if getattr(mine, kind) != getattr(theirs, kind):
            return (
                f'parameter "{mine.name}" has {kind} {getattr(mine, kind)}, the checkpoint\'s {getattr(theirs, kind)}.'
            )
    if mine.group != theirs.group:
        return f'parameter "{mine.name}" is in optimizer group {mine.group}, the checkpoint\'s in {theirs.group}.'
    return None


def match(theirs: Mapping[str, Shape], ours: Mapping[str, Shape], allow: Sequence[str], where: str) -> Match:
    """What is taken by name: same name and same shape (another dtype is converted).

    Raises `UserError` naming the first tensor that only one side has, or has in another shape, where `allow` does not
    name that difference. One of another shape is both new and missing.
    """
    taken = tuple(name for name, shape in ours.items() if theirs.get(name) == shape)
    new = tuple(name for name in ours if name not in taken)
    missing = tuple(name for name in theirs if name not in taken)
    needed = [kind for kind, differing in (("new", new), ("missing", missing)) if differing]
    for kind, differing, whose in (("new", new, "the model"), ("missing", missing, "the checkpoint")):
        if differing and kind not in allow:
            raise UserError(
                f"{where} does not fit: {_why(differing[0], theirs, ours, whose)} To begin at step 0 with what matches "
                f"by name, set `shoal.checkpoint.allow: {json.dumps(needed)}`."
            )
    return Match(taken, new, missing)


def _why(name: str, theirs: Mapping[str, Shape], ours: Mapping[str, Shape], whose: str) -> str:
    if name in theirs and name in ours:
        return f'"{name}" has shape {ours[name]}, the checkpoint\'s {theirs[name]}.'
    return f'only {whose} has "{name}".'


PART_ELEMENTS = 1 << 20
"""Of tensors that are compared, at a time."""


class TakenTensors:
    """`GivenValues` of a checkpoint. `taken`: the model's names, each with the checkpoint's. `layout`: of the model,
    where a process of a cell has parts of what the checkpoint has whole.
    """

    def __init__(self, reader: Reader, taken: Mapping[str, str], layout: Layout | None = None) -> None:
        self._reader, self._taken = reader, taken
        self._part = layout.part if layout is not None else WHOLE
        slots = (slot.parameter for bucket in layout.buckets for slot in bucket.slots) if layout is not None else ()
        self._cut = {one.name: one.in_one_process(self._part) for one in slots if one.division != COMMON}
        """Those of which it has a part, as they are in one process."""
        self._dtypes = {name: known.dtype for name, known in names(reader.manifest).items()} if self._cut else {}
        buckets = reader.manifest.blocks.buckets
        self._slots = {slot.parameter.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self._states: dict[int, Mapping[str, StateEntry]] = {}
        """By bucket what all its pieces have, of an import."""
        if reader.manifest.kind == "model":
            self._states = {one.bucket: one.state for file in reader.manifest.files for one in file.pieces}
        pieces = (one for file in reader.manifest.files for one in file.pieces)
        self._without_masters = {one.bucket for one in pieces if MASTER not in one.state}
        self._whole: tuple[str, Tensor] | None = None
        """A tensor beside the blocks, which can be read whole alone."""

    def __contains__(self, name: object) -> bool:
        return name in self._taken

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of the checkpoint's dtype, or wider
        """Elements of a tensor, flat. Raises `CheckpointDamaged` where they are not what was written."""
        theirs = self._taken[name]
        if name in self._cut:

            def read(_: int, __: int, start: int, stop: int) -> Tensor:  # (stop - start,)
                return self._whole_part(theirs, start, stop)

            return self._cut_from(name, self._dtypes[theirs], read, first, last)
        return self._whole_part(theirs, first, last)

    def _cut_from(
        self, name: str, dtype: torch.dtype, read: ReadOfPlaces, first: int, last: int
    ) -> Tensor:  # (last - first,)
        recut = Recut(self._cut[name], WHOLE, 0, self._part, PART_ELEMENTS)
        return recut.taken(read, first, torch.empty(last - first, dtype=dtype))

    def _whole_part(self, theirs: str, first: int, last: int) -> Tensor:  # (last - first,)
        """Of a tensor of the checkpoint."""
        if theirs in self._slots:
            return self._of_blocks(*self._slots[theirs], first, last)
        if self._whole is None or self._whole[0] != theirs:
            self.forget()
            self._whole = theirs, self._beside(theirs)
        return self._whole[1].reshape(-1)[first:last]

    def forget(self) -> None:
        """What was read last."""
        self._whole = None

    # ---- optimizer states, of a checkpoint that was imported with them

    @property
    def has_states(self) -> bool:
        """Whether there are any."""
        return any(self._states.values())

    def have_states_alike(self, theirs: Iterable[str]) -> bool:
        """Whether all that is kept of these is of one kind and count."""
        return len({self._slots[name][0].group for name in theirs}) == 1

    def kept(self, name: str) -> tuple[int, Mapping[str, bool]]:
        """What an optimizer keeps of a parameter: a number that is the same for those of which all is alike, and by key
        whether it is one number for the whole parameter.
        """
        bucket, _ = self._slots[self._taken[name]]
        return bucket.group, {key: entry.scalar for key, entry in self._states.get(bucket.index, {}).items()}

    def state_part(self, name: str, key: str, first: int, last: int) -> Tensor:  # (last - first,), or ()
        """Elements of a parameter's optimizer state, flat, or its one number. Raises `CheckpointDamaged` where they are
        not what was written.
        """
        bucket, slot = self._slots[self._taken[name]]
        entry = self._states[bucket.index][key]
        if name not in self._cut or entry.scalar:
            return self._reader.of_slot(bucket, slot, first, last, key)

        def read(_: int, __: int, start: int, stop: int) -> Tensor:  # (stop - start,)
            return self._reader.of_slot(bucket, slot, start, stop, key)

        return self._cut_from(name, DTYPES[entry.dtype], read, first, last)

    # ---- reading

    def _of_blocks(self, bucket: Bucket, slot: Slot, first: int, last: int) -> Tensor:  # (last - first,)
        """Masters, where there are such."""
        key = PARAMETERS if bucket.index in self._without_masters else MASTER
        return self._reader.of_slot(bucket, slot, first, last, key)

    def _beside(self, name: str) -> Tensor:  # of its own shape
        found = self._reader.frozen([name])
        return found[name] if name in found else self._reader.tensors([buffer_tensor(name)])[buffer_tensor(name)]


def take_by_name(reader: Reader, module: nn.Module, layout: Layout, allow: Sequence[str]) -> tuple[Match, TakenTensors]:
    """What matches of the model in one process, of which `layout` has a part perhaps. Raises `UserError` as `match`
    does, and where what the module ties are different tensors, or nothing says which part a process has.
    """
    part = layout.part
    if part.coordinates > 1:
        check_cuts(layout, f"take tensors of {reader.where}")
    ours, tied = _whole_model(module, layout), tied_names(places_of(module))
    found = names(reader.manifest)
    for name, first in _copies(layout, found):
        tied.setdefault(name, first)
    for name in found:
        if tied.get(name) in found:
            _check_tied(reader, found, name, tied[name])
    theirs = {tied[name]: (name, known.shape) for name, known in found.items() if name in tied}
    theirs |= {name: (name, known.shape) for name, known in found.items() if name not in tied}
    theirs |= {name: theirs[first] for name, first in _copies(layout, found) if first in theirs}
    shapes = {name: shape for name, (_, shape) in theirs.items()}
    matched = match(shapes, ours, allow, reader.where)
    of_whole = {name: theirs[name][0] for name in matched.taken}
    mine = (slot.parameter for bucket in layout.buckets for slot in bucket.slots)
    here = {one.name: one.whole_names(part.experts)[part.piece(Division(by_expert=True))]
            for one in mine if one.is_one_of_several}  # fmt: skip
    lists = ListsOfExperts(layout)
    wholes = {name: lists.whole_name(name, part.coordinate) for name in persistent_buffers(module)}
    here |= {name: whole for name, whole in wholes.items() if name != whole}
    local = {name: name for name in of_whole if name not in here} | here
    taken = TakenTensors(reader, {name: of_whole[one] for name, one in local.items() if one in of_whole}, layout)
    has_optimizer = taken.has_states and not (matched.new or matched.missing)
    if has_optimizer and layout.stages and not taken.have_states_alike(of_whole[name] for name, *_ in layout.wholes()):
        raise UserError(
            f"{reader.where} has optimizer states that differ in kind or count between parameters, which is not "
            "supported in a pipeline; import the model alone (--model-only)."
        )
    return replace(matched, has_optimizer=has_optimizer), taken


def _whole_model(module: nn.Module, layout: Layout) -> dict[str, Shape]:
    """Parameters and persistent buffers of the model in one process, by name."""
    trained = {slot.parameter.name: slot.parameter for slot in slots_of_all_stages(layout)}
    parts, experts, found = layout.part.parts, layout.part.experts, dict[str, Shape]()
    places = places_of(module) if layout.stages else [module]
    for name, tensor in chain.from_iterable(map(named_parameters, places)):
        one = trained.get(name)
        shape = tuple(tensor.shape) if one is None else one.whole_shape(parts, experts)
        found |= dict.fromkeys([name] if one is None else one.whole_names(experts), shape)
    lists = ListsOfExperts(layout)
    for place in places:
        for name, buffer in persistent_buffers(place).items():
            wholes = [lists.whole_name(name, coordinate) for coordinate in range(layout.part.coordinates)]
            found |= dict.fromkeys(wholes, tuple(buffer.shape))
    return found


def _copies(layout: Layout, found: Mapping[str, Known]) -> list[tuple[str, str]]:
    """Copies that stages have of a parameter, each with the one that a checkpoint of one process has: it has one tensor
    of them perhaps.
    """
    by_tie = dict[str, list[str]]()
    for name, tie in sorted(layout.part.ties.items(), key=lambda one: one[1]):
        by_tie.setdefault(tie.name, []).append(name)
    there = {tie: next((name for name in every if name in found), every[0]) for tie, every in by_tie.items()}
    return [(name, there[tie]) for tie, every in by_tie.items() for name in every if name != there[tie]]


def _check_tied(reader: Reader, found: Mapping[str, Known], name: str, first: str) -> None:
    """Only one of two tensors that the module ties can be taken, so the checkpoint must have the same bits of both."""
    values, elements = TakenTensors(reader, {name: name, first: first}), math.prod(found[name].shape)

    def is_alike(start: int) -> bool:
        one, other = (values.part(of, start, min(elements, start + PART_ELEMENTS)) for of in (name, first))
        return have_same_bits(one, other)

    if found[name] != found[first] or not all(map(is_alike, range(0, elements, PART_ELEMENTS))):
        raise UserError(
            f'{reader.where} does not fit: "{first}" and "{name}" are one tensor in the model and differ in the '
            "checkpoint. Build the model without the tie, or import one in which they are the same."
        )
