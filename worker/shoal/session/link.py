"""The interface between the training thread and what speaks for it to a controller.

The engine knows only this: `Link` is what it asks, `Item`s are what it receives. `session/controller_link.py` is the
link to a controller, `session/link_choice.py` the link of a script that has none. `Inbox` holds the items that the
session's thread has heard and the training thread has not yet seen: it is bounded. Nothing else is shared by the two
threads but the groups, whose `abort()` the link calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal_protos.description import Description
from shoal_protos.messages import AskKind, Ending, Inventory, Result, Status, Telemetry
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs

from shoal.core.membership import Membership
from shoal.group.group import Group


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What a worker knows of its job: all of it once it is welcomed."""

    name: str
    """Empty where there is no controller."""
    run: str
    """The uid of the job's run; without a controller this process is a run of its own."""
    resume: int | str | bool | None = None
    """What the job is to go on from; None: the config says it."""
    opened_generations: Runs = NO_BLOCKS
    """The generations that its store knows; none: any."""
    step: int = 0
    """How many steps were committed when this worker was welcomed."""
    loss: float | None = None
    """Loss of the last of them, where there is one."""
    checkpoint: str = ""
    """Path of the newest checkpoint that its store knows; empty: it knows none."""
    checkpoint_marks: tuple[str, ...] = ()
    """Names of files of which every worker must see one in the place where it saves."""
    stall_seconds: float = 1800.0
    """How long it waits for what may come back, as its specification says."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """PREPARE was heard: every group is aborted; the answer is `Link.answer(inventory)`, which closes them."""

    generation: int


@dataclass(frozen=True, slots=True)
class Planned:
    """PLAN was heard and its group is being built: make ready for it what needs no group."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Recover:
    """That group is built: catch up, then `Link.report_ready(generation)`."""

    plan: Plan
    group: Group
    group_seconds: float
    """What building took."""


@dataclass(frozen=True, slots=True)
class Opened:
    """OPEN was heard: train."""

    generation: int


@dataclass(frozen=True, slots=True)
class Begun:
    """To a joiner: the planned generation began, this is its first message (the small job state)."""

    plan: Plan
    group: Group
    state: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """The controller asks the next vote to carry a request."""

    kind: AskKind
    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Shut down. After `START_OVER` the link says hello as a joiner, which ends its warm-up at once or runs it."""

    ending: Ending
    reason: str
    status: int = 0
    """What the process exits with where it is neither to start over nor to fail."""


Item = Stopped | Planned | Recover | Opened | Begun | Asked | Ended


@dataclass(frozen=True, slots=True)
class Prepared:
    """A planned change for which this process is ready; `group` is None where it is left out."""

    plan: Plan
    group: Group | None
    group_seconds: float


class Link(Protocol):
    """What the training thread may ask. Every method is called on the training thread only."""

    alone: bool
    """No controller: a world of one that nobody else will ever join."""
    before_building: Callable[[], None]
    """Called on a builder's thread before this process begins to build a group. Tests strike there."""

    @property
    def job(self) -> JobInfo:
        """The job, once introduced."""

    @property
    def worker(self) -> str:
        """This worker's id; empty until the controller has given one."""

    @property
    def incarnation(self) -> str:
        """Random, this process's own; another one after it had to start over."""

    def introduce(self, description: Description, status: Status) -> None:
        """Say hello and wait until welcomed. Raises `UserError` with the controller's sentence when refused."""

    def end_warm_up(self) -> None:
        """This joiner is warm, and ready to become a member."""

    @property
    def stopping(self) -> bool:
        """Whether an item waits that the training thread must see before its next lane. Cheap; no lock."""

    def take(self, seconds: float | None = None) -> Item | None:
        """The next item, in the order heard; None when none came in time. With None waits for ever (a wait in a world
        ends only by the controller or by `abort`)."""

    def pause(self, seconds: float) -> None:
        """Waits between two votes without a step; returns early when an item comes."""

    def answer(self, inventory: Inventory) -> None:
        """The answer to the last PREPARE; the link repeats it as often as the controller asks. The buffers of groups
        that were aborted are free afterwards.
        """

    def report_ready(self, generation: int) -> bool:
        """READY. False: another PREPARE came meanwhile; go on with `take`."""

    def enter_vote(self, holds: Runs) -> int:
        """See `Membership.enter_vote`."""

    def leave_vote(self, voted: list[int]) -> Prepared | None:
        """See `Membership.leave_vote`; with the group of the plan that begins."""

    def begin(self, plan: Plan, group: Group | None) -> None:
        """The world of `plan` begins in `group` (None: it leaves this process out). All other groups are closed.

        Say where this worker stands (`publish`) right after it: until then the controller hears nothing of it. When a
        later PREPARE was heard meanwhile, `group` is aborted already, and `take` says so.
        """

    def membership(self) -> Membership:
        """A snapshot for reading."""

    def publish(self, status: Status, telemetry: Telemetry) -> None:
        """State where this worker stands; sent at once when anything but the step changed, else with the heartbeat.

        `sequence`, `point`, `promised`, `generation` and `broken` are filled in by the link.
        """

    def result(self, result: Result) -> None:
        """Digests: sent now and on every new stream. Why it failed: waits until the controller has it, at most 60 s."""

    def close(self) -> None:
        """End the session's thread; idempotent."""


MOST_ASKED = 64
"""More requests than this at once are forgotten, oldest first."""


class Inbox:
    """One of each kind at most, but for requests."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._arrived = threading.Condition()
        self.waiting = False
        """Whether there is an item. Read without the lock."""

    def put(self, item: Item) -> None:
        """A stop or an end makes all that was heard of a world before it void."""
        with self._arrived:
            if isinstance(item, Stopped | Ended):
                self._items = deque(old for old in self._items if isinstance(old, Asked | Ended))
            elif isinstance(item, Asked):
                asked = [old for old in self._items if isinstance(old, Asked)]
                if len(asked) >= MOST_ASKED:
                    self._items.remove(asked[0])
            self._items.append(item)
            self.waiting = True
            self._arrived.notify_all()

    def take(self, seconds: float | None) -> Item | None:
        """The oldest item; None when none came in time."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._items), seconds)
            item = self._items.popleft() if self._items else None
            self.waiting = bool(self._items)
            return item

    def pause(self, seconds: float) -> None:
        """Waits until there is an item, at most so long."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._items), seconds)
