"""Where a worker keeps the state of its held blocks, as its config says; and the home of a state that lies in a file.

`held_blocks` makes held blocks with the home of that place: in memory or in a file, and updated beside the parameters
or on the host of their device, each of both with each. The home in memory is in blocks/state_home.py.

`InFile` is a `StateHome`, of which an update carries the state through memory piece by piece: state in → the
optimizer's own step on this piece → state out. The arithmetic is that of state in memory, on the training thread, and
so are the bits. While a piece is updated, what the next one needs besides comes to the place of the update, and buffers
before and after it are written and read. What fills send and saves and digests read goes through the same few buffers.
A file that fails is an exception on the training thread; within an update this worker then counts as dead, and mirrors
go on. How a file is laid out and read is in state_pieces.py and state_file.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.blocks.held import HeldBlocks
from shoal.blocks.loaded_state import AVERAGE, MASTER, WEIGHTS, State, probe_state
from shoal.blocks.optimizer_step import Segment
from shoal.blocks.segments import HeldWeights, Segments
from shoal.blocks.state_home import InMemory, OnUpdated, StateSource
from shoal.blocks.update_place import BesideParameters, Coming, CopiesOnHost, OnTheHost, UpdatePlace
from shoal.blocks.values import BlockValues
from shoal.core.layout import Bucket, Layout, Stretch
from shoal.offload.state_file import StateFile
from shoal.offload.state_pieces import HeldPiece, PieceStore
from shoal.offload.transfers import Buffer
from shoal.optim.hyper import has_turn
from shoal.optim.several import title_of
from shoal.optim.twin import may_step_in_parts, whole_updates
from shoal.process.device import HOST, Device

log = get_logger("shoal.offload")


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where optimizer state and master weights are: beside the parameters, if nothing else is said."""

    folder: str | None = None
    """In a file there."""
    on_host: bool = False
    """In host memory: where parameters are on the host, that is beside them."""
    device: Device = HOST
    """Where forwards compute."""
    parameters_on_host: bool = False
    """Whether the parameters of held blocks are in host memory too."""
    copies_on_host: bool = False
    """Whether copies of blocks that others own are in host memory, parameters with them, where that is apart."""


def held_blocks(
    place: StatePlace,
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    parameters: BlockValues,
    tensors: Mapping[str, Tensor],  # each of its parameter's shape and dtype
    keeps_weights: bool = False,
) -> HeldBlocks:
    """Of a worker that keeps its state there. Raises `UserError` where it cannot."""
    device, parameters_on_host = place.device, place.parameters_on_host and not place.device.on_host
    if parameters_on_host:
        _check_parameters_on_host(place, keeps_weights)
    if place.folder is not None:
        check_steps_in_parts(optimizer)
    updated_on_host = not device.on_host and (place.on_host or place.folder is not None)
    update_place: UpdatePlace
    update_place = OnTheHost(device, parameters_on_host) if updated_on_host else BesideParameters(layout, optimizer)
    segments = Segments(layout, optimizer, parameters, update_place, keeps_weights)
    if place.copies_on_host and device.on_host:
        log.warning("mirrors_on_host", means="the model is on the CPU, whose memory is the host's: nothing is saved")
    elif place.copies_on_host:
        check_copies_in_parts(optimizer)
        segments.copies = CopiesOnHost(layout, optimizer, device)
    if place.folder is None:
        return HeldBlocks(InMemory(segments), tensors)
    return HeldBlocks(InFile(segments, PieceStore(layout, StateFile(place.folder))), tensors)


def _check_parameters_on_host(place: StatePlace, keeps_weights: bool) -> None:
    """Raises `UserError` where they cannot be there."""
    given = f'`zero_optimization.offload_param.device` is "cpu" and the model is on {place.device.kind}'
    if not keeps_weights:
        raise UserError(
            f"{given}; below ZeRO stage 3 every worker has all parameters there. Set `zero_optimization.stage`: 3, or "
            "leave `offload_param` out."
        )
    if not place.on_host and place.folder is None:
        raise UserError(
            f"{given}; parameters are updated where they lie, so their optimizer state cannot be on the device: set "
            '`zero_optimization.offload_optimizer: {"device": "cpu"}`, or "nvme" with a folder.'
        )


PORTION_PIECES = 4
"""Of a checkpoint, that are read at one time."""
SLOW_BYTES_PER_SECOND = 200e6
"""Half of what a disk for optimizer state has at least."""
TELLING_BYTES = 64 << 20
"""Fewer say nothing of a disk's speed."""


