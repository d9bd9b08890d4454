"""The boundary of a step: what follows its commit and hand-out, on every member with the same record.

Saves begin, requests are carried out, callbacks are called, a planned generation begins. A world that breaks between
the vote and the boundary leaves it owed: the new world settles it by a vote without a step before it trains on, so that
no committed step is without its callback or its checkpoint. Called by step.py and resize.py.

`CalledSteps`: rank 0 calls the callbacks, and tells the others when it is through with a step's. If it dies, the next
rank 0 calls those of a step that was not said to be over, and no others. The others hear it beside their own work, all
of them before the next vote; where rank 0 has no callbacks, nothing travels.

`CommitCalls` are the script's functions that run on every member (`engine.on_commit`): a member without lanes runs no
body, so what a body counts or averages would lag behind on it. They are called wherever a step is committed, once in a
process for each, in order, before anything of the step is saved or given to a joiner. Which step they were called for
last is part of the training state (`TrainingState.followed`): it travels with the registered states, and says what they
are as of.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from shoal_protos.corruption import OnCorruption
from shoal_protos.errors import UserError
from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan
from torch import Tensor

from shoal.cells.pipelining import ends_of
from shoal.cells.stages import shapes_of
from shoal.data.seeds import RandomState, seed_everything
from shoal.exchange.traffic import CALLED
from shoal.exchange.vote import Findings, Record
from shoal.exchange.world import World
from shoal.group.group import Group, Waiting, Work, WorldChanged
from shoal.training.checkpoint_saving import CheckpointSaving
from shoal.training.context import TrainingContext
from shoal.training.corruption_watch import CorruptionWatch
from shoal.training.evaluation import Evaluation
from shoal.training.registered_states import LaggingStates
from shoal.training.requests import Requests
from shoal.training.status import StatusReport

RETURN_SECONDS = 10.0
"""For so long the controller is given to have all go back or pause, before a step that is not finite ends the job."""
LOOK_SECONDS = 0.05


class Boundary:
    """What is due between two steps, and whether it is still owed."""

    def __init__(
        self,
        context: TrainingContext,
        corruption: CorruptionWatch,
        saving: CheckpointSaving,
        evaluation: Evaluation,
        requests: Requests,
        status: StatusReport,
    ) -> None:
        self._context, self._corruption, self._saving = context, corruption, saving
        self._evaluation, self._requests, self._status = evaluation, requests, status
        self.commits, self._lagging = CommitCalls(context, evaluation), LaggingStates(context)
        self._callbacks: list[Callable[[], None]] = []
        self._observers: list[Callable[[], None]] = []
        self._watchers: list[Callable[[], None]] = []
        self._keepers: list[Callable[[], None]] = []
        self.bring_parameters: Callable[[], None] = _nothing
        """What callbacks find done: all parameters are here. Raises `WorldChanged`."""
        self._passed = 0
        """The last step whose boundary this member has passed."""
        self._called = CalledSteps()
        self._owed = False
        """The world that is being built begins by settling its step."""

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Called once per committed step, on whoever is rank 0 then."""
        self._callbacks.append(callback)
        self._context.calls_back = True

    def add_observer(self, observer: Callable[[], None]) -> None:
        """Called where callbacks are, and reads no parameters: those of the step may still be coming."""
        self._observers.append(observer)
        self._context.calls_back = True

    def add_watcher(self, watcher: Callable[[], None]) -> None:
        """Called on every member after each committed step, before what is saved of it, and perhaps again: it knows how
        far it is. It reads no parameters.
        """
        self._watchers.append(watcher)

    def add_keeper(self, keeper: Callable[[], None]) -> None:
        """Called on every member after each commit, standbys too, before what is saved of that step: what it changes of
        registered states is saved with it. It finds all parameters here. A change of the world may have it called twice
        for one step.
        """
        self._keepers.append(keeper)

    def stand_at(self, step: int) -> None:
        """This worker begins at `step`, whose boundary it does not owe."""
        self._called.look()
        self._passed = self._called.last = step
        self._owed = False
        self._context.state.followed = step
        self._lagging.forget()

    def go_back_to(self, step: int, saved: int) -> None:
        """All have gone back to a checkpoint, or to the start (then `saved` is -1): what came after counts no more."""
        self._saving.on_return_to(saved)
        self._evaluation.on_return()
        self._requests.on_return()
        self.stand_at(step)
        self._corruption.on_return()

    def on_world(self, world: World) -> None:
        """A world begins."""
        self._corruption.on_world(world)
        self._evaluation.begin_round(world, is_new=True)
        self._saving.on_world(world)
        if not self._owed:
            self._lagging.on_world(world)
        self._status.publish()

    def before_rehearsal(self) -> None:
        """A member without lanes is about to run the script's body for nothing."""
        self._lagging.before_rehearsal()

    def after_rehearsal(self) -> None:
        """The script is through with it."""
        self._lagging.after_rehearsal()

    def before_change(self, old: World, new: Plan) -> None:
        """A planned world is about to begin, on all members of the old one. Raises `WorldChanged`."""
        self._corruption.before_change(old, new)

    def look_for_corruption(self, record: Record) -> Findings | None:
        """Where a step that is not finite is to end the job: whether memory is at fault. None: that cannot be known.
        Raises `WorldChanged`, also where all go back to a checkpoint, or pause, because of it.
        """
        context = self._context
        if not (record.not_finite and context.config.stop_on_nan and context.world is not None):
            return None
        found = self._corruption.compare_all(context.world)
        if found is not None and found.corrupt:
            self._status.publish()
            self._await_return()
        return found

    def _await_return(self) -> None:
        """Raises `WorldChanged` once all go back to a checkpoint, or pause; returns where they do neither."""
        context = self._context
        if context.config.on_corruption is OnCorruption.CONTINUE:
            return
        end = time.monotonic() + RETURN_SECONDS
        while time.monotonic() < end:
            if context.link.membership().state is not MemberState.TRAINING:
                raise WorldChanged("all go back to a checkpoint or pause, because copies of blocks differ")
            context.link.pause(LOOK_SECONDS)
            if context.link.stopping:  # then it does not pause
                time.sleep(LOOK_SECONDS)

    def on_roll_forward(self, record: Record) -> None:
        """This member has the record of a vote that it has not passed itself."""
        self._corruption.on_record(record)

    # ---- in a world

    def pass_step(self, record: Record) -> None:
        """After a commit and its hand-out. Raises `WorldChanged`; then it is owed."""
        if looks := self._lagging.are_awaited:
            self.bring_parameters()  # a state of the user's may be one of parameters
            self._lagging.after_a_body()
        if not self._keep():
            return
        self._carry_out(record, stepped=True)
        self._call_back(record)
        if looks:
            self._lagging.before_a_body()

    def pass_vote(self, record: Record) -> None:
        """After a vote without a step."""
        if self._owed:
            self._settle(record)
        else:
            self._carry_out(record, stepped=False)

    def _keep(self) -> bool:
        """Tell commits, keepers and watchers; return whether what follows is to be done here. Where the world has
        changed under one of them, in a forward of sharded parameters, the new one has settled this boundary.
        """
        world = self._context.world
        self.commits.call()
        if self._keepers:
            self.bring_parameters()
            with self._evaluation.anywhere():
                for keeper in self._keepers:
                    if self._context.world is world:
                        keeper()
        if self._context.world is not world:
            return False
        for watcher in self._watchers:
            watcher()
        return True

    def _carry_out(self, record: Record, stepped: bool) -> None:
        context = self._context
        context.meter.on_vote(stepped)
        self._corruption.on_vote(record)
        if context.world is not None:
            if context.are_parameters_here:
                context.world.group.progress.begin_boundary(context.boundaries)
            self._saving.on_vote(record, context.world, stepped, self._owed)
        self._requests.carry_out(record.requests)
        self._status.publish()

    def _call_back(self, record: Record) -> None:
        context, step = self._context, record.step
        if self._called.last < step:
            group = context.world.group if context.world is not None else None
            others = group if record.calls_back and group is not None and group.size > 1 else None
            if context.rank == 0:
                self._call_all(step)
                if others is not None and context.world is not None and context.world.group is others:
                    self._called.tell(others, step)  # where the world has changed meanwhile, all know it by that
            elif others is not None:
                self._called.expect(others)
            else:
                self._called.last = step
        self._passed = step

    def _call_all(self, step: int) -> None:
        if self._callbacks:
            self.bring_parameters()
        self._called.last = step
        for observer in self._observers:
            observer()
        with self._evaluation.anywhere():
            for callback in self._callbacks:
                callback()

    def before_vote(self) -> None:
        """Also before this world is left: all know whether the last step's callbacks were called. Raises
        `WorldChanged`.
        """
        self._called.settle()

    def end_body(self) -> None:
        """The script is through with the last step: what it asks for from now on is of the next one. Waits for nobody.
        Raises `WorldChanged`.
        """
        if self._evaluation.is_between_batches:
            self._evaluation.end_round(self._requests.at_hand, self._saving.states.asks_at_hand)
        if not self._owed:  # else the script may be in the midst of an evaluation
            self._saving.states.take()
            self._lagging.end_body()

    def settle_evaluations(self, messages: Sequence[int] = ()) -> None:
        """Before a vote, with the last step's weights: who has not heard what was measured after it hears it now, and
        what was asked for since is exported or copied. `messages`: as `Evaluation.settle`. Raises
        `WorldChanged`.
        """
        evaluation, context = self._evaluation, self._context
        if not evaluation.settle(messages) and not self._requests.at_hand:
            return  # as a rule
        if evaluation.messages:
            return  # with all others, once they have heard it
        is_news = evaluation.measured.is_news(context.rank == 0) and not self._owed
        if is_news or evaluation.asked:
            self.bring_parameters()
        if is_news:
            context.is_busy = True
            try:
                evaluation.tell()
            finally:
                context.is_busy = False
        self._requests.export_at_hand()
        if evaluation.asks_to_save and not self._owed and context.world is not None:
            self._saving.begin(context.world)
            self._saving.states.put_early()

    def agree_on_evaluations(self, world: World) -> None:
        """In a recovery, once its step is committed here: all have the same numbers of it. Raises `WorldChanged`."""
        self._evaluation.agree(world)

    def on_all_here(self) -> None:
        """What was handed out after the last step has come: the user's code is next."""
        context = self._context
        assert context.world is not None
        context.world.group.progress.begin_boundary(context.boundaries)

    # ---- over a change

    def agree(self, world: World) -> tuple[list[bool], list[tuple[int, int]]]:
        """In a recovery: whether the boundary of its step is owed, on all members alike; returns by rank whose frozen
        parameters are in place, and the `ends_of` all stages, which travel along. Raises `WorldChanged`.
        """
        recovery = world.plan.recovery
        assert recovery is not None
        counts, step = recovery.counted[world.rank], recovery.step
        state = self._context.state
        ends = ends_of(shapes_of(state.module)) if state.layout.stages else (0, 0)
        self._called.look()
        passed, called = (self._passed, self._called.last) if counts else (step, -1)
        mine = [int(state.frozen_in_place), *ends, passed, called]
        rows = world.group.all_gather(torch.tensor(mine, dtype=torch.int64, device="cpu"))
        self._called.last = int(rows[:, 4].max())
        self._owed = int(rows[:, 3].min()) < step or self._called.last < step
        if not self._owed:
            self._passed = step
        return rows[:, 0].bool().tolist(), [(gets, gives) for gets, gives in rows[:, 1:3].tolist()]

    @property
    def is_owed(self) -> bool:
        """Whether the world at hand has the boundary of its first step to settle."""
        return self._owed

    def _settle(self, record: Record) -> None:
        """The vote's record, with what the step's own asked for: its asker may be gone. (Ranks in it are gone too.)"""
        if not self._keep():
            return
        passed = self._context.state.record
        asked = passed.requests if passed is not None else ()
        self._carry_out(replace(record, requests=tuple(dict.fromkeys([*asked, *record.requests]))), stepped=True)
        self._owed = False
        self._call_back(record)
        if self._context.world is not None:
            self._lagging.on_world(self._context.world)
        self._evaluation.tell()


