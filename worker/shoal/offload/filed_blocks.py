"""Held blocks whose state lies in a file; the update carries it through memory piece by piece.

state in → the optimizer's own step on this piece → state out: the arithmetic is that of `HeldBlocks`, on the training
thread, and so are the bits. What fills send and saves and digests read goes through the same few buffers. A file that
fails is an exception on the training thread; within an update this worker then counts as dead, and mirrors go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import NO_BLOCKS, Runs
from torch import Tensor

from shoal.blocks.held import (
    MASTER,
    HeldBlocks,
    OnUpdated,
    first_weights,
    lie_together,
    stretch_of,
    unheard,
)
from shoal.blocks.held_weights import HeldWeights
from shoal.blocks.loaded_state import State, probe_state
from shoal.blocks.optimizer_step import Segment
from shoal.blocks.state_home import WEIGHTS
from shoal.blocks.values import BlockValues, StretchValues
from shoal.core.layout import Bucket, Layout, Stretch
from shoal.offload.held_piece import HeldPiece
from shoal.offload.piece_store import PieceStore
from shoal.offload.transfers import Buffer
from shoal.optim.hyper import has_turn
from shoal.optim.twin import may_step_in_parts, take_over_hyper_parameters
from shoal.process.host_memory import host_memory
from shoal.process.logs import get_logger

PORTION_PIECES = 4
"""Of a checkpoint, that are read at one time."""
SLOW_BYTES_PER_SECOND = 200e6
"""Half of what a disk for optimizer state has at least."""
TELLING_BYTES = 64 << 20
"""Fewer say nothing of a disk's speed."""

log = get_logger("shoal.offload")


