"""The watch for silent corruption on one member: the copies of some blocks are compared by every vote.

A rotating sample beside each step, so that every block's turn comes within `shoal.corruption_steps`; and beside each
save all blocks, a slice per vote, so that a checkpoint is known to hold what all copies hold. They are summed at the
vote after the save's boundary: nothing has changed by then, and what was still being handed out has come. And before a
planned change begins, blocks of which it takes away the copy to compare with; those of which another copy is made first
are compared beside that fill, which is spread over many votes. What differs is reported, and the controller decides
what is done about it. Off where a job is not bit-exact: copies may differ there.

`block_checksums` gives one 64-bit number per block over parameters and optimizer state: a sum of machine words at the
speed of memory, cheap enough for every step, in which any changed bit changes the number. It says nothing but "equal or
not" between copies of one step; checkpoints have XXH3, fingerprints SHA-256. It knows no group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.corruption import CorruptBlock
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs, every, union
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.blocks.flat import in_order
from shoal.checkpoint.fingerprint import contents
from shoal.core.layout import Stretch
from shoal.core.sampled_blocks import losing_a_copy, sampled
from shoal.exchange.vote import NO_COPY, Comparison, Findings, Record, compare
from shoal.exchange.world import World
from shoal.state.training_state import TrainingState
from shoal.training.context import TrainingContext

SLICE = 4_096
"""Blocks that are compared at once, beside a save or before a change: 32 kB of a vote."""
MOST_REPORTED = 32
"""Corrupt blocks in a status."""

log = get_logger("shoal")


class CorruptionWatch:
    """The comparison of copies on one worker. `corrupt` is in this worker's status."""

    def __init__(self, context: TrainingContext) -> None:
        self._context, self._state, config = context, context.state, context.config
        self._every = config.corruption_steps if config.exact and not config.mixed_numerics else 0
        self.corrupt: tuple[CorruptBlock, ...] = ()
        """What has differed since all began, or went back to a checkpoint."""
        self._saved: Tensor | None = None
        """`(blocks,)` int64: checksums of the own copies at the boundary of the save at hand, while they are compared.
        """
        self._due: Runs | None = None
        """The own copies at the boundary of the save at hand, until they are summed."""
        self._saved_step = self._compared = 0
        self._sound = False
        self._copies = False
        """Whether the world at hand has any."""

    # ---- in the vote

    def before_vote(self) -> None:
        """All that was handed out is here, and no state has changed since the boundary. Copies that were made since are
        left out: they agree with what they were made of.
        """
        if self._due is not None:
            own = self._due & self._valid
            self._saved = torch.full((self._state.held_layout.blocks,), NO_COPY, dtype=torch.int64, device="cpu")
            self._saved[list(own)] = block_checksums(self._state, own)
            self._due, self._compared = None, 0

    def comparisons(self, step: int) -> tuple[Comparison, ...]:
        """What the vote for this step compares. The same blocks on all members."""
        if not self._every or not self._copies:
            return ()
        found = []
        if step > self._state.step:
            blocks = sampled(step, self._state.held_layout.blocks, self._every)
            if blocks:
                found.append(self._comparison(blocks, self._checksums(blocks, self._valid), self._state.step))
        filled = union(fill.blocks for fill in self._world.plan.fill_slice(self._context.boundaries))
        if filled:
            found.append(self._comparison(filled, self._checksums(filled, self._kept), self._state.step))
        if self._saved is not None:
            part = Runs(((self._compared, min(self._compared + SLICE, len(self._saved))),))
            found.append(self._comparison(part, self._saved[self._compared :][: len(part)], self._saved_step))
        return tuple(found)

    def _comparison(self, blocks: Runs, checksums: Tensor, step: int) -> Comparison:
        numbers = torch.tensor(list(blocks), dtype=torch.int64, device="cpu")
        return Comparison(numbers, checksums, max(0, step - self._every), step)

    def _checksums(self, blocks: Runs, counting: Runs) -> Tensor:  # (len(blocks),) int64
        """Checksums of `blocks` in their order, NO_COPY where this member has none that is `counting`."""
        found = torch.full((len(blocks),), NO_COPY, dtype=torch.int64, device="cpu")
        own = blocks & counting
        if own:
            held = set(own)
            places = [place for place, block in enumerate(blocks) if block in held]
            found[places] = block_checksums(self._state, own)
        return found

    def on_vote(self, record: Record) -> None:
        """All members have the same record."""
        if self._saved is not None:
            self._compared += SLICE
            self._sound = self._sound and not (record.corrupt or record.single)
            if self._compared >= len(self._saved):
                self._saved = None
        self.on_record(record)

    def on_record(self, record: Record) -> None:
        """What a passed vote has found; also of one that this member rolls forward with."""
        self._report(record.corrupt)

    def _report(self, corrupt: Sequence[CorruptBlock]) -> None:
        for block in corrupt:
            log.error("corrupt_block", block=block.block, step=block.step, reason=block.sentence)
        self.corrupt = (*self.corrupt, *corrupt)[-MOST_REPORTED:]

    @property
    def _valid(self) -> Runs:
        """The blocks whose state and parameters are those of the committed step here."""
        return self._state.held.runs & self._state.current

    @property
    def _kept(self) -> Runs:
        """Of these what is not being filled, which would make a majority of the copy that it is made of."""
        return self._valid & self._world.kept

    @property
    def _world(self) -> World:
        assert self._context.world is not None
        return self._context.world

    # ---- beside a save

    def on_save(self) -> None:
        """At the boundary of a save, on all members: the copies of all blocks are to be compared as they are now."""
        if self._every and self._copies:
            self._due, self._saved, self._saved_step, self._sound = self._valid, None, self._state.step, True

    @property
    def saved_is_sound(self) -> bool | None:
        """Whether all blocks of the save at hand had two copies at least, and all agreed; None: not known yet."""
        return None if self._due is not None or self._saved is not None else self._sound

    # ---- over a change

    def before_change(self, old: World, new: Plan) -> None:
        """On all members of the old world, who know both plans: the last that is done in it. Raises `WorldChanged`."""
        going = losing_a_copy(old.plan, new, self._context.boundaries) if self._every and self._copies else NO_BLOCKS
        if going:
            old.group.progress.reach(StepPhase.VOTE)
            self._compare_now(old, going)

    def compare_all(self, world: World) -> Findings | None:
        """On all members of the world, after a vote whose step is not made. None: nothing is known, because some blocks
        have no second copy, or copies may differ. Raises `WorldChanged`.
        """
        if not self._every or not self._copies:
            return None
        world.group.progress.reach(StepPhase.HAND_OUT)
        found = self._compare_now(world, every(self._state.held_layout.blocks))
        return found if found.corrupt or not found.single else None

    def _compare_now(self, world: World, blocks: Runs) -> Findings:
        self._state.device.settle()
        workers = [member.worker for member in world.plan.members]
        corrupt, single = list[CorruptBlock](), 0
        while blocks:
            part = blocks.first(SLICE)
            mine = self._checksums(part, self._kept)
            rows = world.group.all_gather(mine.view(torch.uint8)).view(torch.int64)
            found = compare(self._comparison(part, mine, self._state.step), rows, workers)
            corrupt, single, blocks = [*corrupt, *found.corrupt], single + found.single, blocks - part
        self._report(corrupt)
        return Findings(tuple(corrupt), single)

    def on_world(self, world: World) -> None:
        """A world begins: what the one before was comparing is over. One without mirrors has nothing to compare."""
        self._saved, self._due, self._sound = None, None, False
        self._copies = any(map(world.plan.mirrored_by, world.plan.ranks))

    def on_return(self) -> None:
        """All have gone back to a checkpoint, or to the start: what differed is no more."""
        self.corrupt = ()


