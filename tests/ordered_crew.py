"""A crew whose members have a device each: their bulk goes by a wire without tags, in memory, as strict as NCCL."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from crew import Crew, Task
from memory_group import MemoryGroup, Wait, Way, Wire, group_on
from shoal.data.seeds import RandomState
from shoal.exchange.traffic import ASKED, BULK
from shoal.group.asked_order import CARRY_TAG, POSTED_TAG
from shoal.group.device_group import StagedGroup
from shoal.group.group import Group, WorldChanged
from shoal.group.learnt_order import Post
from shoal.group.ordered import CarriedMessage, OrderedGroup, Trust
from shoal.group.wait_threads import Connection
from shoal.process.device import Device
from torch import Tensor

ONE_TAG = 0
MOMENT_SECONDS = 0.001
ASKING = {POSTED_TAG, CARRY_TAG, ASKED}
"""Tags of what members say over the host about messages of the wire."""


class Turn(Connection):
    """Looked at where a member waits for the wire: the others go on."""

    def __init__(self, wire: Wire, peer: int, wait: Wait) -> None:
        self._wire, self._peer, self._wait = wire, peer, wait
        self.pause_seconds = 0.0

    def look(self) -> str | None:
        self._wait(lambda: True)
        random = RandomState.save()
        self._wire.changed.wait(MOMENT_SECONDS)
        random.restore()
        self._wait(lambda: True)
        return "it is gone" if self._wire.is_over(self._peer) else None


class Host(MemoryGroup):
    """A `HostGroup`."""

    def deliver(self, messages: Sequence[tuple[Tensor, int, int]]) -> None:
        with self.wire.changed:
            for message in messages:
                self.send(*message)

    def connection(self, peer: int) -> Connection:
        return Turn(self.wire, peer, self._wait)

    def on_failure(self, peer: int, failure: str) -> WorldChanged:
        self._broken.add(peer)
        return WorldChanged(f"the exchange with rank {peer} failed: {failure}")


class MemoryWire:
    """A `Wire`. Messages of a pair come in their order, of all tags."""

    def __init__(self, below: MemoryGroup) -> None:
        self._below = below

    def carry(self, messages: Sequence[CarriedMessage]) -> Callable[[], None]:
        below = self._below
        with below.wire.changed:
            works = []
            for message in messages:
                act = below.send if message.post.sends else below.receive
                works.append(act(message.tensor, message.post.peer, ONE_TAG))

        def wait() -> None:
            with below.wire.changed:
                below.wait(works)

        return wait

    def abort(self) -> None:
        with self._below.wire.changed:
            self._below.abort()

    def close(self) -> None:
        with self._below.wire.changed:
            self._below.close()


class OrderedCrew(Crew):
    """A crew, with `asked`: by worker and step, what it has asked for over the host; `messages`: by worker, how many
    that took, which a thread may send when the step is over.
    """

    def __init__(self, names: str, task: Task) -> None:
        self.groups: list[OrderedGroup] = []
        self.asked: dict[str, Counter[int]] = defaultdict(Counter)
        self.messages = Counter[str]()
        self.carrying: dict[Wire, Wire] = {}
        """By the wire of a group over the host, the one of its bulk."""
        self.trust: dict[str, Trust] = defaultdict(Trust)
        super().__init__(names, task)
        self.group_on = self._ordered_on

    def _ordered_on(self, device: Device, below: MemoryGroup) -> Group:
        wire, rank, wait = below.wire, below.rank, below._wait
        if wire.size == 1:
            return group_on(device, below)
        crew = self
        worker = next(worker for worker in self.workers.values() if worker.wait == wait)
        asked = self.asked[worker.name]

        class Counting(Host):
            def _post(self, kind: str, way: Way) -> Way:
                if kind == "send" and way[2] in ASKING:
                    crew.messages[worker.name] += 1
                    asked[worker.engine.context.state.step + 1] += way[2] == ASKED
                return super()._post(kind, way)

        host, carrying = Counting(wire, rank, wait), self.carrying.setdefault(wire, Wire(wire.size, self.changed))
        by_wire = MemoryWire(MemoryGroup(carrying, rank, self._let_go))
        staged = StagedGroup(host, device)
        self.groups.append(group := OrderedGroup(staged, host, by_wire, device, BULK, self.trust[worker.name]))
        tell = group._asked.on_post

        def on_post(post: Post) -> None:
            asked[worker.engine.context.state.step + 1] += 1
            tell(post)

        group._asked.on_post = on_post  # type: ignore[method-assign]
        return group

    def _let_go(self, until: Callable[[], bool]) -> None:
        self.changed.wait_for(until)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with self.changed:
            for group in self.groups:
                group.close()  # threads of processes that are no more
