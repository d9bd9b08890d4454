"""The link of an engine in a crew: the real dialogue and membership, and groups in memory. No socket, no thread.

What a session does with locks and builders (session/shared.py, session/shared.py) is done here under the
crew's one lock, when the crew comes round.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memory_group import wire_of
from shoal.core.membership import Membership
from shoal.exchange.packing import receive_framed
from shoal.exchange.traffic import FIRST_MESSAGE
from shoal.group.group import Group
from shoal.session.dialogue import Abort, Build, Deliver, Dialogue, Effect, ProcessInfo
from shoal.session.link import Asked, Begun, Ended, Item, JobInfo, Prepared, Recover, Stopped
from shoal_protos.description import Description
from shoal_protos.errors import UserError
from shoal_protos.messages import Ending, Inventory, Result, Status, Telemetry, ToController, ToWorker
from shoal_protos.plan import Plan
from shoal_protos.runs import Runs

if TYPE_CHECKING:
    from crew import Crew

Wait = Callable[[Callable[[], bool]], None]


class CrewLink:
    """A `Link`."""

    alone = False

    def __init__(self, crew: Crew, worker: str, wait: Wait) -> None:
        self.crew, self._wait = crew, wait
        self.address = f"{worker}:1"
        self.own = Membership(worker, f"{worker}.1")
        self.groups: dict[int, Group] = {}
        self.plans: dict[int, Plan] = {}
        """Of the groups, those built for a change that may begin; and of those being built."""
        self.inventories: list[Inventory] = []
        self.results: list[Result] = []
        self.before_building: Callable[[], None] = lambda: None
        self.muted = False
        """Nothing of it is heard."""
        self.closed = False
        self.coordinate = 0
        """Where it sits in a cell, before it says hello."""
        self._items: deque[Item] = deque()
        self._lives = 1

    # ---- on the training thread

    @property
    def job(self) -> JobInfo:
        return self.dialogue.job

    @property
    def worker(self) -> str:
        return self.own.worker

    @property
    def incarnation(self) -> str:
        return self.own.incarnation

    def introduce(self, description: Description, status: Status) -> None:
        domain = self.crew.domains.get(self.worker, f"domain of {self.worker}")
        process = ProcessInfo("job", f"host of {self.worker}", 1, domain, self.address, coordinate=self.coordinate)
        self.dialogue = Dialogue(self.own, process, description, status)
        self.crew.connect(self)
        self._wait(lambda: self.dialogue.welcomed or self.dialogue.ending is not None)
        if self.dialogue.ending is not None:
            raise UserError(self.dialogue.ending.reason)

    def end_warm_up(self) -> None:
        self.own.end_warm_up()
        self._notify()

    @property
    def stopping(self) -> bool:
        return bool(self._items)

    def take(self, seconds: float | None = None) -> Item | None:
        for plan in (self.own.recovery, self.own.plan):
            group = self.groups.get(plan.generation) if plan is not None else None
            if plan is not None and group is not None:
                self.dialogue.on_broken_peers({plan.members[rank].worker for rank in group.broken_peers})
        self._notify()
        if seconds is None:
            self._wait(lambda: bool(self._items))
        item = self._items.popleft() if self._items else None
        if isinstance(item, Ended) and item.ending is Ending.START_OVER:
            self._lives += 1
            self.dialogue.start_over(f"{self.address}.{self._lives}")
            self.crew.connect(self)
        return item

    def pause(self, seconds: float) -> None:
        """Others go on meanwhile."""
        beat = self.crew.beats
        self._wait(lambda: bool(self._items) or self.crew.beats > beat)

    def answer(self, inventory: Inventory) -> None:
        self.inventories.append(inventory)
        self.dialogue.answer(inventory)
        self._notify()

    def report_ready(self, generation: int) -> bool:
        is_ready = self.dialogue.report_ready(generation)
        self._notify()
        return is_ready

    def enter_vote(self, holds: Runs) -> int:
        voted = self.own.enter_vote(holds)
        self._notify()
        return voted

    def leave_vote(self, voted: list[int]) -> Prepared | None:
        plan = self.own.leave_vote(voted)
        if plan is None:
            self._carry_out(self.dialogue.on_vote_over())
            return None
        if plan.rank_of(self.worker, self.incarnation) is None:
            return Prepared(plan, None, 0.0)
        return Prepared(plan, self.groups[plan.generation if self.own.builds(plan) else self.own.generation], 0.0)

    def take_outgoing(self) -> list[ToController]:
        """What is due; heartbeats tell of the training thread, which is never stuck."""
        number = self.own.generation
        group = self.groups.get(number)
        if group is not None:
            activity = group.progress.activity(str)
            self.dialogue.activities = {number: replace(activity, generation=number, waits_for=(), seconds=0.0)}
        return self.dialogue.take_outgoing()

    def begin(self, plan: Plan, group: Group | None) -> None:
        self.dialogue.begin(plan)
        for other in self.groups.values():
            if other is not group:
                other.close()
        self.groups = {} if group is None else {plan.generation: group}
        self.plans.clear()

    def membership(self) -> Membership:
        return copy.copy(self.own)

    def publish(self, status: Status, telemetry: Telemetry) -> None:
        self.dialogue.update_status(status, telemetry)
        self._notify()

    def result(self, result: Result) -> None:
        self.results.append(result)
        self.dialogue.report(result)
        self._notify()
        if result.failure:
            self._wait(lambda: Result not in self.dialogue._due)

    def close(self) -> None:
        self.closed = True
        self.abort_all()

    def _notify(self) -> None:
        self.crew.changed.notify_all()

    # ---- when the crew comes round

    def on_message(self, message: ToWorker) -> None:
        self._carry_out(self.dialogue.on_message(message))

    def on_built(self, plan: Plan, group: Group) -> None:
        """All members have met."""
        self.groups[plan.generation] = group
        if plan.recovery is not None:
            del self.plans[plan.generation]
            self._items.append(Recover(plan, group, 0.0))
        else:
            self.own.on_built(plan.generation)
            self.dialogue.notice()
        self._notify()

    def look_for_first_message(self) -> bool:
        """A joiner waits in every group that it has built."""
        for generation, plan in self.plans.items():
            group = self.groups.get(generation)
            if group is not None and self.own.is_joiner:
                way = (plan.builder, group.rank, FIRST_MESSAGE)
                if len(wire_of(group).arrived[way]) == 2:
                    state = receive_framed(group, plan.builder, FIRST_MESSAGE)
                    self._drop({generation})
                    self.plans.clear()
                    self._items.append(Begun(plan, group, state))
                    return True
        return False

    def abort_all(self) -> None:
        for group in self.groups.values():
            group.abort()
        self.groups.clear()
        self.plans.clear()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(item):
                    if isinstance(item, Stopped | Ended):
                        self._items = deque(old for old in self._items if isinstance(old, Asked | Ended))
                    self._items.append(item)
                case Build(plan):
                    self.before_building()
                    self.plans[plan.generation] = plan
                case Abort():
                    self.abort_all()
        self._drop(self.own.live)
        self._notify()

    def _drop(self, live: set[int]) -> None:
        for generation in [number for number in self.groups if number not in live]:
            self.groups.pop(generation).abort()
        for generation in [number for number in self.plans if number not in live]:
            del self.plans[generation]
