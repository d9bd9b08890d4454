"""A thousand workers in one process, for control_plane.py: real sessions, nothing trained.

Each has a gRPC channel, the product's `Dialogue` and `Membership`, and a rendezvous port that says who it is, so the
controller hears and sees what it hears and sees of real ones. Groups are built at once, steps pass with heartbeats,
and a world's first step is committed when all its members have begun: a vote needs all. What all are sent alike is
read, and checked, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import sys
import time
from dataclasses import dataclass, field

import grpc
import grpc.aio
from shoal.core.membership import Membership
from shoal.session import dialogue as worker_dialogue
from shoal.session.dialogue import Build, Deliver, Dialogue, Effect, ProcessInfo
from shoal.session.link import Ended, Opened, Stopped
from shoal_protos.channel import CHANNEL_OPTIONS, METHOD
from shoal_protos.description import Description
from shoal_protos.messages import Inventory, MemberState, Status, Telemetry, ToWorker, Welcome
from shoal_protos.plan import Plan, check_plan
from shoal_protos.rendezvous import INCARNATION, entry
from shoal_protos.runs import NO_BLOCKS, Runs, every
from shoal_protos.wire import decode_controller, encode_worker

OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
RECORD = b"r" * 256
LARGE = 4096
"""A message of so many bytes is a plan, which all members are sent."""
STEP_SECONDS = 1.0
AGAIN_SECONDS = 0.5
"""Until the hello after a stream that has ended."""
HOST_WORKERS, RACK_WORKERS = 8, 80

checked: dict[int, Plan] = {}


def _checked_once(plan: Plan) -> None:
    if id(plan) not in checked:
        check_plan(plan)
        checked[id(plan)] = plan


def _read(data: bytes) -> ToWorker:
    return _read_once(data) if len(data) >= LARGE else decode_controller(data)


_read_once = functools.lru_cache(maxsize=64)(decode_controller)


def describe(workers: int, blocks: int) -> Description:
    """A job in which every worker has one lane."""
    return Description(workers, blocks, 4096, 1 << 15, 1, 0, 1_000_000, (), "AdamW", {}, {}, False, False)


@dataclass
class JobWorkers:
    """The workers of one job, and when its worlds came."""

    name: str
    blocks: int
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    opened: dict[int, set[str]] = field(default_factory=dict)
    opened_at: dict[int, float] = field(default_factory=dict)
    """By generation: when all members had begun it."""
    committed_at: dict[int, float] = field(default_factory=dict)
    """By generation: when all had said that they have committed its first step."""
    step: int = 0
    """Of all members: a vote needs all, so nobody is more than one ahead, and nobody at all once one has stopped."""
    stepped_at: float = 0.0
    stopped: bool = False
    """Somebody has been told to stop, and the world that comes of it has not begun."""
    holding: bool = False
    """First steps wait for `commit`, so that a stage's CPU can be told from the next one's."""
    failure: BaseException | None = None
    """What has ended the session of one of the workers."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def on_begun(self, plan: Plan, worker: str) -> None:
        begun = self.opened.setdefault(plan.generation, set())
        begun.add(worker)
        if len(begun) == plan.world_size:
            self.opened_at[plan.generation] = time.monotonic()
            self.news.set()
            if not self.holding:
                self.commit(plan.generation)

    def pass_a_step(self) -> int:
        """Where all stand: a step a second, while nobody has stopped."""
        now = time.monotonic()
        if not self.stopped and now - self.stepped_at >= STEP_SECONDS:
            self.step, self.stepped_at = self.step + 1, now
        return self.step

    def commit(self, generation: int) -> None:
        """Its first vote passes."""
        self.step, self.stepped_at, self.stopped = self.step + 1, time.monotonic(), False
        for worker in self.opened[generation]:
            self.workers[worker].commit_first()
        self.committed_at[generation] = time.monotonic()
        self.news.set()

    async def until_after(self, since: float, times: dict[int, float], seconds: float = 300) -> float:
        """When the first generation after that time came, one of `opened_at` or `committed_at`."""
        async with asyncio.timeout(seconds):
            while not (found := [at for at in times.values() if at >= since]):
                if self.failure is not None:
                    raise self.failure
                self.news.clear()
                await self.news.wait()
        return min(found)

    async def kill(self, count: int) -> None:
        """Workers of one host, or of two where it has fewer: copies lie on other hosts, so that no blocks are lost."""
        first = random.Random(2).choice(sorted(self.workers.values(), key=lambda worker: worker.number))
        names = sorted(self.workers, key=lambda name: (self.workers[name].host != first.host, name))[:count]
        await asyncio.gather(*(self.workers.pop(name).kill() for name in names))

    async def end(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self.workers.values()))