def check_steps_in_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UserError` for an optimizer whose step must be one for all parameters, or that updates whole tensors."""
    if found := next(filter(None, whole_updates(optimizer)), None):
        raise UserError(
            f'`zero_optimization.offload_optimizer.device` is "nvme", and {found.name} reads its state before the vote '
            'of a step and again after it, which files are too slow for; set "cpu", or leave `offload_optimizer` out.'
        )
    if not may_step_in_parts(optimizer):
        raise UserError(
            f"optimizer state in files is updated piece by piece, and {title_of(optimizer)} may count its "
            "steps; use a class of torch.optim, or keep the state in memory "
            '(`zero_optimization.offload_optimizer.device`: "none").'
        )


def check_copies_in_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UserError` as `check_steps_in_parts`, for mirrors on the host."""
    if found := next(filter(None, whole_updates(optimizer)), None):
        why = f"{found.name} updates whole tensors, whose state is read before the vote of a step and again after it"
    elif not may_step_in_parts(optimizer):
        why = (
            f"mirrors on the host are updated piece by piece, and {title_of(optimizer)} may count its steps; use a "
            "class of torch.optim"
        )
    else:
        return
    raise UserError(f'`shoal.mirrors_on` is "host", and {why}; set "device", or leave `mirrors_on` out.')


class AveragesInFile(HeldWeights):
    """Averages of weights, in the dtype of the parameters, read from the file past the buffers of updates: by any
    thread, as nothing that others ask for is written or moved before they have voted.
    """

    def __init__(self, segments: Segments, store: PieceStore) -> None:
        super().__init__(segments)
        self._store, self._weights = store, HeldWeights(segments) if segments.keeps_weights else segments.parameters

    def parts(self, stretch: Stretch) -> list[Tensor]:  # each (elements,); together the stretch's
        """Copies, or views of weights, one for each piece that the stretch lies in. Raises `OffloadFailed`."""
        return [self._read(piece) for piece in self._store.parts_of([stretch])]

    def _read(self, piece: HeldPiece) -> Tensor:  # (elements,)
        if AVERAGE not in piece.places:
            return self._weights.of(piece.stretch)
        return self._store.read(piece, AVERAGE).to(self._layout.buckets[piece.stretch.bucket].dtype)


class InFile:
    """Segments are parameters alone, where those are with the state: they lie in memory all the time."""

    def __init__(self, segments: Segments, store: PieceStore) -> None:
        self.segments, self.store = segments, store
        segments.have_state = False
        self.bytes_per_second = 0.0
        self._awaited = NO_BLOCKS
        self._known: dict[tuple[int, torch.dtype], int] = {}
        self._slowness_is_said = False
        self._weights = HeldWeights(segments)
        self.averages = AveragesInFile(segments, store)

    # ---- what it takes

    def state_bytes(self) -> int:
        return self.store.file_bytes() + self.store.shared_bytes()

    def bytes_by_place(self) -> dict[str, int]:
        in_memory = self.store.shared_bytes() + self.store.transfers.bytes
        return {"state": in_memory, "state_files": self.store.file_bytes()}

    def _reserve(self) -> None:
        """Space for all that is held and awaited, state that an optimizer makes later included."""
        layout, runs = self.segments.layout, self.segments.runs | self._awaited
        held = [(one, layout.buckets[one.bucket]) for one in layout.stretches(runs)]
        self.store.file.reserve(
            sum(one.blocks * of.block_elements * self._bytes_of_an_element(of) for one, of in held if not of.is_frozen)
        )

    def _bytes_of_an_element(self, bucket: Bucket) -> int:
        kind = bucket.group, bucket.dtype
        if kind not in self._known:
            state = probe_state(self.segments.user, bucket, 2, self.segments.layout.device)
            self._known[kind] = sum(value.dtype.itemsize for value in state.values() if value.dim())
            beside = bucket.has_masters + (self.segments.average_rule is not None)
            self._known[kind] += beside * bucket.wide_dtype.itemsize
        return self._known[kind]

    # ---- to hold

    def expect(self, runs: Runs) -> None:
        self._awaited = runs
        self._reserve()

    def memory_for(self, stretch: Stretch, _: str, dtype: torch.dtype, /) -> Tensor:
        """Memory of its own, until it is put into the file."""
        size = self.segments.layout.buckets[stretch.bucket].block_elements
        return self.segments.place.memory(stretch.blocks * size, dtype)

    def put(self, stretches: Sequence[Stretch], source: StateSource) -> None:
        """Parameters come into memory, and the rest into the file, for which there is space then."""
        segments, buckets = self.segments, self.segments.layout.buckets
        in_memory = stretches if segments.keeps_weights else ()
        made = [segments.make_of_weights(one, source.weights_of(one)) for one in in_memory]
        segments.add(made, segments.layout.runs(stretches))
        segments.join_neighbours()
        self._reserve()
        wholes = {cell: stretch for stretch in stretches for cell in self.store.cells([stretch])}

        def state_of(cell: Stretch) -> State:
            return segments.place.bring(buckets[cell.bucket], source.part_of(wholes[cell], cell))

        self.store.put(list(wholes), state_of)
        self.store.grow_together(lambda stretch: not segments.keeps_weights or len(self._weights.parts(stretch)) == 1)

    def keep_only(self, runs: Runs) -> None:
        self.store.keep_only(self.segments.layout.stretches(runs))
        self.segments.keep_only(runs)

    def join(self) -> None:
        """What has come lies in the file already."""

    # ---- to read

    def states(self, runs: Runs, with_weights: bool = False) -> dict[Stretch, State]:
        """In memory of their own, all at one time: for as few blocks as a slice of a fill has."""
        found: dict[Stretch, State] = {}
        for stretch, state in self.stream(runs):
            found[stretch] = {key: value.clone() if value.dim() else value for key, value in state.items()}
            has_masters = self.segments.layout.buckets[stretch.bucket].has_masters
            if with_weights and self.segments.keeps_weights and not has_masters:
                found[stretch][WEIGHTS] = self._weights.of(stretch)
        return found

    def outline(self, runs: Runs) -> dict[Stretch, State]:
        return {one.stretch: one.outline() for one in self.store.parts_of(self.segments.layout.stretches(runs))}

    def stream(self, runs: Runs) -> Iterator[tuple[Stretch, State]]:
        return self.store.stream(self.segments.layout.stretches(runs))

    def portions(self, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
        found = self.store.cells(stretches)
        for first in range(0, len(found), PORTION_PIECES):
            yield found[first : first + PORTION_PIECES]

    # ---- the update

    def update(self, gradients: BlockValues, scale: float, on_updated: OnUpdated) -> None:
        segments, transfers = self.segments, self.store.transfers
        segments.place.begin_update()
        turns = [has_turn(segments.twin.param_groups[bucket.group]) for bucket in segments.layout.trained.buckets]
        are_carried = [has_its or segments.averages_now for has_its in turns]
        pieces = [  # frozen ones come last
            one
            for one in self.store.pieces[::-1]
            if one.stretch.bucket < len(turns) and are_carried[one.stretch.bucket]
        ]
        before = transfers.moved, transfers.seconds
        coming: list[tuple[Tensor | None, Coming]] = []
        for index, buffer in enumerate(transfers.carry([piece.ranges() for piece in pieces], self._most_bytes(pieces))):
            coming += [self._bring_down(piece, gradients) for piece in pieces[index + len(coming) : index + 2]]
            bucket = pieces[index].stretch.bucket
            self._update_piece(pieces[index], buffer, *coming.pop(0), scale if turns[bucket] else None)
            if index + 1 < len(pieces) and pieces[index + 1].stretch.bucket != bucket:
                on_updated(bucket)
        on_updated(0)
        self._measure(transfers.moved - before[0], transfers.seconds - before[1])

    def _most_bytes(self, pieces: Sequence[HeldPiece]) -> int:
        """Of a buffer that holds any of these, with state that the optimizer makes now."""
        buckets = self.segments.layout.buckets
        needed = (one.elements * self._bytes_of_an_element(buckets[one.stretch.bucket]) for one in pieces)
        return max(map(max, needed, (one.bytes for one in pieces)), default=0)

    def _bring_down(self, piece: HeldPiece, gradients: BlockValues) -> tuple[Tensor | None, Coming]:
        """What is updated of a piece, and what that needs besides its state; None: its master weights."""
        segments, stretch = self.segments, piece.stretch
        if segments.keeps_weights:
            (parameters,) = self._weights.parts(stretch)
        else:
            parameters = segments.parameters.of(stretch)
        has_master = MASTER in piece.places and segments.layout.buckets[stretch.bucket].has_masters
        updated = None if has_master else segments.place.updated(parameters)
        return updated, segments.place.bring_down(gradients.of(stretch), parameters, updated)

    def _update_piece(
        self, piece: HeldPiece, buffer: Buffer, updated: Tensor | None, coming: Coming, scale: float | None
    ) -> None:
        """`scale`: None: it is not its turn, and its weights enter averages alone."""
        segments, state = self.segments, piece.state(buffer)
        parameter, average = state.pop(MASTER) if updated is None else updated, state.pop(AVERAGE, None)
        segment = Segment(piece.stretch, parameter, has_master=updated is None, weights=None, average=average)
        segments.give_state(segment, state)
        if scale is not None:
            segments.place.update(segments.optimizer_step, [segment], [coming], scale)
        else:
            segments.place.leave_out(coming)
        if segments.averages_now:
            segments.average([segment], are_updated=True)
        if updated is not None:
            segments.place.give_back(updated, coming.parameters)
        self.store.keep(piece, buffer, segments.state_of(segment))
        segments.twin.state.pop(parameter, None)

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
