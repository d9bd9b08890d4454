"""Copies of blocks being compared, as one simulated worker does it (worker/shoal/training/corruption_watch.py), and
flipped bits.

Every vote of a step brings the worker's copies of a sample, the votes after a save those of all blocks; and before a
planned change those are compared of which it takes one away. What differs is told in the status. `FlippedBits` knows
which bits were flipped, and holds that each is noticed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.sampled_blocks import losing_a_copy, sampled
from shoal_protos.corruption import CorruptBlock
from shoal_protos.plan import Plan

from .symbols import right

if TYPE_CHECKING:
    from .simulation import Simulation
    from .training import Training
    from .worker import SimWorker

Part = dict[int, int]
"""By block: a member's copy."""
Brought = tuple[Part, Part]
"""Of the step's sample and of what is filled beside the vote, and of what is being saved."""
MOST_REPORTED = 32


class Copies:
    """See the module's text. `told` is in the worker's status."""

    def __init__(self, training: Training) -> None:
        self.training, self.simulation = training, training.simulation
        self.reported: tuple[CorruptBlock, ...] = ()
        self.saved: Part | None = None
        self.saved_step = 0
        self.sound = False
        self.going: frozenset[int] = frozenset()
        """What is compared before the planned change at hand."""

    def brings(self) -> Brought:
        """What its vote says."""
        every, training = self.simulation.corruption_steps, self.training
        if not every:
            return {}, {}
        sample = () if training.idle else sampled(training.step + 1, self.simulation.blocks, every)
        part = {block: training.blocks[block] for block in sample if block in training.blocks}
        return {**part, **self._kept(self._filled())}, self.saved or {}

    def _filled(self) -> frozenset[int]:
        """What is filled beside the vote at hand."""
        assert self.training.world is not None
        return frozenset().union(*(blocks for _, _, blocks in self.training.world.fills(self.training.boundary)))

    def _kept(self, blocks: frozenset[int]) -> Part:
        """Of these what it keeps, and is not being filled."""
        training = self.training
        assert training.world is not None
        keeps = training.world.keeps[training.rank]
        return {block: training.blocks[block] for block in keeps & blocks & training.blocks.keys()}

    def voted(self, brought: dict[SimWorker, Brought]) -> None:
        """All members conclude the same."""
        every = self.simulation.corruption_steps
        found = self._compare([(peer, sample) for peer, (sample, _) in brought.items()], self.training.step)
        if self.saved is not None:
            found += self._compare([(peer, saved) for peer, (_, saved) in brought.items()], self.saved_step)
            copies = Counter(block for _, saved in brought.values() for block in saved)
            single = any(copies[block] < 2 for block in range(self.simulation.blocks))
            self.sound, self.saved = bool(every) and not (found or single), None
        self.reported = (*self.reported, *found)[-MOST_REPORTED:]
        if every and self.training.world is not None:
            self.simulation.bits.compared(self.training.worker, self.training.world.plan, self._filled())

    def before_change(self, plan: Plan) -> None:
        """All members of the old world bring what they keep of what is to be compared."""
        training, world = self.training, self.training.world
        assert world is not None
        is_on = self.simulation.corruption_steps
        self.going = frozenset(losing_a_copy(world.plan, plan, training.boundary)) if is_on else frozenset()
        for rank in range(world.size) if self.going else ():
            training.send(rank, "c", self._kept(self.going))

    def may_change(self, plan: Plan) -> bool:
        """Whether all have brought theirs."""
        training, brought = self.training, self.training.got("c")
        assert training.world is not None
        if self.going and len(brought) < training.world.size:
            return False
        found = self._compare(list(brought.items()), training.step)
        self.reported, self.going = (*self.reported, *found)[-MOST_REPORTED:], frozenset()
        self.simulation.bits.changes(training.worker, training.world.plan, plan, training.boundary)
        return True

    def _compare(self, brought: list[tuple[SimWorker, Part]], step: int) -> list[CorruptBlock]:
        found = []
        for block in sorted({block for _, part in brought for block in part}):
            values = {peer.membership.worker: part[block] for peer, part in brought if block in part}
            if len(set(values.values())) > 1:
                (value, count), *_ = Counter(values.values()).most_common(1)
                agree = value if 2 * count > len(values) else None
                workers = tuple(worker for worker, own in values.items() if own != agree)
                found.append(CorruptBlock(block, max(0, step - self.simulation.corruption_steps), step, workers))
        return found

    @property
    def saved_is_sound(self) -> bool | None:
        """Whether all copies of what is saved agreed; None: not known yet."""
        return None if self.saved is not None else self.sound

    def save_begins(self) -> None:
        self.saved, self.saved_step, self.sound = dict(self.training.blocks), self.training.step, False

    def enter(self) -> None:
        self.saved, self.sound = None, False

    def restored(self) -> None:
        self.reported = ()


@dataclass(eq=False, slots=True)
class Flip:
    """One flipped bit. It is to be noticed while two members of one world hold the block."""

    worker: SimWorker
    block: int
    generation: int = 0
    since: int = 0
    """The first step committed in that generation with both copies there."""
    after_restore: bool = False
    """Whether its worker had taken up the checkpoint at which the next world begins."""