def check_steps_in_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UserError` for an optimizer whose step must be one for all parameters."""
    if not may_step_in_parts(optimizer):
        raise UserError(
            f"optimizer state in files is updated piece by piece, and {type(optimizer).__name__} may count its "
            "steps; use a class of torch.optim, or keep the state in memory "
            '(`zero_optimization.offload_optimizer.device`: "none").'
        )


class FiledBlocks(HeldBlocks):
    """See the module's text."""

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        parameters: BlockValues,
        tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
        store: PieceStore,
        keeps_weights: bool = False,
    ) -> None:
        super().__init__(layout, optimizer, parameters, tensors, keeps_weights)
        self.store = store
        self._awaited = NO_BLOCKS
        self._known: dict[tuple[int, torch.dtype], int] = {}
        self._slowness_is_said = False
        self._memory = HeldWeights(layout, self)

    # ---- what it takes

    def state_bytes(self) -> int:
        return self.store.file_bytes() + self.store.shared_bytes()

    def bytes_by_place(self) -> dict[str, int]:
        in_memory = self.store.shared_bytes() + self.store.transfers.bytes
        return {"state": in_memory, "state_files": self.store.file_bytes()}

    def _reserve(self) -> None:
        """Space for all that is held and awaited, state that an optimizer makes later included."""
        held = [(one, self.layout.buckets[one.bucket]) for one in self.layout.stretches(self.runs | self._awaited)]
        self.store.file.reserve(
            sum(one.blocks * of.block_elements * self._bytes_of_an_element(of) for one, of in held if not of.is_frozen)
        )

    def _bytes_of_an_element(self, bucket: Bucket) -> int:
        kind = bucket.group, bucket.dtype
        if kind not in self._known:
            state = probe_state(self._user, bucket, 2, self.layout.device)
            self._known[kind] = sum(value.dtype.itemsize for value in state.values() if value.dim())
            self._known[kind] += bucket.has_masters * bucket.wide_dtype.itemsize
        return self._known[kind]

    # ---- to hold, to take, to free

    def hold(self, runs: Runs, first: StretchValues | None = None) -> None:
        kept = self._parameters if self.keeps_weights else None

        def state_of(stretch: Stretch) -> State:
            return {**self.loaded.of(stretch), **first_weights(self.layout, stretch, first, None)}

        stretches = self.layout.stretches(runs)
        self._add({one: first_weights(self.layout, one, first, kept) for one in stretches if self.keeps_weights}, runs)
        self._put(self.store.cells(stretches), state_of)

    def _add(
        self,
        states: Mapping[Stretch, State],  # each (elements of the stretch,), or () for what all its blocks share
        runs: Runs,
    ) -> None:
        """These are held: parameters in memory, where they are with the state, and space in the file for the rest."""
        kept = [self._in_memory(stretch, state) for stretch, state in states.items() if self.keeps_weights]
        self._regroup(sorted([*self._segments, *kept], key=stretch_of), self.runs | runs)
        self._join_where(lie_together)
        self._reserve()

    def _in_memory(
        self,
        stretch: Stretch,
        state: State,  # each (elements of the stretch,), or () for what all its blocks share
    ) -> Segment:
        has_master = MASTER in state and self.layout.buckets[stretch.bucket].has_masters
        return self._segment(stretch, {WEIGHTS: self._weights(stretch, state, has_master)})

    def _put(self, stretches: Sequence[Stretch], state_of: Callable[[Stretch], State]) -> None:
        buckets = self.layout.buckets
        self.store.put(stretches, lambda stretch: self._home.bring(buckets[stretch.bucket], state_of(stretch)))
        self.store.grow_together(lambda stretch: not self.keeps_weights or len(self._memory.parts(stretch)) == 1)

    def expect(self, runs: Runs) -> None:
        super().expect(runs)
        self._awaited = runs
        self._reserve()

    def memory_for(self, stretch: Stretch, key: str, dtype: torch.dtype) -> Tensor:  # (elements,) of `dtype`
        """Memory of its own, until it is taken; parameters stay where they are received."""
        if key == WEIGHTS:
            return super().memory_for(stretch, key, dtype)
        return host_memory(stretch.blocks * self.layout.buckets[stretch.bucket].block_elements, dtype)

    def take(
        self,
        states: Mapping[Stretch, State],  # each (elements of the stretch,), or () for what all its blocks share
    ) -> None:
        taken = self.layout.runs(states)
        given = {cell: stretch for stretch in states for cell in self.store.cells([stretch])}

        def part(cell: Stretch) -> State:
            size = self.layout.buckets[cell.bucket].block_elements
            first, stop = ((at - given[cell].start) * size for at in (cell.start, cell.stop))
            state = {key: value for key, value in states[given[cell]].items() if key != WEIGHTS}
            return {key: value[first:stop] if value.dim() else value for key, value in state.items()}

        self._keep_only(self.runs - taken)
        self._add(states, taken)
        self._put(list(given), part)

    def _keep_only(self, runs: Runs) -> None:
        if not self.runs <= runs:
            self.store.keep_only(self.layout.stretches(runs))
            super()._keep_only(runs)

    # ---- to read

    def states(
        self, runs: Runs, with_weights: bool = False
    ) -> dict[Stretch, State]:  # each (elements of its stretch,), or ()
        """In memory of their own, all at one time: for as few blocks as a slice of a fill has."""
        found: dict[Stretch, State] = {}
        for stretch, state in self.stream(runs):
            found[stretch] = {key: value.clone() if value.dim() else value for key, value in state.items()}
            if with_weights and self.keeps_weights and not self.layout.buckets[stretch.bucket].has_masters:
                found[stretch][WEIGHTS] = self._memory.of(stretch)
        return found

    def outline(self, runs: Runs) -> dict[Stretch, State]:  # each (elements,) without values, or ()
        return {part.stretch: part.outline() for part in self.store.parts_of(self.layout.stretches(runs))}

    def stream(self, runs: Runs) -> Iterator[tuple[Stretch, State]]:  # each (elements of its stretch,), or ()
        return self.store.stream(self.layout.stretches(runs))

    def portions(self, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
        found = self.store.cells(stretches)
        for first in range(0, len(found), PORTION_PIECES):
            yield found[first : first + PORTION_PIECES]

    # ---- the update

    def apply(
        self,
        gradients: BlockValues,  # reduced; what is not held is not read
        scale: float,
        on_updated: OnUpdated = unheard,
    ) -> None:
        check_steps_in_parts(self._user)
        self._begin_change()
        take_over_hyper_parameters(self._twin, self._user)
        transfers = self.store.transfers
        turns = [has_turn(self._twin.param_groups[bucket.group]) for bucket in self.layout.trained.buckets]
        pieces = [  # frozen ones come last
            one for one in self.store.pieces[::-1] if one.stretch.bucket < len(turns) and turns[one.stretch.bucket]
        ]
        before = transfers.moved, transfers.seconds
        for index, buffer in enumerate(transfers.carry([piece.ranges() for piece in pieces], self._most_bytes(pieces))):
            self._look_ahead(pieces[index : index + 2], gradients)
            self._apply_to_piece(pieces[index], buffer, gradients, scale)
            bucket = pieces[index].stretch.bucket
            if index + 1 < len(pieces) and pieces[index + 1].stretch.bucket != bucket:
                on_updated(bucket)
        on_updated(0)
        self._measure(transfers.moved - before[0], transfers.seconds - before[1])

    def _most_bytes(self, pieces: Sequence[HeldPiece]) -> int:
        """Of a buffer that holds any of these, with state that the optimizer makes now."""
        buckets = self.layout.buckets
        needed = (one.elements * self._bytes_of_an_element(buckets[one.stretch.bucket]) for one in pieces)
        return max(map(max, needed, (one.bytes for one in pieces)), default=0)

    def _look_ahead(self, pieces: Sequence[HeldPiece], gradients: BlockValues) -> None:
        """These are updated next: the first now."""

    def _apply_to_piece(self, piece: HeldPiece, buffer: Buffer, gradients: BlockValues, scale: float) -> None:
        state = piece.state(buffer)
        if self.keeps_weights:
            (state[WEIGHTS],) = self._memory.parts(piece.stretch)
        segment = self._segment(piece.stretch, state)
        self._apply_to([segment], gradients, scale)
        state = self._state(segment)
        state.pop(WEIGHTS, None)
        self.store.keep(piece, buffer, state)
        self._twin.state.pop(segment.parameter, None)

    def _measure(self, moved: int, seconds: float) -> None:
        self.bytes_per_second = moved / seconds if moved and seconds else 0.0
        if self._slowness_is_said or moved < TELLING_BYTES or self.bytes_per_second >= SLOW_BYTES_PER_SECOND:
            return
        self._slowness_is_said = True
        log.warning(
            "offload_is_slow", path=self.store.file.folder, bytes_per_second=round(self.bytes_per_second),
            means=f"an update waits {seconds:.1f} s for the disk, which reads and writes "
                  f"{self.bytes_per_second / 1e6:,.0f} MB/s; expected {SLOW_BYTES_PER_SECOND / 1e6:,.0f} or more",
        )  # fmt: skip