def _nothing() -> None:
    """Nothing is on its way."""


class CalledSteps:
    """`last`: the last step whose callbacks were called, or before which this worker was not there."""

    def __init__(self) -> None:
        self.last = 0
        self._group: Group | None = None
        self._message = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._comes: Waiting | None = None
        """Of all but rank 0: what it says of the step at hand."""
        self._sent: list[tuple[Work, Tensor]] = []
        """Of rank 0."""

    def expect(self, group: Group) -> None:
        """Not rank 0: it will tell when it is through with the step at hand. Raises `WorldChanged`."""
        self._group, self._message = group, torch.zeros_like(self._message)
        self._comes = group.begin_wait([group.receive(self._message, 0, CALLED)])

    def tell(self, group: Group, step: int) -> None:
        """Rank 0 is through with this step's. Raises `WorldChanged`."""
        self._group = group
        for rank in range(1, group.size):
            message = torch.tensor([step], dtype=torch.int64, device="cpu")
            self._sent.append((group.send(message, rank, CALLED), message))

    def settle(self) -> None:
        """Everybody has heard of the step at hand. Raises `WorldChanged`."""
        if self._comes is not None:
            self._take(self._comes)
        elif self._sent:
            assert self._group is not None
            sent: Sequence[tuple[Work, Tensor]] = self._sent
            self._sent = []
            self._group.wait([work for work, _ in sent])

    def look(self) -> None:
        """The world is over: what has come counts, and nothing else will."""
        if self._comes is not None and self._comes.is_over:
            with contextlib.suppress(WorldChanged):
                self._take(self._comes)
        self._comes, self._sent, self._group = None, [], None

    def _take(self, comes: Waiting) -> None:
        self._comes = None
        comes.wait()
        self.last = max(self.last, int(self._message))


