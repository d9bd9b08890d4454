"""Bytes that a worker needs for the state of a model: by stage, precision, offload, mirrors and lanes. Pure arithmetic.

`shoal estimate` prints it, and the log of a worker's first step compares it with what is held. docs/memory.md explains
the formulas, and what is not in them: activations above all. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal_protos.shape import ONE, Shape

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Offload = Literal["none", "host", "file"]
"""Where optimizer state and master weights lie: beside the parameters, in host memory, in files."""
Location = Literal["device", "host", "file"]

MOST = 10**15
"""Of any count."""
MOST_LANES = 65_536
"""Of a job."""
STAGES = (0, 1, 2, 3)
BUILT_STAGES = (0, 1, 2, 3)
BUILT_PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16", "fp16")
BUILT_OFFLOADS: tuple[Offload, ...] = ("none", "host", "file")

PARAMETER_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Of a parameter as the model computes with it; a lane's gradient has the same dtype."""
SUM_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4}
"""Of an element of sums over micro-batches and lanes."""
MASTER_BYTES: dict[Precision, int] = {"fp64": 0, "fp32": 0, "bf16": 4, "fp16": 4}

BUCKET_BYTES = 8 << 20
JOINED_TO_LARGEST = 2
"""In stages 2 and 3: buckets of one host are exchanged together up to this multiple of the largest one."""
JOINED_ON_THEIR_WAY = 2
"""Such joined buckets: those that are being filled, and those before; of a large parameter the gradient as backward
makes it, and its bucket. What comes of them is bounded by pieces, which a bucket of any size is cut into.
"""
UNITS_GATHERED = 3
"""In stage 3: the unit at work, the next one, and one whose gradients leave."""
PIECES_ON_THEIR_WAY = 2
"""In stages 0 and 1: the one that is waited for, and the next one."""
HOST_PIECE_BYTES = 32 << 20
MESSAGE_BYTES = 512 << 10
ON_THE_WAY_BYTES = 48 << 20
"""Offload to the host: gradients of two parts of an update, 16 MiB each and then to a bucket's end."""
OFFLOAD_BUFFERS = 3
"""Of pieces of a file: one is read, one updated, one written."""
OFFLOAD_PIECE = 1 << 20
"""Parameters whose state is one piece, at most."""
MIRROR_PIECES = 3
"""Of mirrors on the host: one comes to the device, one is updated, one goes back."""
MIRROR_PIECE = 1 << 18
"""Parameters of such a piece."""


