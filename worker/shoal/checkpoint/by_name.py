"""A checkpoint's tensors by name, as values that parameters in another layout begin with: read in parts.

So a worker has never more of them than of values that it makes: what it keeps, and a tensor or a stretch of blocks.
Every part is verified. Names that are tied in the module stand for the one under which the module knows the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks.loaded_state import MASTER
from shoal.checkpoint.layout_check import Match, match
from shoal.checkpoint.manifest import StateEntry
from shoal.checkpoint.named import Known, names, tied_names
from shoal.checkpoint.reader import Reader
from shoal.core.layout import Bucket, Slot, Stretch
from shoal.core.units import named_parameters
from shoal.exchange.module_buffers import persistent_buffers

PART_ELEMENTS = 1 << 20
"""Of tensors that are compared, at a time."""


class TakenTensors:
    """`GivenValues` of a checkpoint. `taken`: the model's names, each with the checkpoint's."""

    def __init__(self, reader: Reader, taken: Mapping[str, str]) -> None:
        self._reader, self._taken = reader, taken
        buckets = reader.manifest.blocks.buckets
        self._slots = {slot.parameter.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self._states: dict[int, Mapping[str, StateEntry]] = {}
        """By bucket what all its pieces have, of an import."""
        if reader.manifest.kind == "model":
            self._states = {one.bucket: one.state for file in reader.manifest.files for one in file.pieces}
        self._whole: tuple[str, Tensor] | None = None
        """A tensor beside the blocks, which can be read whole alone."""

    def __contains__(self, name: object) -> bool:
        return name in self._taken

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of the checkpoint's dtype, or wider
        """Elements of a tensor, flat. Raises `CheckpointDamaged` where they are not what was written."""
        theirs = self._taken[name]
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
        stretch, start = self._stretch_of(*self._slots[self._taken[name]], first, last)
        found = self._reader.states([stretch], only=key)
        parts = [found[one][key] for one in sorted(found)]
        return parts[0] if parts[0].dim() == 0 else torch.cat(parts)[start : start + last - first]

    # ---- reading

    def _stretch_of(self, bucket: Bucket, slot: Slot, first: int, last: int) -> tuple[Stretch, int]:
        """Blocks that hold elements of a tensor, and where these begin in them."""
        size = self._reader.manifest.blocks.block_elements
        start, stop = slot.start + first, slot.start + last
        return Stretch(bucket.index, start // size, -(-stop // size)), start % size

    def _of_blocks(self, bucket: Bucket, slot: Slot, first: int, last: int) -> Tensor:  # (last - first,)
        size = self._reader.manifest.blocks.block_elements
        stretch, start = self._stretch_of(bucket, slot, first, last)
        values = self._masters(stretch) if bucket.has_masters else None
        if values is None:
            window = _Window(stretch, torch.empty(stretch.blocks * size, dtype=bucket.dtype), size)
            self._reader.parameters([stretch], window)
            values = window.values
        return values[start : start + last - first]

    def _masters(self, stretch: Stretch) -> Tensor | None:  # (elements,), where there are such
        states = self._reader.states([stretch], only=MASTER)
        if not states or any(MASTER not in state for state in states.values()):
            return None
        return torch.cat([states[one][MASTER] for one in sorted(states)])

    def _beside(self, name: str) -> Tensor:  # of its own shape
        found = self._reader.frozen([name])
        return found[name] if name in found else self._reader.tensors([f"buffer/{name}"])[f"buffer/{name}"]


class _Window:
    """`BlockValues` of the blocks that are read."""

    def __init__(
        self,
        stretch: Stretch,
        values: Tensor,  # (elements,)
        size: int,
    ) -> None:
        self._stretch, self.values, self._size = stretch, values, size

    def of(self, stretch: Stretch) -> Tensor:  # (elements,)
        return self.range(stretch.bucket, stretch.start * self._size, stretch.stop * self._size)

    def range(self, bucket: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        assert bucket == self._stretch.bucket
        first = self._stretch.start * self._size
        return self.values[start - first : stop - first]


def take_by_name(reader: Reader, module: nn.Module, allow: Sequence[str]) -> tuple[Match, TakenTensors]:
    """What matches. Raises `UserError` as `match` does, and where what the module ties are different tensors."""
    ours = {**dict(named_parameters(module)), **persistent_buffers(module)}
    tied = tied_names(module)
    found = names(reader.manifest)
    for name in found:
        if tied.get(name) in found:
            _check_tied(reader, found, name, tied[name])
    theirs = {tied[name]: (name, known.shape) for name, known in found.items() if name in tied}
    theirs |= {name: (name, known.shape) for name, known in found.items() if name not in tied}
    shapes = {name: shape for name, (_, shape) in theirs.items()}
    matched = match(shapes, {name: tuple(tensor.shape) for name, tensor in ours.items()}, allow, reader.where)
    taken = TakenTensors(reader, {name: theirs[name][0] for name in matched.taken})
    is_whole = not (matched.new or matched.missing)
    return replace(matched, has_optimizer=is_whole and taken.has_states), taken


def _check_tied(reader: Reader, found: Mapping[str, Known], name: str, first: str) -> None:
    """Only one of two tensors that the module ties can be taken, so the checkpoint must have the same bits of both."""
    values, elements = TakenTensors(reader, {name: name, first: first}), math.prod(found[name].shape)

    def is_alike(start: int) -> bool:
        one, other = (values.part(of, start, min(elements, start + PART_ELEMENTS)) for of in (name, first))
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    if found[name] != found[first] or not all(map(is_alike, range(0, elements, PART_ELEMENTS))):
        raise UserError(
            f'{reader.where} does not fit: "{first}" and "{name}" are one tensor in the model and differ in the '
            "checkpoint. Build the model without the tie, or import one in which they are the same."
        )
