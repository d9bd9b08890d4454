"""A checkpoint of cells of one shape as one of another: `shoal reshape OLD NEW`.

Weights, masters, averages and all state of the optimizer that is one value an element go along, cut and dealt anew
(other_shape.py has the layout). All is read and written part by part; what is read is verified on the way, what was
written afterwards. Called by `python -m shoal.checkpoint`.
"""

from __future__ import annotations

import gc
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product

import torch
from shoal_protos.errors import UserError
from shoal_protos.release import RELEASE
from shoal_protos.shape import Shape, broken_shape
from torch import Tensor

from shoal.checkpoint.catalogue import Found, SaveName, delete, look_into
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.manifest import FrozenEntry, Manifest, PieceEntry, buffer_tensor
from shoal.checkpoint.other_shape import OldNames, Recut, in_shape, number_of, place_of
from shoal.checkpoint.reader import Reader, are_alike
from shoal.checkpoint.saver import write_frozen
from shoal.checkpoint.snapshot import PARAMETERS, READ_BYTES, Kind, MadeContent, Small, made_content
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import Author, commit, write_content
from shoal.core.cell_part import CellPart, Division
from shoal.core.checkpoint_errors import StorageFailed
from shoal.core.container import DTYPES
from shoal.core.layout import Bucket, Layout, ListsOfExperts, numbered, slots_of_all_stages
from shoal.core.manifest_parts import LayoutEntry
from shoal.core.misses import Missed, Misses, MissRun
from shoal.process.host_memory import give_back_freed_memory, tensor_bytes


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A checkpoint that was made, and verified. `fingerprint`: as a job of that shape gives it at that step."""

    name: SaveName
    fingerprint: str


def reshape(found: Found, storage: Storage, shape: Shape) -> Reshaped:
    """Writes the checkpoint. Raises `UserError` where there can be none, `CheckpointDamaged` where what is read is not
    what was written.
    """
    old, where = found.manifest, found.path
    if old.kind == "model":
        raise UserError(
            f"cannot reshape {where}: it holds a model without a training state; reshape one that a job saved."
        )
    if broken := broken_shape(shape):
        raise UserError(f"cannot reshape {where}: the shape cannot be: {broken}.")
    layout = in_shape(old.blocks, shape, where)
    tied = _tied(old, layout, where)
    source = _Source(found, layout)
    buffers, missed = _buffers(old, layout, where), _missed(old, layout, where)
    if storage.list():
        raise UserError(f"cannot reshape {where} to {storage.url}: something is there already; name a new folder.")
    source.check()
    incarnation = secrets.token_hex(8)
    name = SaveName.of(old.step, old.generation, found.name.save, incarnation, old.run)
    storage.prepare()
    give_back_freed_memory()
    try:
        files = [
            write_content(storage, name.folder, old.step, Author(f"reshape{one}", incarnation, one), content).name
            for one in range(layout.part.coordinates)
            for content in [source.content(one, _small(found.reader(), buffers, one))]
            if content.regions
        ]
        known = {field: getattr(old, field) for field in Manifest.model_fields}
        draft = Manifest(**known | {
            "release": RELEASE, "layout": LayoutEntry.of(layout, tied), "missed": missed,
            "buffers": tuple(dict.fromkeys(name for name, _ in buffers)),
            "frozen": _frozen(found, storage, incarnation), "files": (),
        })  # fmt: skip
        commit(storage, name.folder, draft, files)
        del source, draft  # with its readers, which know each other: they are not to lie beside what verifies
        gc.collect()
        return Reshaped(name, verify(look_into(storage, name).reader()).fingerprint)
    except BaseException:
        with suppress(StorageFailed):  # the first error is the one to be told
            delete(storage, name.folder)
        raise


def _tied(old: Manifest, layout: Layout, where: str) -> dict[str, str]:
    """Other names of tensors. Raises `UserError` for a tensor that stages of two places would have."""
    before, after = (
        {copy.name: slot.parameter.name for slot in slots_of_all_stages(one) for copy in slot.parameter.copies}
        for one in (old.blocks, layout)
    )
    places, found = layout.part.stages, dict[str, str]()
    for other, first in old.layout.tied.items():
        if other in before:
            continue
        same = (copy for copy, of in before.items() if of == first and number_of(copy) == number_of(other))
        name = next(same, first) if number_of(first) != number_of(other) else first
        found[other] = after.get(name, name)
        if places > 1 and place_of(other, places) != place_of(found[other], places):
            raise UserError(
                f'cannot reshape {where}: "{other}" and "{first}" are one tensor, and would be at two places of a '
                "pipeline; tie them by shoal.tied in the script that saves, and save anew."
            )
    return found | after


# ---- values


class _Source:
    """The blocks of a checkpoint as cells of another layout have them."""

    def __init__(self, found: Found, layout: Layout) -> None:
        """Raises `UserError` where they have state that cannot be cut anew."""
        self._reader, self._layout = found.reader(), layout
        self._where, self._there = found.path, found.manifest.blocks.part
        self._names = OldNames(found.manifest.blocks, layout)
        self._places = {
            slot.parameter.name: (stage, bucket, slot)
            for stage, buckets in enumerate(found.manifest.blocks.by_stage)
            for bucket in buckets
            for slot in bucket.slots
        }
        self._pieces = defaultdict[tuple[int, int], list[PieceEntry]](list)
        """By stage and bucket."""
        for file in found.manifest.files:
            for piece in file.pieces:
                self._pieces[file.coordinate // self._there.of_stage, piece.bucket].append(piece)
        for piece in chain.from_iterable(self._pieces.values()):
            self._check_elementwise(piece)
        for bucket in chain.from_iterable(layout.by_stage):
            self._check_alike(bucket)

    def _check_elementwise(self, piece: PieceEntry) -> None:
        for key, entry in piece.state.items():
            if entry.places is not None:
                raise UserError(
                    f'cannot reshape {self._where}: its optimizer keeps "{key}" not as one value for each element, as '
                    "8-bit state and Adafactor do, so it cannot be cut anew; export the model, or go on in the shape "
                    "that it has."
                )

    def _check_alike(self, bucket: Bucket) -> None:
        """Parameters of one bucket have state of one kind, with the same numbers."""
        names = [old for slot in bucket.slots for old in self._names.all_of(slot.parameter.name)]
        (first, like), *others = {self._of(name): name for name in names}.items()
        for name, piece in ((name, piece) for of, name in ((first, like), *others) for piece in self._pieces[of]):
            if not are_alike(piece, self._pieces[first][0]):
                raise UserError(
                    f'cannot reshape {self._where}: the optimizer\'s states of parameters "{like}" and "{name}" differ '
                    "in kind or count, and the new shape has both in one bucket; go on in the shape that it has."
                )

    def _of(self, name: str) -> tuple[int, int]:
        """Stage and bucket of a parameter."""
        stage, bucket, _ = self._places[name]
        return stage, bucket.index

    def _state(self, name: str) -> Mapping[str, Kind]:
        """What is kept of a parameter."""
        entries = self._pieces[self._of(name)][0].state
        return {key: (DTYPES[entry.dtype], entry.scalar) for key, entry in entries.items()}

    def check(self) -> None:
        """What no value is made of, and must be what was written all the same. Raises `CheckpointDamaged`."""
        self._reader.check_heads()
        for coordinate in range(self._there.coordinates):
            self._reader.at(coordinate).check_shared_numbers()
        for slot in slots_of_all_stages(self._layout):
            first, *others = self._names.copies_of(slot.parameter.name)
            for other in others:
                self._check_copies(first, other)

    def _check_copies(self, one: str, other: str) -> None:
        """Raises `UserError` where two parameters that become one have not the same bits."""
        (stage, bucket, slot), (place, at, where) = self._places[one], self._places[other]
        pairs = zip(*(self._there.firsts(of, bucket.division) for of in (stage, place)), strict=True)
        step, elements = READ_BYTES // bucket.wide_dtype.itemsize, slot.parameter.elements
        spans = [(first, min(first + step, elements)) for first in range(0, elements, step)]
        for (here, there), key, (first, last) in product(list(pairs), (PARAMETERS, *self._state(one)), spans):
            mine = self._reader.at(here).of_slot(bucket, slot, first, last, key)
            theirs = self._reader.at(there).of_slot(at, where, first, last, key)
            if tensor_bytes(mine) != tensor_bytes(theirs):
                values = f"their optimizer states ({key})" if key != PARAMETERS else "their values"
                raise UserError(
                    f'cannot reshape {self._where}: parameters "{one}" and "{other}" are tied, and the new shape has '
                    f"both as one, but {values} differ; go on in the shape that it has."
                )

    def content(self, coordinate: int, small: Small) -> MadeContent:
        """What a coordinate writes: its blocks that none before it has, and `small`."""
        layout = self._layout.at(coordinate)
        buckets = [one for one in layout.buckets if layout.part.is_first(one.division)]

        def kinds(bucket: Bucket) -> Mapping[str, Kind]:
            return self._state(self._names.all_of(bucket.slots[0].parameter.name)[0])

        return made_content(layout, buckets, kinds, partial(self._part, layout.part), small)

    def _part(self, part: CellPart, name: str, key: str, first: int, last: int) -> Tensor:  # (last - first,), or ()
        """Elements of what a place has of a parameter, or of its state, or the one number that they share."""
        place, old = self._names.of(name, part.piece(Division(by_expert=True)))
        stage, bucket, slot = self._places[old]
        dtype, is_number = self._state(old)[key] if key != PARAMETERS else (bucket.dtype, False)

        def read(expert: int, tensor: int, start: int, stop: int) -> Tensor:  # (stop - start,), or ()
            return self._reader_of(stage, expert, tensor).of_slot(bucket, slot, start, stop, key)

        if is_number:
            return read(place, 0, first, last)
        recut = Recut(slot.parameter, self._there, place, part, READ_BYTES // dtype.itemsize)
        return recut.taken(read, first, torch.empty(last - first, dtype=dtype))

    def _reader_of(self, stage: int, expert: int, tensor: int) -> Reader:
        """As the first coordinate sees it that has such a part of a stage."""
        there = self._there
        return self._reader.at(stage * there.of_stage + expert * there.contexts * there.parts + tensor)


# ---- beside the blocks


def _missed(old: Manifest, layout: Layout, where: str) -> tuple[MissRun, ...]:
    """In the order of the new layout. Raises `UserError` where parameters that become one have missed others."""
    before = Misses.from_runs(old.blocks, old.missed).by_place(old.blocks)
    names, found = OldNames(old.blocks, layout), list[Missed]()
    for _, place, slot in numbered(layout):
        first, *others = names.sources(slot.parameter.name, place)
        if other := next((one for one in others if before[one] != before[first]), None):
            both = " and ".join(
                f'"{name}" of place {place}' if other[0] else f'"{name}"' for place, name in (first, other)
            )
            raise UserError(
                f"cannot reshape {where}: parameters {both} have missed different numbers of updates, and the new "
                "shape has both as one; go on in the shape that it has."
            )
        found.append(before[first])
    return Misses(tuple(found)).runs()


Buffers = Mapping[tuple[str, int], str]
"""By a buffer's name and a coordinate: the tensor that it is there."""


