"""A checkpoint's tensors whole and by the model's own names: for export, and for a model with another layout.

Bucket by bucket, so that memory holds one bucket and not the model; where each coordinate of a cell has a part of it,
those of all. Names that are tied to another are not among them; the manifest says which they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks.flat import views
from shoal.blocks.loaded_state import AVERAGE, MASTER
from shoal.checkpoint.manifest import Manifest, buffer_tensor
from shoal.checkpoint.reader import Reader, Window
from shoal.core.container import DTYPES
from shoal.core.layout import Bucket, Layout, ListsOfExperts, Slot, slots_of_all_stages
from shoal.core.misses import Missed, Misses
from shoal.core.units import named_state
from shoal.optim.state_form import is_packed
from shoal.process.host_memory import ReusedMemory, tensor_bytes

BEGINNING_WITH_ZEROS = frozenset(("Adam", "AdamW", "Adamax", "RAdam", "Adadelta", "RMSprop"))
"""Optimizers to which a state of zeros is the same as none."""


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor that a checkpoint has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def names(manifest: Manifest) -> dict[str, Known]:
    """All tensors of the model, of all stages: trained parameters, frozen ones, persistent buffers."""
    found = {name: Known(shape, dtype) for name, shape, dtype in manifest.blocks.wholes()}
    beside = dict(manifest.frozen.tensors) if manifest.frozen is not None else {}
    lists = ListsOfExperts(manifest.blocks)
    for coordinate, name in product(range(manifest.layout.coordinates), manifest.buffers):
        if (tensor := buffer_tensor(name, coordinate)) in manifest.tensors:
            beside.setdefault(lists.whole_name(name, coordinate), manifest.tensors[tensor][1])
    return found | {name: Known(entry.shape, DTYPES[entry.dtype]) for name, entry in beside.items()}


def shows_masters(dtype: torch.dtype | None) -> bool:
    """Whether tensors of this dtype can be more exact than parameters in half precision."""
    return dtype in (torch.float32, torch.float64)


def has_averages(manifest: Manifest) -> bool:
    """Whether it has averages of weights."""
    return any(AVERAGE in piece.state for file in manifest.files for piece in file.pieces)


def tensors(reader: Reader, exact: bool = False, averaged: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every one of `names`, in their order, verified. A parameter is there until the next is asked for: clone what
    is to last.

    `exact`: parameters in half precision as their master weights, where there are such. `averaged`: parameters as their
    averages, which there are, in the wide dtype of the bucket. Raises `UserError` where the parts of a cell do not make
    a whole.
    """
    experts, memory, joined = reader.blocks.part.experts, defaultdict[int, ReusedMemory](ReusedMemory), ReusedMemory()
    for stage, bucket in reader.manifest.blocks.of_stages():
        flats = [
            _flat(one, bucket, exact, averaged, memory[piece])
            for piece, one in enumerate(_with_parts(reader, stage, bucket))
        ]
        for slot, *parts in zip(bucket.slots, *(views(bucket, flat) for flat in flats), strict=True):
            wholes = slot.parameter.joined(parts, experts, joined.take)
            yield from zip(slot.parameter.whole_names(experts), wholes, strict=True)
    yield from reader.frozen().items()
    yield from _buffers(reader).items()


def _with_parts(reader: Reader, stage: int, bucket: Bucket) -> list[Reader]:
    """As those coordinates see it that together have the whole of a bucket."""
    return [reader.at(one) for one in reader.manifest.blocks.part.firsts(stage, bucket.division)]


def _buffers(reader: Reader) -> dict[str, Tensor]:
    """What all coordinates of a cell that have it have alike, as in one process. Raises `UserError`."""
    found, lists = dict[str, Tensor](), ListsOfExperts(reader.manifest.blocks)
    for coordinate in range(reader.blocks.part.coordinates):
        for name, value in reader.at(coordinate).buffers().items():
            whole = lists.whole_name(name, coordinate)
            first = found.setdefault(whole, value)
            check_alike(whole, bytes(tensor_bytes(value)) == bytes(tensor_bytes(first)), reader.where)
    return found


def check_cuts(layout: Layout, purpose: str) -> None:
    """Raises `UserError` where nothing says how the parts of a cell's processes make a whole. `purpose`: of that, as in
    `export the model`.
    """
    slots = [slot.parameter for slot in slots_of_all_stages(layout)]
    if expert := next((one.name for one in slots if one.division.by_expert and one.dealt is None), ""):
        raise UserError(f"cannot {purpose}: {without_number(expert)}")
    if uncut := next((one.name for one in slots if one.own and one.cut is None), ""):
        raise UserError(f"cannot {purpose}: {without_cut(uncut)}")


def without_cut(name: str) -> str:
    """Why the parts of a parameter make no whole, and what to do."""
    return (
        f'each process of a cell has a part of parameter "{name}", and nothing says along which dimension it is cut; '
        "mark it by shoal.sharded(parameter, dim=…) and save anew."
    )