class CommitCalls:
    """The script's functions, in the order in which it has given them."""

    def __init__(self, context: TrainingContext, evaluation: Evaluation) -> None:
        self._context, self._evaluation = context, evaluation
        self._functions: list[Any] = []
        self._calls: list[Callable[[], object]] = []
        self._failed = False
        """One of them has raised an error."""
        self.all_here: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context in which all parameters are here. Raises `WorldChanged`."""

    def add(self, function: Any, call: Callable[[], object]) -> None:
        """`call` calls it. Raises `UserError` for what is no function, comes too late or is there."""
        if not callable(function) or isinstance(function, type):
            raise UserError(f"engine.on_commit got {function!r}; expected a function that takes the engine.")
        if self._context.loop_has_begun:
            raise UserError("engine.on_commit was called in the loop, some steps too late; call it before.")
        if function in self._functions:
            raise UserError(
                f"engine.on_commit got {function!r} twice, which would count each step twice; give each function once."
            )
        self._functions.append(function)
        self._calls.append(call)

    def call(self) -> None:
        """A step is committed, here or in the world before. Raises `WorldChanged` before any function is called."""
        state = self._context.state
        if self._calls and state.followed < state.step:
            if self._failed:
                raise UserError(
                    f"a function of engine.on_commit has raised an error at step {state.followed + 1}, and the script "
                    "went on; what it keeps lacks that step. Let such an error end the script."
                )
            with self.all_here(), self._evaluation.anywhere(), self._apart():
                self._call_all()
        state.followed = state.step

    def _call_all(self) -> None:
        world = self._context.world
        if world is not None:
            world.group.progress.begin_boundary(self._context.boundaries)
        self._failed = True
        for call in self._calls:
            call()
        self._failed = False

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A boundary that was owed may be settled within a forward: what is computed and drawn is the same there."""
        context, random = self._context, RandomState.save()
        seed_everything(context.config.seed, context.state.step, 0, 0, purpose="commit")
        try:
            with torch.no_grad(), torch.autocast(context.state.device.kind.type, enabled=False):
                yield
        finally:
            random.restore()
