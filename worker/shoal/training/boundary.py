"""The boundary of a step: what follows its commit and hand-out, on every member with the same record.

Saves begin, requests are carried out, callbacks are called, a planned generation begins. A world that breaks between
the vote and the boundary leaves it owed: the new world settles it by a vote without a step before it trains on, so that
no committed step is without its callback or its checkpoint. Only a rank 0 that dies when all others have passed the
boundary takes what its callbacks have done, or not done, with it. Called by the engine and by resize.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shoal.exchange.vote import Record
from shoal.world import World

if TYPE_CHECKING:
    from shoal.training.engine import Engine

StepCallback = Callable[["Engine"], None]


class Boundary:
    """See the module's text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._callbacks: list[StepCallback] = []
        self._settled = 0
        """The last step whose boundary this member has passed, or knows to be passed."""
        self._called = 0
        """The last step whose callbacks were called here, or before this worker was there."""
        self._owed = False
        """The world that is being built begins by settling its step."""

    def on_step(self, callback: StepCallback) -> None:
        self._callbacks.append(callback)

    def stand_at(self, step: int) -> None:
        """This worker begins at `step`, whose boundary is none of its business."""
        self._settled = self._called = step
        self._owed = False

    # ---- in a world

    def pass_step(self, record: Record) -> None:
        """After a commit and its hand-out. Raises `WorldChanged`; then it is owed."""
        self._carry_out(record, stepped=True)
        self._call_back(record.step)
        self._engine.resize.begin_planned()

    def pass_vote(self, record: Record) -> None:
        """After a vote without a step."""
        if self._owed:
            self._settle(record)
        else:
            self._carry_out(record, stepped=False)
        self._engine.resize.begin_planned()

    def _carry_out(self, record: Record, stepped: bool) -> None:
        engine = self._engine
        engine.meter.on_vote(stepped)
        engine.corruption.on_vote(record)
        if engine.world is not None:
            engine.world.group.progress.begin_boundary(engine.boundaries)
            engine.saving.on_vote(record, engine.world, stepped)
        engine.requests.carry_out(record.requests)
        engine.publish()

    def _call_back(self, step: int) -> None:
        if self._engine.rank == 0 and self._called < step:
            self._called = step
            with self._engine.evaluation.anywhere():
                for callback in self._callbacks:
                    callback(self._engine)
        self._settled = step

    # ---- over a change

    def agree(self, world: World, frozen_in_place: bool) -> list[bool]:
        """In a recovery: whether the boundary of its step is owed, on all members alike; returns by rank the answers
        to `frozen_in_place`, which travel along. Raises `WorldChanged`.
        """
        recovery = world.plan.recovery
        assert recovery is not None
        counts, step = recovery.counted[world.rank], recovery.step
        mine = [int(frozen_in_place), self._settled if counts else step, self._called if counts else -1]
        rows = world.group.all_gather(torch.tensor(mine, dtype=torch.int64))
        self._owed = int(rows[:, 1].min()) < step
        self._called = min(int(rows[:, 2].max()), step)
        if not self._owed:
            self._settled = step
        return [bool(there) for there in rows[:, 0].tolist()]

    @property
    def owed(self) -> bool:
        """Whether the world at hand has the boundary of its first step to settle."""
        return self._owed

    def _settle(self, record: Record) -> None:
        """The vote's record, with what the step's own asked for: its asker may be gone. (Ranks in it are gone too.)"""
        passed = self._engine.state.record
        asked = [request for request in passed.requests if request.kind != "frozen"] if passed is not None else []
        self._carry_out(replace(record, requests=tuple(dict.fromkeys([*asked, *record.requests]))), stepped=True)
        self._owed = False
        self._call_back(record.step)