def without_number(name: str) -> str:
    """Why an expert's parameter is none of the whole model, and what to do."""
    return (
        f'each place of the experts has parameter "{name}" of its own, and nothing says which experts it is of; keep '
        'experts in a ModuleList that has nothing else, or mark it by shoal.sharded(parameter, over="expert", dim=…), '
        "and save anew."
    )


def check_alike(name: str, is_alike: bool, of: str) -> None:
    """Raises `UserError` for a buffer that is not the same on all coordinates of a cell."""
    if not is_alike:
        raise UserError(
            f'cannot export {of}: buffer "{name}" differs between the processes of a cell, and nothing says how it is '
            "cut; let the script save it, or give it what all have alike."
        )


def _flat(reader: Reader, bucket: Bucket, exact: bool, averaged: bool, memory: ReusedMemory) -> Tensor:  # (elements,)
    if averaged or (exact and bucket.has_masters):
        return _wide(reader, bucket, AVERAGE if averaged else MASTER, memory)
    return _parameters(reader, bucket, memory)


def _parameters(reader: Reader, bucket: Bucket, memory: ReusedMemory) -> Tensor:  # (elements,) of the bucket's dtype
    window = Window(reader.blocks.whole(bucket), bucket, memory)
    reader.parameters([reader.blocks.whole(bucket)], window)
    return window.values


def _wide(
    reader: Reader, bucket: Bucket, key: str, memory: ReusedMemory
) -> Tensor:  # (elements,) of the bucket's wide dtype, or its own
    """Masters or averages; the parameters where there are none."""
    layout, found = reader.blocks, memory.take((bucket.elements,), bucket.wide_dtype)
    for stretch, state in reader.states([layout.whole(bucket)], only=key).items():
        if key not in state:
            return _parameters(reader, bucket, memory)
        found[slice(*layout.elements(stretch))] = state[key]
    return found


def states(reader: Reader) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Optimizer states by parameter: its state in its own shape; numbers that all elements share as they are, less the
    updates that it has missed. One that was never used has zeros where a state begins with them, so that all names are
    found; else it has none.

    Master weights and averages are not among them: they are parameters. Nor is 8-bit state, of which elements of
    several parameters share a scale.
    """
    classes, layout = reader.manifest.classes, reader.manifest.blocks
    missed = Misses.from_runs(layout, reader.manifest.missed).by_place(layout)
    for stage, bucket in layout.of_stages():
        kind = classes[bucket.group] if classes else reader.manifest.optimizer
        parts = [_state_of(one, bucket) for one in _with_parts(reader, stage, bucket)]
        places = range(layout.part.pieces(bucket.division.of_experts))
        for slot in bucket.slots:
            its_own = [missed[place, slot.parameter.name] for place in places]
            found = _joined(slot, parts, its_own, layout.part.experts)
            for name, state, its in zip(*found, strict=True):
                yield name, state if kind in BEGINNING_WITH_ZEROS or not its.is_new else {}


def _joined(
    slot: Slot,
    parts: Sequence[Mapping[str, Tensor]],  # each (elements of the bucket,), or one number
    missed: Sequence[Missed],
    experts: int,
) -> tuple[list[str], list[dict[str, Tensor]], Sequence[Missed]]:
    """Names of the model's tensors that are a parameter, the state of each, and what it has missed. `parts`: by piece,
    the state of the bucket. `missed`: by place of the experts.
    """
    names, (first, stop) = slot.parameter.whole_names(experts), (slot.start, slot.start + slot.parameter.elements)
    found: list[dict[str, Tensor]] = [{} for _ in names]
    are_apart, least = len(names) > 1, min(missed, key=lambda one: (one.is_new, one.updates))
    for key, like in parts[0].items():
        if like.dim():
            own = [one[key][first:stop].view(slot.parameter.shape) for one in parts]
            values: Iterable[Tensor] = slot.parameter.joined(own, experts)
        else:
            of_places = parts[:: len(parts) // len(missed)]
            counts = [one[key] - its.updates for one, its in zip(of_places, missed, strict=True)]
            values = counts if are_apart else [max(counts)]
        for state, value in zip(found, values, strict=True):
            state[key] = value
    return names, found, missed if are_apart else [least]


def _state_of(reader: Reader, bucket: Bucket) -> dict[str, Tensor]:
    """By key, (elements of the bucket,), or one number."""
    flats: dict[str, Tensor] = {}
    for stretch, state in reader.states([reader.blocks.whole(bucket)]).items():
        if is_packed(state):
            continue
        for key, value in state.items():
            if key in (AVERAGE, MASTER):
                continue
            if value.dim() == 0:
                flats[key] = value
                continue
            flat = flats.setdefault(key, torch.zeros(bucket.elements, dtype=value.dtype))
            flat[slice(*reader.blocks.elements(stretch))] = value
    return flats


def tied_names(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Other names of parameters and persistent buffers of these modules → the first name of the same tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in chain.from_iterable(map(named_state, modules)):
        if isinstance(tensor, Tensor) and first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    return tied
