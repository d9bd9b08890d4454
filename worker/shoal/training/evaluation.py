"""Evaluation between two micro-batches: each member over the lanes it holds.

Right after a step, or after the loop, it is over when its `with` ends: members with lanes exchange their sums there
(exchange/evaluation_round.py), and what comes of them is told (`Measured`). Anywhere else it waits for nobody, and the
sums travel with the next vote that passes. Nothing that training reads is changed: modes, random state and buffers are
put back.

Where a lane is trained by a cell, its members evaluate together. If the cell breaks, the rest of the evaluation is
answered from here (cells/hub.py) and counts nothing. Before the next lane no member knows how far another has come
in its script, so evaluations until then count nothing either; after the loop, where no lane comes, members agree in the
recovery which evaluation is the first that none of them has entered.

`Measured` is what evaluations right after the last step have come to, told once, in order. All members get the same
numbers: by the exchange itself, or, if the world broke in it, in a recovery (boundary.py) from a survivor that has
them, before the new world opens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.core.tree import add
from shoal.data.seeds import RandomState, seed_everything
from shoal.exchange.buffer_joins import have_same_bits
from shoal.exchange.evaluation_round import Answers, EvaluationRound, LoopPart, Sums
from shoal.exchange.packing import FramedSend, receive_framed
from shoal.exchange.traffic import EVALUATED
from shoal.exchange.vote import check_names, mean_over_lanes
from shoal.exchange.world import World
from shoal.training.context import TrainingContext
from shoal.training.gathered_rows import GatheredRows

Numbers = dict[str, float]
"""Means over the lanes that arrived, by name."""
ALL = 1 << 62
"""More evaluations than a script has."""
Listener = Callable[[Numbers], None]


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Afterwards modes, buffers and random state are what they were."""
    random, modes = RandomState.save(), [(part, part.training) for part in module.modules()]
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    values = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for part, named in buffers:
            part._buffers.clear()
            part._buffers.update(named)
        with torch.no_grad():
            for buffer, version, before in values:
                if not have_same_bits(buffer, before):  # batch norm's are in no version, which autograd would miss
                    (buffer if buffer._version != version else buffer.data).copy_(before)
        random.restore()