class FlippedBits:
    """Whether bits may be wrong now, and for how long. `hopeless`: a wrong copy was taken for a right one, which no
    comparison of copies can know: it was the last one, or the source of another."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.flips: list[Flip] = []
        self.restored: set[SimWorker] = set()
        """Who has taken up the checkpoint at which the next world begins."""
        self.hopeless = False
        self.undone = 0
        """Returns to a sound checkpoint."""
        self.drawn = 0
        """Bits flipped so far."""

    @property
    def outstanding(self) -> bool:
        """Whether wrong bits are nobody's fault but the memory's."""
        return bool(self.flips) or self.hopeless

    def flip(self, worker: SimWorker, block: int) -> None:
        worker.training.blocks[block] ^= 1 << 7 + self.drawn  # another bit each time: copies that flip alike agree
        self.drawn += 1
        self.flips.append(Flip(worker, block, after_restore=worker in self.restored))
        worker.say("has a bit flipped in block", block)

    def committed(self, worker: SimWorker, step: int) -> None:
        """A flipped bit is told within `corruption_steps` by everybody who votes with both its copies."""
        generation = worker.training.generation
        for flip in self.flips:
            if not self._could_be_seen(flip, generation):
                flip.generation = 0 if flip.generation == generation else flip.generation
            elif flip.generation != generation:
                flip.generation, flip.since = generation, step
            elif step > flip.since + self.simulation.corruption_steps + 1 and not self._is_reported(worker, flip.block):
                self.simulation.watch.violated("a flipped bit was not noticed", flip.worker, flip.block, step)

    def changes(self, worker: SimWorker, old: Plan, new: Plan, boundaries: int) -> None:
        """A planned change begins: what it leaves fewer than two copies of was compared now, or when it was filled."""
        for flip in self.flips:
            kept = {member for member, share in zip(old.members, old.shares, strict=True) if flip.block in share.keeps}
            stays = {member for member, share in zip(new.members, new.shares, strict=True) if flip.block in share.keeps}
            if boundaries >= old.boundaries:
                kept |= {old.members[fill.target] for fill in old.fills if flip.block in fill.blocks}
            if len(kept & stays) < 2:
                self.compared(worker, old, frozenset({flip.block}))

    def compared(self, worker: SimWorker, plan: Plan, blocks: frozenset[int]) -> None:
        """These were compared: of those whose copies differ for a step or longer a worker of that world tells."""
        for flip in self.flips:
            if flip.block in blocks and flip.generation == plan.generation and flip.since < worker.training.step:
                kept = [m for m, share in zip(plan.members, plan.shares, strict=True) if flip.block in share.keeps]
                holders = [w for w in map(self.simulation.process_of, kept) if w and flip.block in w.training.blocks]
                values = {self._as_of(w, flip.block) for w in holders}
                if flip.worker in holders and len(values) > 1 and not self._is_reported(worker, flip.block):
                    self.simulation.watch.violated("the copy beside a flipped one may go", flip.worker, flip.block)

    def _is_reported(self, worker: SimWorker, block: int) -> bool:
        return any(one.block == block for one in worker.training.copies.reported)

    def _could_be_seen(self, flip: Flip, generation: int) -> bool:
        holders = [w for w in self.simulation.workers() if self._holds(w, flip.block, generation)]
        values = {self._as_of(w, flip.block) for w in holders}
        return bool(self.simulation.corruption_steps) and flip.worker in holders and len(values) > 1

    def _holds(self, worker: SimWorker, block: int, generation: int) -> bool:
        return worker.training.generation == generation and block in worker.training.blocks

    def _as_of(self, worker: SimWorker, block: int) -> bool:
        """Whether its copy is right as of its own step."""
        return worker.training.blocks[block] == right(max(0, worker.training.step))[block]

    def filled(self, blocks: Part, step: int) -> None:
        """A fill hands copies on as they are."""
        self.hopeless |= any(value != right(step)[block] for block, value in blocks.items())

    def taken_up(self, worker: SimWorker, content: Part, step: int) -> None:
        """All go back to a checkpoint. Where copies differed it is a sound one, if there is any."""
        self.undone += any(flip.worker is worker for flip in self.flips)
        self.flips = [flip for flip in self.flips if flip.worker is not worker]
        self.restored.add(worker)
        if all(value == right(step)[block] for block, value in content.items()):
            return
        durable = self.simulation.host.job.durable
        if durable.corruption.restoring and any(one.verified for one in durable.checkpoints) and not self.hopeless:
            self.simulation.watch.violated("all went back to an unsound checkpoint", worker, step)
        self.hopeless = True

    def over(self) -> None:
        """All have begun at a checkpoint, or anew: what was flipped before they took it up is no more."""
        kept = [flip for flip in self.flips if flip.after_restore]
        self.undone += len(kept) < len(self.flips)
        self.flips = kept
        for flip in kept:
            flip.after_restore = False
        self.restored.clear()

    def are_known(self) -> bool:
        """Whether the controller knows of what its world's members have reported."""
        durable = self.simulation.host.job.durable
        world = durable.current
        members = [self.simulation.process_of(member) for member in world.members] if world is not None else []
        reported = {one.block for member in members if member is not None for one in member.training.copies.reported}
        return reported <= set(durable.corruption.blocks)