@dataclass(frozen=True, slots=True)
class CellShare:
    """What a process of a cell has to do with the parameters that it has: several processes may have them too."""

    shape: Shape
    kept: int
    """Trained parameters whose state lies at its coordinate: an equal part of those that several have."""
    contributed: int
    """Those whose gradients it gives to their owners. Places of `tensor` have them alike of what is common, and each
    gives a part; places of `context` and `expert` have other samples or tokens, and each gives its own.
    """
    common: int = 0
    """Those that all places of `tensor` have."""

    @classmethod
    def of(cls, shape: Shape, common: int, divided: int, of_experts: int) -> CellShare:
        """Of so many that all have, so many that the places of `tensor` divide, and so many of its experts."""
        kept = -(-common // (shape.tensor * shape.portions)) - (-divided // shape.portions)
        contributed = -(-common // shape.tensor) + divided + of_experts
        return cls(shape, kept - (-of_experts // shape.context), contributed, common)


@dataclass(frozen=True, slots=True)
class MemorySetup:
    """What decides how much a worker holds. The caller has checked it: counts of at least 1, mirrors below workers."""

    parameters: int
    """Trained ones; of a cell's process, those of its part of the model."""
    workers: int
    """Of cells of several processes: their number, for a block has all of its copies at one coordinate."""
    stage: int
    lanes: int
    mirrors: int = 1
    """Copies of a block's state besides its owner's; stage 0 mirrors everything everywhere."""
    precision: Precision = "fp32"
    state_bytes: float = 8
    """Of the optimizer, by parameter: 8 for Adam and AdamW."""
    offload: Offload = "none"
    offload_parameters: bool = False
    """Whether stage 3 keeps its parts of the parameters in host memory."""
    mirrors_on_host: bool = False
    """Whether host memory keeps what is mirrored; with offload it makes no difference."""
    unit: int = 0
    """Parameters of the largest unit, frozen ones too; only stage 3 asks."""
    frozen: int = 0
    """Parameters that need no gradient."""
    frozen_width: float = 0
    """Bytes of one of those; 0: as of a trained one."""
    micro_batches: int = 1
    """Of a lane; above 1 its gradient is whole between them, also in stages 2 and 3."""
    largest_parameter: int = 0
    """Elements of the largest trained one, which is in one bucket whatever its size; 0: it is no larger than a bucket.
    Only stages 2 and 3 ask.
    """
    cell: CellShare | None = None
    """Where a cell has several processes."""
    average: bool = False
    """Whether averages of weights are kept."""
    spares: int = 0
    """Members beyond `workers` that have the first mirror of every block, which then no worker has."""
    is_spare: bool = False
    """Whether what is asked for is what one of those holds."""

    @property
    def shape(self) -> Shape:
        """Of its cell."""
        return self.cell.shape if self.cell else ONE

    @property
    def kept(self) -> int:
        """Trained parameters whose state lies at this process's place in a cell."""
        return self.cell.kept if self.cell else self.parameters

    @property
    def contributed(self) -> int:
        """Those whose gradients it gives to their owners."""
        return self.cell.contributed if self.cell else self.parameters

    @property
    def keeps_lane_whole(self) -> bool:
        """Whether the gradient of a lane is whole before it leaves: micro-batches add to it, or stages do."""
        return self.micro_batches > 1 or self.shape.pipeline > 1

    @property
    def copies(self) -> float:
        """The part of all blocks' state that one worker holds, as owner and as mirror."""
        if self.stage == 0:
            return 1.0
        if self.is_spare:
            return 1 / self.spares
        return min(1.0, (1 + self.mirrors - min(self.mirrors, self.spares, 1)) / self.workers)

    @property
    def copies_on_host(self) -> float:
        """Of these, the part that is on the host, as mirrors may be; what a worker owns never is."""
        if not self.mirrors_on_host or self.offload != "none":
            return 0.0
        return self.copies - (0.0 if self.is_spare else min(self.copies, 1 / self.workers))


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One kind of memory."""

    name: str
    bytes: int
    location: Location = "device"
    in_step: bool = False
    """Whether it is held only while a step is made."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What one worker holds."""

    setup: MemorySetup
    items: tuple[MemoryItem, ...]

    def at_rest(self, location: Location) -> int:
        """Bytes held between two steps."""
        return sum(item.bytes for item in self.items if item.location == location and not item.in_step)

    def at_most(self, location: Location) -> int:
        """Bytes held within a step."""
        return sum(item.bytes for item in self.items if item.location == location)

    @property
    def read_average_bytes(self) -> int:
        """Of the copy of the parameters that a worker has while its script reads averages; in stage 3 it has none."""
        width = PARAMETER_BYTES[self.setup.precision]
        return width * self.setup.parameters if self.setup.average and self.setup.stage < 3 else 0

    @property
    def filled_bytes(self) -> int:
        """Sent beside training to have copies again of what a lost member held; 0 in stage 0, where all have all."""
        setup = self.setup
        if setup.stage == 0:
            return 0
        parts = (setup.state_bytes, MASTER_BYTES[setup.precision], SUM_BYTES[setup.precision] * setup.average)
        width = PARAMETER_BYTES[setup.precision] if setup.stage == 3 else 0
        return round((sum(parts) + width) * setup.kept * setup.copies)

    @property
    def partial_sum_bytes(self) -> int:
        """Of the sum that a cell makes of a lane's gradients which each of its processes has a part of, at most: those
        of all parameters that its processes have in common.
        """
        cell = self.setup.cell
        return SUM_BYTES[self.setup.precision] * cell.common if cell and cell.shape.tensor > 1 else 0

    @property
    def contributed_bytes(self) -> int:
        """Of gradients that a process gives to owners at other coordinates: in stages 0 and 1 for each sum of lanes
        that leaves it, at least one a step, in stages 2 and 3 for each lane.
        """
        setup = self.setup
        width = (SUM_BYTES if setup.stage < 2 else PARAMETER_BYTES)[setup.precision]
        return width * (setup.contributed - setup.kept)

    @property
    def handed_bytes(self) -> int:
        """Of updated parameters that a process gets from owners at other coordinates: in stages 0 to 2 in each step, in
        stage 3 each time that all units are gathered.
        """
        return PARAMETER_BYTES[self.setup.precision] * (self.setup.parameters - self.setup.kept)

    @property
    def built(self) -> bool:
        """Whether this version trains so."""
        setup = self.setup
        is_built = setup.stage in BUILT_STAGES and setup.precision in BUILT_PRECISIONS
        has_place = not setup.offload_parameters or (setup.stage == 3 and setup.offload != "none")
        return is_built and setup.offload in BUILT_OFFLOADS and has_place


def estimate(setup: MemorySetup) -> MemoryEstimate:
    """Bytes of one worker: of the one that holds most, where workers differ by a block or a lane."""
    items = [*_parameters(setup), *_gradients(setup), *_state(setup), *_mirror_pieces(setup), *_exchange(setup)]
    parts = (part for item in items for part in _without_mirrors(setup, item))
    return MemoryEstimate(setup, tuple(part for part in parts if part.bytes))


OF_BLOCKS = {"optimizer state", "master weights", "averages of weights", "reduced gradients"}
"""What is held of a block that is owned or mirrored."""
OF_BLOCKS_IN_STAGE_3 = {"parameters", "frozen parameters"}


def _without_mirrors(setup: MemorySetup, item: MemoryItem) -> tuple[MemoryItem, ...]:
    """An item; or what a worker owns of it, and what the host keeps of its mirrors."""
    share = setup.copies_on_host / setup.copies
    if not share or item.name not in OF_BLOCKS | (OF_BLOCKS_IN_STAGE_3 if setup.stage == 3 else set()):
        return (item,)
    mirrored = round(item.bytes * share)
    return replace(item, bytes=item.bytes - mirrored), replace(item, bytes=mirrored, location="host")


def _mirror_pieces(setup: MemorySetup) -> list[MemoryItem]:
    """What of mirrors on the host is on the device while they are updated."""
    carried = min(MIRROR_PIECES * MIRROR_PIECE, setup.kept * setup.copies_on_host)
    width = setup.state_bytes + MASTER_BYTES[setup.precision] + SUM_BYTES[setup.precision] * setup.average
    if setup.stage > 1:
        width += SUM_BYTES[setup.precision]
    if setup.stage == 3:
        width += PARAMETER_BYTES[setup.precision]
    return [MemoryItem("pieces of mirrors", round(width * carried), in_step=True)]


def _parameters(setup: MemorySetup) -> list[MemoryItem]:
    width, parameters = PARAMETER_BYTES[setup.precision], setup.parameters
    frozen = (setup.frozen_width or width) * setup.frozen
    if setup.stage < 3:
        return [MemoryItem("parameters", width * parameters), MemoryItem("frozen parameters", round(frozen))]
    kept: Location = "host" if setup.offload_parameters else "device"
    most = parameters + setup.frozen
    units = most if setup.shape.pipeline > 1 else min(UNITS_GATHERED * setup.unit, most)
    return [
        MemoryItem("parameters", round(width * setup.kept * setup.copies), kept),
        MemoryItem("frozen parameters", round(frozen * setup.copies / setup.shape.processes), kept),
        MemoryItem("gathered units", width * (units + min(units, parameters)), in_step=True),  # with their gradients
    ]


def _gradients(setup: MemorySetup) -> list[MemoryItem]:
    width = SUM_BYTES[setup.precision]
    whole = width * setup.parameters
    reduced = round(width * setup.kept * setup.copies)
    coming = min(ON_THE_WAY_BYTES, reduced) if setup.offload == "host" else 0
    come_down = MemoryItem("gradients on the host", coming, "host", in_step=True)
    if setup.stage < 2:
        lane_sums = whole * (stack_copies(-(-setup.lanes // setup.workers)) - 1)
        return [MemoryItem("gradients", whole), MemoryItem("lane sums", lane_sums), come_down]
    waiting = round(width * setup.contributed * waiting_subtrees(setup.lanes, setup.workers) / setup.workers)
    return [
        MemoryItem("gradients", whole if setup.keeps_lane_whole else 0, in_step=True),
        MemoryItem("lane sums", waiting, in_step=True),
        MemoryItem("reduced gradients", reduced, in_step=True),
        come_down,
    ]


def _state(setup: MemorySetup) -> list[MemoryItem]:
    held = setup.kept * setup.copies
    location: Location = "device" if setup.offload == "none" else setup.offload
    masters = MASTER_BYTES[setup.precision]
    averages = SUM_BYTES[setup.precision] if setup.average else 0
    are_there = masters or setup.offload_parameters
    copied = 0 if are_there or setup.offload != "host" else PARAMETER_BYTES[setup.precision]
    carried = min(OFFLOAD_BUFFERS * OFFLOAD_PIECE, held) if setup.offload == "file" else 0
    return [
        MemoryItem("optimizer state", round(setup.state_bytes * held), location),
        MemoryItem("master weights", round(masters * held), location),
        MemoryItem("averages of weights", round(averages * held), location),
        MemoryItem("parameters on the host", round(copied * held), "host"),
        MemoryItem("offload buffers", round((setup.state_bytes + masters + averages) * carried), "host"),
    ]


def _exchange(setup: MemorySetup) -> list[MemoryItem]:
    """At most; a world of one exchanges nothing."""
    members = setup.workers * setup.shape.processes + setup.spares
    others = members - 1
    if setup.stage < 2:
        most = PIECES_ON_THEIR_WAY * max(HOST_PIECE_BYTES, MESSAGE_BYTES * members) if others else 0
    else:
        joined = JOINED_TO_LARGEST * BUCKET_BYTES
        largest = max(joined, PARAMETER_BYTES[setup.precision] * setup.largest_parameter)
        most = JOINED_ON_THEIR_WAY * (largest + round(joined * others / members))
    return [MemoryItem("exchange buffers", most, in_step=True)]


def stack_copies(lanes: int) -> int:
    """Gradient copies of a worker with so many lanes in stages 0 and 1: they are aligned runs, the largest first."""
    return max(1, lanes.bit_length())


def waiting_subtrees(lanes: int, workers: int) -> int:
    """In stages 2 and 3: how many sums of subtrees of lanes an owner keeps of a block at most, between two rounds.

    In round i worker w trains lane i × workers + w, so that what is done is always a beginning of all lanes.
    """
    return max((done.bit_count() for done in range(workers, lanes, workers)), default=0)


OPTIMIZER_STATE_BYTES = {
    "adadelta": 8,
    "adagrad": 4,
    "adam": 8,
    "adamax": 8,
    "adamw": 8,
    "asgd": 4,
    "lion": 4,
    "nadam": 8,
    "radam": 8,
    "rmsprop": 4,
    "rprop": 8,
    "sgd": 0,
}
"""By parameter, of classes that a configuration can name in lower case, for parameters or masters in fp32."""
MORE_STATE_BYTES = {"amsgrad": 4, "centered": 4, "momentum": 4}
"""What an argument of the class adds where it is not 0 or false."""


def state_bytes_of(optimizer: str, arguments: dict[str, object]) -> int | None:
    """Bytes of optimizer state by parameter; None for a class that is not known."""
    base = OPTIMIZER_STATE_BYTES.get(optimizer.lower())
    if base is None:
        return None
    return base + sum(more for name, more in MORE_STATE_BYTES.items() if arguments.get(name) not in (None, "auto", 0))