class SimulatedWorker:
    """One worker. `start`, then it serves until `kill`."""

    def __init__(self, job: JobWorkers, number: int, address: str, description: Description) -> None:
        self.job, self.address, self.description = job, address, description
        self.name = f"w{number}"
        self.number = number
        self.host = f"host{number // HOST_WORKERS}"
        self.membership = Membership(self.name, f"{job.name}-{number:08}")
        self.dialogue: Dialogue | None = None
        self.step, self.committed_in, self.boundaries = -1, 0, 0
        self.holds: Runs = NO_BLOCKS
        self._due = asyncio.Event()
        self._welcomed: asyncio.Future[float] | None = None
        self._port: asyncio.Server | None = None
        self._peers: set[asyncio.StreamWriter] = set()
        self._tasks: list[asyncio.Task[None]] = []

    # ---- its life

    async def start(self) -> None:
        """Open the rendezvous port and say hello; returns when it is welcome."""
        self._port = await asyncio.start_server(self._greet, "127.0.0.1", 0)
        address = f"127.0.0.1:{self._port.sockets[0].getsockname()[1]}"
        rack = f"rack{self.number // RACK_WORKERS}"
        process = ProcessInfo(self.job.name, self.host, 1 + self.number, rack, address)
        self.membership.end_warm_up()
        self.dialogue = Dialogue(self.membership, process, self.description, self._status())
        await self.connect()

    async def connect(self) -> float:
        """A new stream, after whatever was before; returns the seconds from its hello to its welcome."""
        await self._hang_up()
        self._welcomed = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        self._tasks = [asyncio.create_task(self._converse(), name=f"session of {self.name}")]
        self._tasks[0].add_done_callback(self._on_end)
        return await self._welcomed - began

    def _on_end(self, session: asyncio.Task[None]) -> None:
        """One that fails is a bug, of the benchmark or of the controller: nobody waits for it any longer."""
        if session.cancelled() or (error := session.exception()) is None:
            return
        self.job.failure = error
        self.job.news.set()
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)

    async def kill(self) -> None:
        """As SIGKILL does: stream and port are gone at once."""
        assert self._port is not None
        self._port.close()
        for peer in tuple(self._peers):
            peer.transport.abort()
        await self._hang_up()

    async def _hang_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._peers.add(writer)
        with contextlib.suppress(ConnectionError):
            writer.write(entry(INCARNATION, self.membership.incarnation.encode()))
            await reader.read()
        self._peers.discard(writer)
        writer.close()

    # ---- its stream

    async def _converse(self) -> None:
        """Stream after stream: one that the controller ends, or that breaks, is followed by another."""
        while True:
            try:
                await self._serve_stream()
            except* (grpc.aio.AioRpcError, asyncio.InvalidStateError) as ended:
                print(f"{self.name} of {self.job.name} says hello again: {ended.exceptions[0]!r}", file=sys.stderr)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _serve_stream(self) -> None:
        assert self.dialogue is not None
        async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
            await call.write(encode_worker(self.dialogue.say_hello()))
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write(call), name=f"{self.name} writes")
                while isinstance(data := await call.read(), bytes):
                    self._hear(_read(data))
                writing.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        """What is due at once, and a heartbeat when it is time."""
        assert self.dialogue is not None
        beat = time.monotonic() + self.dialogue.heartbeat_seconds * (self.number % 100) / 100
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, beat - time.monotonic())):
                    await self._due.wait()
            self._due.clear()
            if time.monotonic() >= beat:
                beat += self.dialogue.heartbeat_seconds
                self._pass_a_step()
                self.dialogue.beat()
            for message in self.dialogue.take_outgoing():
                await call.write(encode_worker(message))

    def _hear(self, message: ToWorker) -> None:
        assert self.dialogue is not None and self._welcomed is not None
        if isinstance(message, Welcome) and not self._welcomed.done():
            self._welcomed.set_result(time.monotonic())
        for effect in self.dialogue.on_message(message):
            self._carry_out(effect)
        self._due.set()

    # ---- what training would do

    def _carry_out(self, effect: Effect) -> None:
        assert self.dialogue is not None
        match effect:
            case Deliver(Stopped(generation)):
                self.job.stopped = True
                self._catch_up()
                self.dialogue.answer(self._inventory(generation))
            case Build(plan) if plan.recovery is not None:
                self.step = self.job.step = plan.recovery.step
                self.boundaries = 0
                self.dialogue.report_ready(plan.generation)
                self.dialogue.notice()
            case Deliver(Opened()):
                self._begin()
            case Deliver(Ended(_, reason)):
                raise RuntimeError(f"worker {self.name} of {self.job.name} was told to end: {reason}")

    def _begin(self) -> None:
        plan, dialogue = self.membership.recovery, self.dialogue
        assert plan is not None and dialogue is not None
        rank = plan.rank_of(self.name, self.membership.incarnation)
        assert rank is not None
        self.holds = plan.kept_by(rank)
        dialogue.begin(plan)
        self._publish()
        self.job.on_begun(plan, self.name)

    def commit_first(self) -> None:
        self.boundaries, self.committed_in = 0, self.membership.generation
        self._catch_up()
        self._publish()

    def _pass_a_step(self) -> None:
        if self.committed_in == self.membership.generation and self.membership.state is MemberState.TRAINING:
            self.job.pass_a_step()
            self._catch_up()
            self._publish()

    def _catch_up(self) -> None:
        """To the step at which all stand."""
        if self.committed_in == self.membership.generation > 0:
            self.boundaries += self.job.step - self.step
            self.step = self.job.step
            self._hold_filled()

    def _hold_filled(self) -> None:
        """What this generation's fills have brought so far."""
        plan = self.membership.recovery
        rank = None if plan is None else plan.rank_of(self.name, self.membership.incarnation)
        if plan is not None and rank is not None:
            self.holds = plan.held_by(rank, self.boundaries)

    def _publish(self) -> None:
        assert self.dialogue is not None
        seconds = float(max(self.step, 0))
        telemetry = Telemetry(1.0, 1.0, 1.0, seconds, 0, {"parameters": 1 << 26, "state": 1 << 24, "rss": 1 << 29})
        self.dialogue.update_status(self._status(), telemetry)
        self._due.set()

    def _status(self) -> Status:
        """The dialogue fills in what it and the membership know."""
        return Status(0, 0, self.membership.state, 0, self.step, self.committed_in, self.boundaries, self.holds)

    def _inventory(self, generation: int) -> Inventory:
        has_state = self.step >= 0
        current = every(self.job.blocks) if has_state else NO_BLOCKS
        record = RECORD if self.step > 0 else b""
        own = self.membership.generation
        return Inventory(generation, own, self.step, self.committed_in, record, self.holds, NO_BLOCKS, current)


async def start_job(address: str, name: str, workers: int, blocks: int) -> JobWorkers:
    """All workers of a job that was submitted; returns when its first world has committed."""
    worker_dialogue.check_plan = _checked_once  # type: ignore[attr-defined]
    job, description = JobWorkers(name, blocks), describe(workers, blocks)
    for number in range(workers):
        worker = SimulatedWorker(job, number, address, description)
        job.workers[worker.name] = worker
    began = time.monotonic()
    await asyncio.gather(*(worker.start() for worker in job.workers.values()))
    await job.until_after(began, job.committed_at)
    return job