ROWS = 64
"""Parts of a block that are weighted apart, so that words which change places are seen too."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size."""


def block_checksums(state: TrainingState, blocks: Runs) -> Tensor:  # (len(blocks),) int64 on the CPU
    """Checksums in the order of the numbers, never 0. All of `blocks` are held here."""
    found: list[Tensor] = []
    stretches: list[Stretch] = []
    for stretch, parts in contents(state, blocks):
        stretches.append(stretch)
        total = torch.zeros(stretch.blocks, dtype=torch.int64, device=parts[0].device)
        for number, part in enumerate(parts):
            total += _sums(part.detach(), stretch.blocks).to(total.device) * (2 * number + 1)
        found.append(total)
    if not found:
        return torch.zeros(0, dtype=torch.int64)
    sums = torch.cat(found).cpu()[in_order(state.held_layout, stretches)]
    return torch.where(sums == 0, 1, sums)


def _sums(
    part: Tensor,  # (count × block elements,) of any dtype, or () for a number that all blocks share
    count: int,
) -> Tensor:  # (count,) int64, or ()
    """Sums of machine words, which wrap round."""
    if part.dim() == 0:
        return part.reshape(1).view(WORDS[part.element_size()]).to(torch.int64)[0]
    rows = part.view(torch.int64).view(count, ROWS, -1).sum(2)
    weights = torch.arange(1, 2 * ROWS, 2, dtype=torch.int64, device=part.device)
    return (rows * weights).sum(1)