def check_numbered(dataset: Any) -> None:
    """Raises `UserError` for what has no numbered samples, of which each lane takes its own."""
    if isinstance(dataset, DataLoader):
        raise UserError(
            "engine.shard got a DataLoader; give its dataset, engine.shard(loader.dataset): each worker reads the "
            "samples of its lanes, and the collate_fn of training makes micro-batches of them."
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UserError(
            f"engine.shard got a {type(dataset).__name__}, which has no numbered samples; give a map-style dataset "
            "(__getitem__ and __len__)."
        )


def batches_of(numbers: Sequence[int], micro_batch_size: int, micro_batches: int) -> Iterator[tuple[int, list[int]]]:
    """These samples as calls of so many micro-batches take them, each with its place. A short one that cannot be
    divided into equal micro-batches is each of them: their mean loss is that of its samples.
    """
    size = micro_batch_size * micro_batches
    for at in range(0, len(numbers), size):
        taken = list(numbers[at : at + size])
        yield at, taken * micro_batches if len(taken) % micro_batches else taken


@dataclass(frozen=True, slots=True)
class _Over:
    """An evaluation that is over here, and not yet with all who evaluate."""

    step: int
    sums: Sums
    before: int
    """How many evaluations after that step have come to numbers before it."""


class Evaluation:
    """`active` within `engine.evaluating()`."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self.active = False
        self.is_in_a_callback = False
        """Whether a function of the script's is called for a committed step."""
        self.rows = GatheredRows(context)
        self.samples: list[int] = []
        """Of the micro-batch of an evaluation that the script has."""
        self.since_the_step: dict[str, float] = {}
        """Results that arrived by votes without a step since the last committed one."""
        self._lane: Sums = {}
        self._arrived: Sums = {}
        self._in_vote: Sums = {}
        """What a vote carries now, or has carried that did not pass."""
        self.measured = Measured()
        self._round: EvaluationRound | None = None
        self._answers: Answers | None = None
        self._votes = 0
        """Those that have passed in this world."""
        self._at_hand: Sums | None = None
        """Of the evaluation at hand, where all are to have it when it is over."""
        self._over: _Over | None = None
        self.after_telling: Callable[[], None] = _nothing
        """Called once somebody was told of what was measured."""
        self._entered = self._broken = 0
        """Evaluations after the loop that this member has entered, and those that count nothing since a cell broke."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Eval mode without gradients. Raises `UserError` in the middle of a micro-batch."""
        context, module = self._context, self._context.state.module
        at_hand = context.loop.in_flight and (context.forward_seed.begun or context.loop.has_gradient)
        if at_hand and not self.is_in_a_callback:
            raise UserError(
                "engine.evaluating was entered between a micro-batch's forward and engine.step; evaluate before the "
                "forward or after engine.step."
            )
        if context.hub is not None and context.left_loop:
            self._entered += 1
            if self._entered > self._broken:
                context.hub.begin_lane()
        self.active, self._at_hand, weights = True, None, context.state.module_guard.whole()
        try:
            with (
                untouched(module), context.forward_seed.away(), context.autocast.here(), context.in_evaluation(),
                torch.no_grad(),
            ):  # fmt: skip
                module.eval()
                yield
        finally:
            self.active, self._lane = False, {}
        context.state.module_guard.forgive(weights)
        if self._at_hand is not None:
            self._over = _Over(context.state.step, self._at_hand, len(self.measured.numbers))

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """A context for callbacks: one that a change of the world left owed is called in the midst of a lane."""
        before, self.is_in_a_callback = self.is_in_a_callback, True
        try:
            with self._context.in_callback():
                yield
        finally:
            self.is_in_a_callback = before

    def shard(self, dataset: Any) -> Iterator[Any]:
        """Micro-batches of the samples `i` with `i % lanes` held here, lane by lane; a lane's last may be short. For a
        pipeline's schedule as many as it takes at once.

        What a dataset or a forward draws has the seed of step, lane and micro-batch, in every world.
        """
        if not self.active:
            raise UserError("engine.shard is for `with engine.evaluating():`.")
        check_numbered(dataset)
        context = self._context
        config, loop = context.config, context.loop
        if self.is_between_batches and not self.is_in_a_callback and self._at_hand is None:
            self._at_hand = {}
        for lane in context.lanes:
            numbers = list(range(lane, len(dataset), config.lanes))
            try:
                for at, self.samples in batches_of(numbers, config.micro_batch_size, config.micro_batches_per_call):
                    seed_everything(config.seed, max(0, context.state.step), lane, at, purpose="evaluation")
                    yield loop.collate(dataset, self.samples)
                    context.step_on()
            finally:
                self.samples = []
                self._lane_over()

    def gather(self, named: dict[str, Tensor]) -> None:
        """One micro-batch's rows. Raises `UserError` outside `shard`."""
        if not self.samples:
            raise UserError("engine.gather is for the batches of engine.shard, within `with engine.evaluating():`.")
        if self._context.is_cell_whole:
            self.rows.add(self.samples, named)

    def report(self, numbers: dict[str, float]) -> None:
        """One micro-batch's numbers. Raises `UserError` outside `shard`, and for more names than a vote can carry."""
        if self._context.world is None:
            return  # a warm-up is of no world
        if not self.samples:
            raise UserError(
                "engine.report in an evaluation is for the batches of engine.shard: within that loop, report each "
                "batch's mean, and engine.reports has the mean over all lanes. A number of this worker alone would "
                "be another one in every world."
            )
        if not numbers.keys() <= self._lane.keys():
            known = self._lane.keys() | self._arrived.keys() | self._in_vote.keys() | (self._at_hand or {}).keys()
            check_names(known | numbers.keys(), "engine.report in an evaluation")
        for name, value in numbers.items():
            kept = self._lane.setdefault(name, [0.0, 0.0])
            kept[0] += 1
            kept[1] += value

    def _lane_over(self) -> None:
        if self._context.is_cell_whole:
            for name, (count, lane_total) in self._lane.items():
                _take_in(self._arrived if self._at_hand is None else self._at_hand, name, 1.0, [lane_total / count])
        self._lane = {}

    # ---- right after a step, and after the loop

    @property
    def is_between_batches(self) -> bool:
        """Whether this worker has not asked for the next batch since the last vote."""
        return self._round is not None and self._round.is_open and self._context.world is not None

    @property
    def is_over_here(self) -> bool:
        """Whether an evaluation is still to be shared with all who evaluate."""
        over = self._over
        return over is not None and over.step == self._context.state.step and over.before == len(self.measured.numbers)

    def share(self) -> None:
        """Returns when all who evaluate have come to the end of theirs. Raises `WorldChanged`: then again, in the next
        world, unless others had all of it before.
        """
        assert self._over is not None and self._round is not None
        place = LoopPart.AFTER if self._context.left_loop else LoopPart.BODY
        self._take(self._round.share(place, self._over.sums))
        self._over = None

    def forget(self) -> None:
        """What is not shared by now is void: all have gone back."""
        self._over = None

    @property
    def can_ask(self) -> bool:
        """Whether what this worker wants of the weights at hand is still heard before they change."""
        return self.is_between_batches and self._round is not None and self._round.speaks

    @property
    def asked(self) -> list[str]:
        """Where members want the weights at hand to be exported, as far as they have said so."""
        return self._round.asked if self._round is not None else []

    @property
    def asks_to_save(self) -> bool:
        """Whether a member wants a checkpoint of them, as far as they have said so."""
        return self._round is not None and self._round.saves

    def end_round(self, exports: list[str], saves: bool) -> None:
        """This worker asks for the next batch, or is about to vote: no evaluation after the last step comes from here.
        `exports`, `saves`: what it wants of the weights at hand. Raises `WorldChanged`.
        """
        if self._round is not None:
            self._round.end(exports, saves)

    @property
    def messages(self) -> int:
        """What this worker has said of its evaluations that others may not have heard."""
        return self._round.messages if self._round is not None else 0

    def settle(self, messages: Sequence[int] = ()) -> bool:
        """Before a vote: returns whether anything is known here that was measured after the last step, or asked of its
        weights. `messages`: by rank, where a vote has told of so many; then all is heard by all. Raises `WorldChanged`.
        """
        assert self._round is not None
        if messages:
            self._take(self._round.settle(messages))
        else:
            self._round.before_vote()
        return bool(self.measured.numbers) or not self._round.is_quiet

    def tell(self) -> None:
        """What was measured, to all who have not heard it here."""
        with self.anywhere():
            self.measured.tell(self._context.rank == 0)
        self.after_telling()

    def begin_round(self, world: World, is_new: bool = False) -> None:
        """A world begins, or a vote of it has passed."""
        self._votes = 0 if is_new else self._votes + 1
        if self._answers is None or self._answers.group is not world.group:
            self._answers = Answers(world.group)
        speakers = world.traffic.coordinates.speakers if world.plan.steps else ()
        self._round = EvaluationRound(self._answers, speakers, (world.plan.generation, self._votes))

    def _take(self, evaluations: list[list[Sums]]) -> None:
        for sums in evaluations:
            self.measured.numbers.append(mean_over_lanes(sums))
        self._show()

    def _show(self) -> None:
        for numbers in self.measured.numbers:
            self.since_the_step.update(numbers)

    def agree(self, world: World) -> None:
        """In a recovery, once its step is committed here. Raises `WorldChanged`."""
        if self._context.hub is not None:
            place = torch.tensor([self._entered, self._context.awaits_vote], dtype=torch.int64, device="cpu")
            entered, wait = world.group.all_gather(place).T.tolist()
            # for some a vote has passed that others have not seen the end of: these wait for one at the script's end
            self._broken = max(entered) if all(wait) or not any(wait) else ALL
        self.measured.agree(world)
        self._show()

    # ---- in the vote

    def take_to_vote(self) -> Sums:
        """What the next vote carries, by name: how many lanes, and the sum of their means."""
        for name, (count, *parts) in self._arrived.items():
            _take_in(self._in_vote, name, count, parts)
        self._arrived = {}
        return self._in_vote

    def on_return(self) -> None:
        """All have gone back to a checkpoint, or to the start."""
        self.since_the_step = {}
        self.measured.begin_step()

    def on_commit(self) -> None:
        """A step's vote has passed, here or where this worker's ballot was read: its record has the results."""
        self._in_vote, self.since_the_step = {}, {}
        self.measured.begin_step()
        self._on_vote_passed()

    def on_vote(self, results: dict[str, float]) -> None:
        """A vote without a step has passed."""
        self._in_vote = {}
        self.since_the_step.update(results)
        self._on_vote_passed()

    def _on_vote_passed(self) -> None:
        if self._context.world is not None:
            self.begin_round(self._context.world)

    @property
    def has_unsettled(self) -> bool:
        """Whether there are results that no vote has carried yet: after the last step none of a step comes."""
        return bool(self._arrived or self._in_vote or self.rows.is_pending)


def _nothing() -> None:
    """Nothing follows."""


def reported_numbers(context: TrainingContext, evaluation: Evaluation) -> dict[str, float]:
    """Return the last step's reported numbers, and the results of evaluations since then."""
    record = context.state.record
    return {**record.reports, **record.evaluations, **evaluation.since_the_step} if record else {}


def _take_in(sums: Sums, name: str, count: float, parts: list[float]) -> None:
    known, *sum_of = sums.get(name, [0.0])
    for part in parts:
        add(sum_of, part)
    sums[name] = [known + count, *sum_of]


class Measured:
    """`numbers`: those of each evaluation since the last step."""

    def __init__(self) -> None:
        self.numbers: list[Numbers] = []
        self._delivered = self._shown = 0
        """How many of them listeners have heard of here, and observers."""
        self._everywhere: list[Listener] = []
        self._on_first: list[Listener] = []

    def add_listener(self, listener: Listener) -> None:
        """Called on every member, standbys too."""
        self._everywhere.append(listener)

    def add_observer(self, observer: Listener) -> None:
        """Called on rank 0, and on the next one again where that has died: it knows what was written."""
        self._on_first.append(observer)

    def begin_step(self) -> None:
        """A step is committed, or training goes on elsewhere: what came before is over."""
        self.numbers, self._delivered, self._shown = [], 0, 0

    def is_news(self, is_first: bool) -> bool:
        """Whether any listener here has not heard all."""
        reached = min(self._delivered, self._shown) if is_first else self._delivered
        return reached < len(self.numbers)

    def tell(self, is_first: bool) -> None:
        """`is_first`: whether this worker is rank 0."""
        while is_first and self._shown < len(self.numbers):
            self._shown += 1
            _call(self._on_first, self.numbers[self._shown - 1])
        while self._delivered < len(self.numbers):
            self._delivered += 1
            _call(self._everywhere, self.numbers[self._delivered - 1])

    def agree(self, world: World) -> None:
        """In a recovery, at its step: who lacks numbers gets them from one that has them all. What was told is known of
        oneself, or with the states that a member has been given. Raises `WorldChanged`.
        """
        recovery = world.plan.recovery
        assert recovery is not None
        counts = recovery.counted[world.rank]
        if not counts:
            self.begin_step()
        mine = torch.tensor([len(self.numbers), self._delivered], dtype=torch.int64, device="cpu")
        rows = world.group.all_gather(mine).tolist()
        most = max(known for known, _ in rows)
        giver = next(rank for rank, (known, _) in enumerate(rows) if known == most)
        if world.rank == giver:
            content = json.dumps(self.numbers).encode()
            lacking = [rank for rank, (known, _) in enumerate(rows) if known < most]
            for send in [FramedSend(world.group, rank, EVALUATED, content) for rank in lacking]:
                send.wait()
        elif rows[world.rank][0] < most:
            self.numbers = json.loads(receive_framed(world.group, giver, EVALUATED))
        if not counts:
            self._delivered = rows[recovery.counted.index(True)][1]


def _call(listeners: Sequence[Listener], numbers: Numbers) -> None:
    """An evaluation without numbers is nobody's news."""
    for listener in listeners if numbers else ():
        listener(numbers)
