"""One simulated job from one seed: a controller, workers, a network, and time that only the clock moves."""

from __future__ import annotations

from random import Random
from typing import Any

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.simulation.clock import Clock
from shoal_protos.corruption import OnCorruption
from shoal_protos.description import Description, Parameter
from shoal_protos.plan import EVERYONE, Member
from shoal_protos.shape import ONE

from .bad_script import BadScript
from .cells import Hosts, Sizes, homes_and_models_of, shape_of, sizes_of
from .checkpoints import Checkpoints
from .controller import ControllerHost, Launcher
from .copies import FlippedBits
from .links import Links
from .network import Groups, Still, Stream, Weather
from .planner import Planner
from .pods import PodLauncher
from .promises import Promises
from .speeds import Speeds
from .watch import Watch
from .worker import SimWorker
from .world import Worlds

POLICIES = ("restore", "restore", "restore", "pause", "continue")
STAGES = (1, 2, 3, 1)
"""Of jobs in which not everybody mirrors everything."""
LOG = 4000
"""How many lines of the event log are kept."""


class Simulation:
    """See the module's text. `shape` fixes what a seed would draw: workers, blocks, launcher and so on."""

    def __init__(self, seed: int, **shape: object) -> None:
        self.seed, self.still = seed, bool(shape.get("still"))
        self.has_operators = bool(shape.get("operators", not self.still))
        """Whether operators may do more than `Faults` has them do."""
        self.chance = chance = Still(seed) if self.still else Random(seed)
        self.clock = Clock()
        self.log: list[str] = []
        self.weather = Weather(chance if self.still else Random(chance.random()))
        most = int(shape.get("workers", 6))  # type: ignore[call-overload]
        wanted = int(shape.get("wanted", chance.randint(2, most)))  # type: ignore[call-overload]
        self.blocks = int(shape.get("blocks", chance.choice((4, 8, 16, 64))))  # type: ignore[call-overload]
        lanes = int(shape.get("lanes", chance.randint(most, 2 * most)))  # type: ignore[call-overload]
        self.cell = shape_of(seed, str(shape.get("cell", "")))
        self.homes, self.models = homes_and_models_of(self.blocks, self.cell)
        launcher = str(shape.get("launcher", chance.choice(("local", "none"))))
        mirrors = shape.get("mirrors", chance.choice((1, 1, 1, 2, 2, EVERYONE)))
        drawn_stage = 1 if self.still else Random(f"{seed} stage of zero").choice(STAGES)
        self.stage = 0 if mirrors == EVERYONE else int(shape.get("stage", drawn_stage))  # type: ignore[call-overload]
        self.max_steps = int(shape.get("max_steps", chance.choice((20, 60, 10_000))))  # type: ignore[call-overload]
        self.open_end = bool(self._shape(shape, "open_end", 0, (False, False, True)))
        """Whether nothing but the scripts says that `max_steps` is the last one."""
        self.leaves_by_counter = bool(self._shape(shape, "by_counter", 0, (False, True)))
        """Whether they leave their loop there in the middle of an epoch: who had no lanes in that step goes on."""
        drawn = 0 if self.still else Random(f"{seed} saves").choice((0, 5))
        every = int(shape.get("checkpoint_every", drawn))  # type: ignore[call-overload]
        self.step_seconds = float(shape.get("step_seconds", 0.15))  # type: ignore[arg-type]
        self.script = BadScript(self, shape)
        self.corruption_steps = int(self._shape(shape, "corruption_steps", 4, (3, 10)))
        least = int(shape.get("min_workers", chance.choice((1, 1, 2))))  # type: ignore[call-overload]
        sizes = sizes_of(Sizes(wanted, least, most, lanes), seed, self.cell if not self.still else ONE)
        self.spec = JobSpec(
            "job", sizes.wanted, sizes.least, sizes.most, launcher, spares=self._spares(shape, sizes),
            heartbeat_seconds=0.3, reconnect_seconds=2.0, progress_seconds=2.0,
            stall_seconds=float(shape.get("stall_seconds", 12.0)), started_together=int(shape.get("together", 1)),  # type: ignore
            max_restarts=int(shape.get("max_restarts", self.script.restarts(10_000))), run="run-1",  # type: ignore[call-overload]
        )  # fmt: skip
        self.description = Description(
            sizes.lanes, self.blocks, 4096, 1 << 16, mirrors, (1 << 16) * max(1, self.blocks // 8),  # type: ignore[arg-type]
            0 if self.open_end else self.max_steps, (Parameter("weight", (self.blocks, 4096), "torch.float32", 0),),
            "AdamW", {}, {}, False, bool(every), keep=3,
            mirror_partners=self._shape(shape, "mirror_partners", 4, (1, 2, 4)),
            on_corruption=OnCorruption(self._shape(shape, "on_corruption", "restore", POLICIES)),
            stage=self.stage, cell=self.cell, homes=self.homes, models=self.models,
        )  # fmt: skip
        self.checkpoints, self.speeds = Checkpoints(self, every), Speeds(self)
        self.worlds = Worlds(self.models)
        self.bits = FlippedBits(self)
        self.watch = Watch(self)
        self.groups = Groups(self)
        self.links = Links(self)
        self.processes: dict[str, SimWorker] = {}
        self.incarnations = 0
        self._hosts = Hosts(self.cell, launcher, int(self._shape(shape, "on_a_host", 1, (1, 1, 1, 3))))
        self.liars: set[str] = set()
        """Workers that have said what cannot be."""
        self.put_back = 0
        """How often the store was, to an older state."""
        self.walled = False
        self.kinds = tuple(str(shape.get("kinds", "")).split())
        """Of faults; none: drawn."""
        self.link_faults: set[frozenset[int]] = set()
        self.stubborn = not self.still and Random(f"{seed} ends").random() < 0.1
        """Whether some processes do not end when they are told to."""
        self.promises = Promises(self)
        self.launcher = PodLauncher(self) if launcher == "kubernetes" else Launcher(self)
        self.planner = Planner(self)
        self.host = ControllerHost(self)
        if not self.still:
            self.host.late = Random(f"{seed} late").choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.6, 1.5))
        self.host.store_seconds = float(self._shape(shape, "store_seconds", 0.0, (0.0, 0.0, 0.02, 0.1)))

    def _shape(self, shape: dict[str, object], name: str, still: Any, drawn: tuple[Any, ...]) -> Any:
        """Drawn apart from the rest, so that what is new changes nothing in what a seed drew before."""
        return shape.get(name, still if self.still else Random(f"{self.seed} {name}").choice(drawn))

    def _spares(self, shape: dict[str, object], sizes: Sizes) -> int:
        """Of a quarter of the seeds, as far as there is room for them."""
        if self.cell != ONE or shape.get("together") or shape.get("mirrors") == 0:
            return 0
        room = min(sizes.most or sizes.lanes, sizes.lanes) - sizes.wanted
        return max(0, min(int(self._shape(shape, "spares", 0, (0, 1))), room))

    # ---- the log

    def say(self, *words: object) -> None:
        self.log.append(f"{self.clock.now:9.3f} " + " ".join(map(str, words)))
        if len(self.log) > LOG:
            del self.log[: LOG // 4]

    # ---- processes

    def start_process(self, worker: str = "", launched: bool = False, is_built: bool = False) -> SimWorker:
        """`is_built`: it has its model, and asks for no coordinate."""
        self.incarnations += 1
        self._hosts.take(self.incarnations, [one.pid for one in self.workers()])
        process = SimWorker(self, self.incarnations, worker, launched)
        self.processes[process.incarnation] = process
        self.say("process", process.pid, "starts", f"as {worker}" if worker else "without an id")
        if self.cell.processes > 1 and not is_built:
            process.after(0.05, process.seat.ask)
        else:
            process.begin()
        return process

    def start_again(self, restarts: int) -> None:
        """`shoal worker` starts its command again."""
        self.start_process().restarts = restarts

    def workers(self) -> list[SimWorker]:
        return [process for process in dict.fromkeys(self.processes.values()) if process.alive]

    def model_at(self, coordinate: int) -> frozenset[int]:
        """The blocks whose parameters the model of a process has there."""
        return frozenset(self.models[coordinate]) if self.models else frozenset(range(self.blocks))

    def host_of(self, pid: int) -> str:
        return f"host{self._hosts.number(pid)}"

    def address_of(self, pid: int) -> str:
        """Where a process listens."""
        return f"{self.host_of(pid)}:{self._hosts.port(pid)}"

    def process_of(self, member: Member) -> SimWorker | None:
        return self.processes.get(member.incarnation)

    def group_members(self, generation: int) -> list[SimWorker]:
        plan = self.watch.plans.get(generation)
        if plan is None:
            return []
        return [worker for worker in map(self.process_of, plan.members) if worker is not None]

    def process_ended(self, process: SimWorker) -> None:
        """Of a killed one some that train on its host know, before its streams are seen to end."""
        self.launcher.ended(process)
        chance, host = Random(f"{self.seed} {process.pid} is seen to die"), self.host_of(process.pid)
        for witness in self.workers() if process.exit_code == -9 else ():
            world = witness.membership.plan
            beside = world is not None and process.incarnation in {one.incarnation for one in world.members}
            if beside and self.host_of(witness.pid) == host and chance.random() < 0.5:
                witness.after(0.01 * chance.random(), witness.session.on_death, process.incarnation)

    def refuses(self, address: str) -> bool:
        """Whether a connection to a worker's port is refused: by the host of a dead process, or by a firewall."""
        there = [process for process in self.processes.values() if process.address == address]
        refused = any(process.walled for process in there) or not any(process.alive for process in there)
        return refused and not any(process.cut for process in there)

    def answers(self, address: str, incarnation: str) -> bool:
        """Whether that very process says who it is there."""
        process = self.processes.get(incarnation)
        there = process is not None and process.address == address and process.alive
        return there and not (process.frozen or process.cut or process.walled)

    def dial(self, worker: SimWorker) -> Stream | None:
        return self.host.dial(worker) if not worker.cut else None

    def by_id(self, worker: str) -> SimWorker:
        """The living process of that id."""
        return next(process for process in self.workers() if process.membership.worker == worker)

    # ---- chance, so that a scenario can do without

    def user_seconds(self, worker: SimWorker) -> float:
        return 4.0 if self.chance.random() < 0.01 else 0.1 * self.chance.random()

    def warm_up_seconds(self) -> float:
        return 0.2 + 0.6 * self.chance.random()

    # ---- connections that break between living workers

    def link_fault_within(self, members: list[SimWorker]) -> bool:
        pids = {worker.pid for worker in members}
        return any(link_fault <= pids for link_fault in self.link_faults)

    def report_link_fault(self, generation: int, members: list[SimWorker]) -> None:
        """Two members that cannot reach each other say so while they build."""
        for link_fault in self.link_faults:
            pair = [worker for worker in members if worker.pid in link_fault]
            if len(pair) == 2:
                for worker, peer in (pair, reversed(pair)):
                    worker.awake(worker.training.peer_gone, generation, peer)

    def break_between(self, one: SimWorker, other: SimWorker) -> None:
        """A connection between two living members breaks now."""
        self.say("the connection between", one, "and", other, "breaks")
        for worker, peer in ((one, other), (other, one)):
            recovery = worker.membership.recovery
            number = recovery.generation if recovery is not None else worker.membership.generation
            worker.awake(worker.training.peer_gone, number, peer)