def _buffers(old: Manifest, layout: Layout, where: str) -> Buffers:
    """For every coordinate of the new shape. Raises `UserError` for one that processes of a stage have not alike, or
    only some experts of a list.
    """
    found, there, here = dict[tuple[str, int], str](), old.blocks.part, layout.part
    before, after = ListsOfExperts(old.blocks), ListsOfExperts(layout)
    sources = defaultdict[tuple[str, int], dict[int, str]](dict)
    for coordinate, name in product(range(there.coordinates), old.buffers):
        if (tensor := buffer_tensor(name, coordinate)) in old.tensors:
            sources[before.whole_name(name, coordinate), coordinate // there.of_stage][coordinate] = tensor
    for (whole, stage), tensors in sources.items():
        place = stage if there.stages == here.stages else place_of(whole, here.stages)
        for coordinate in replace(here, coordinate=place * here.of_stage).mates:
            local, part = after.name_at(whole, coordinate), coordinate % here.parts
            if local is None:
                continue
            same = [tensor for one, tensor in tensors.items() if here.parts != there.parts or one % there.parts == part]
            alike = [some for some in ([*tensors.values()], same) if _are_equal(old, some)]
            if not alike:
                raise UserError(
                    f'cannot reshape {where}: buffer "{whole}" differs between the processes of a cell, and nothing '
                    "says how it is cut; give it what all have alike, or make it one that is not persistent."
                )
            found[local, coordinate] = alike[0][0]
    for name, coordinate in found:
        if any((name, one) not in found for one in replace(here, coordinate=coordinate).mates):
            raise UserError(
                f'cannot reshape {where}: buffer "{name}" is one of some experts of a list, and others have none such; '
                "expected experts that are alike."
            )
    return found


def _are_equal(old: Manifest, names: Sequence[str]) -> bool:
    """Whether tensors have the same bits."""
    entries = [old.tensors[name][1] for name in names]
    return len({(one.dtype, one.shape, one.checksum) for one in entries}) == 1


def _small(reader: Reader, buffers: Buffers, coordinate: int) -> Small:
    """What stands beside the blocks of a coordinate: its buffers, and with the first one's all that a job has once."""
    known, of_job = reader.manifest.tensors, reader.manifest.layout.coordinates
    names = {buffer_tensor(name, coordinate): source for (name, of), source in buffers.items() if of == coordinate}
    if coordinate == 0:
        all_buffers = {buffer_tensor(name, one) for name in reader.manifest.buffers for one in range(of_job)}
        names |= {name: name for name in known if name not in all_buffers}

    def read(name: str) -> Tensor:  # of its own shape
        return reader.tensors([name])[name]

    entries = {name: (source, known[source][1]) for name, source in names.items()}
    return {name: (DTYPES[one.dtype], one.shape, partial(read, source)) for name, (source, one) in entries.items()}


def _frozen(found: Found, storage: Storage, incarnation: str) -> FrozenEntry | None:
    """Written tensor by tensor."""
    entry, reader = found.manifest.frozen, found.reader()
    if entry is None:
        return None
    named = {
        name: torch.empty(one.shape, dtype=DTYPES[one.dtype], device="meta") for name, one in entry.tensors.items()
    }

    def reading(_: Sequence[Tensor]) -> Iterator[Tensor]:  # each of its own shape
        return (reader.frozen([name])[name] for name in named)

    return write_frozen(storage, named, incarnation, reading)
