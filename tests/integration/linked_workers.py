"""Workers for tests of the link: each is a real link, and what a training thread does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from integration.small_controller import PATIENCE_SECONDS, SmallController
from shoal.group.group import Group
from shoal.session.controller_link import ControllerLink
from shoal.session.link import Item, Opened, Planned, Recover, Stopped
from shoal.session.settings import SessionSettings
from shoal_protos.description import Description
from shoal_protos.messages import Hello, Inventory, MemberState, Open, PlanMessage, Prepare, Ready, Status, Telemetry
from shoal_protos.plan import Member, Plan
from shoal_protos.runs import NO_BLOCKS, every
from worlds import BLOCKS, recovery

DESCRIPTION = Description(2, BLOCKS, 4096, 8, 1, 0, 10, (), "SGD", {}, {}, False, False)
NEW = Status(0, 0, MemberState.WARMING_UP, 0, step=-1, committed_in=0)

Wanted = TypeVar("Wanted", bound=Item)


class Worker:
    """A link and what a training thread does with it, on a thread of its own where it may block."""

    def __init__(self, name: str, controller: SmallController, **settings: Any) -> None:
        self.name = name
        self.link = ControllerLink(SessionSettings(controller=controller.address, job="job", worker=name, **settings))
        self._controller = controller
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"training {name}")
        self.group: Group | None = None
        self.plan: Plan | None = None

    def introduce(self) -> Hello:
        """On the calling thread: SIGTERM is heard where that is the main thread."""
        self.link.introduce(DESCRIPTION, NEW)
        self.link.end_warm_up()
        self.hello = self._controller.receives(Hello, by=self.name)
        return self.hello

    def does(self, act: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(act)

    def takes(self, kind: type[Wanted]) -> Wanted:
        item = self.link.take(PATIENCE_SECONDS)
        if isinstance(item, Planned):  # nothing is made ready here
            item = self.link.take(PATIENCE_SECONDS)
        assert isinstance(item, kind), f"{self.name} took {item}, not a {kind.__name__}"
        return item

    def stops(self, generation: int) -> None:
        assert self.takes(Stopped).generation == generation
        self.link.answer(Inventory(generation, 0, 0, 0, b"", NO_BLOCKS, NO_BLOCKS, NO_BLOCKS))

    def recovers(self) -> Recover:
        recover = self.takes(Recover)
        self.plan, self.group = recover.plan, recover.group
        return recover

    def opens(self) -> None:
        opened = self.takes(Opened)
        assert self.plan is not None and opened.generation == self.plan.generation
        self.begins()

    def begins(self) -> None:
        assert self.plan is not None
        self.link.begin(self.plan, self.group)
        self.link.publish(replace(NEW, step=0), Telemetry())

    def gathers(self) -> list[int]:
        assert self.group is not None
        return [int(row) for row in self.group.all_gather(torch.tensor([self.link.worker.encode()[0]]).byte())]

    def votes(self) -> Any:
        """What begins after a vote that all pass like this one."""
        voted = self.link.enter_vote(every(BLOCKS))
        return self.link.leave_vote([voted, voted])

    def close(self) -> None:
        self.link.close()
        self._thread.shutdown()


@contextmanager
def workers(names: str) -> Iterator[tuple[SmallController, list[Worker]]]:
    """A controller and introduced workers."""
    with ExitStack() as stack:
        controller = stack.enter_context(SmallController())
        them = [Worker(name, controller) for name in names]
        for worker in them:
            stack.callback(worker.close)
            worker.does(worker.introduce).result(PATIENCE_SECONDS)
        yield controller, them


def at(plan: Plan, them: list[Worker]) -> Plan:
    """The plan with the processes as they are."""
    named = {worker.name: Member(worker.name, worker.link.incarnation, worker.hello.address) for worker in them}
    return replace(plan, members=tuple(named.get(member.worker, member) for member in plan.members))


def begin_a_world(controller: SmallController, them: list[Worker], generation: int = 1) -> Plan:
    """PREPARE, PLAN, READY, OPEN."""
    plan = at(recovery(generation, "".join(worker.name for worker in them)), them)
    for worker in them:
        controller.sends(worker.name, Prepare(generation))
        worker.stops(generation)
        controller.receives(Inventory, lambda inventory: inventory.answers == generation, by=worker.name)
    for worker in them:
        controller.sends(worker.name, PlanMessage(plan))
    for worker in them:
        worker.recovers()
        assert worker.link.report_ready(generation)
        controller.receives(Ready, by=worker.name)
    for worker in them:
        controller.sends(worker.name, Open(generation))
        worker.opens()
    return plan


def together(them: list[Worker], act: Callable[[Worker], Any]) -> list[Any]:
    futures = [worker.does(lambda worker=worker: act(worker)) for worker in them]
    return [future.result(PATIENCE_SECONDS) for future in futures]
