"""One simulated worker: where it stands in the protocol of generations, and what it says of itself.

What it trains is the world's affair (`fleet.py`): here is only what one process knows. The rules are those of the
worker's `Membership`, for a world whose members do everything at one instant.
"""

from __future__ import annotations

from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Inventory,
    MemberState,
    Ready,
    Status,
    Telemetry,
)
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs, every

from shoal_controller.simulation.paces import RUN, SimulatedJob

RECORD = b"r"
"""Of a step's vote: all members of a world stand at the same step, so none has to roll forward by it."""


class SimulatedMember:
    """See the module's text. `machine`: its place in the trace."""

    def __init__(self, job: SimulatedJob, connection: int, machine: int) -> None:
        self.connection, self.machine = connection, machine
        self.incarnation = f"i{connection}"
        self.worker = ""
        self.alive = True
        self.state = MemberState.WARMING_UP
        self.generation = self.promised = 0
        self.step, self.committed_in, self.boundaries = -1, 0, 0
        self.holds: Runs = NO_BLOCKS
        self.recovery: Plan | None = None
        self.checkpoint: CheckpointRef | None = None
        self.telemetry = Telemetry()
        self.remaining: tuple[int, ...] = ()
        """Lanes of the step under way, in their order, that it had not trained when its world began, or the step."""
        self.finished: set[int] = set()
        """Lanes of the step under way that it has trained in worlds before."""
        self._description, self._is_on_one_host = job.description(), job.is_on_one_host
        self._sequence = 0

    @property
    def has_begun(self) -> bool:
        """Whether it is in a world that trains."""
        return self.alive and self.state is MemberState.TRAINING

    @property
    def status(self) -> Status:
        self._sequence += 1
        return Status(
            self._sequence, self.generation, self.state, self.promised, self.step, self.committed_in, self.boundaries,
            self.holds, checkpoint=self.checkpoint,
        )  # fmt: skip

    def rank_in(self, plan: Plan) -> int | None:
        return plan.rank_of(self.worker, self.incarnation)

    # ---- what it says

    def hello(self) -> Hello:
        host = "machine" if self._is_on_one_host else f"machine{self.machine}"
        return Hello(
            PROTOCOL_VERSION, "job", self.worker, self.incarnation, f"{host}:{self.connection}", host, self.connection,
            f"domain{self.machine}", self._description, self.status, run=RUN,
        )  # fmt: skip

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.status, self.telemetry)

    def inventory(self) -> Inventory:
        """The answer to the PREPARE that it has promised."""
        trained = self.step >= 0
        return Inventory(
            self.promised, self.generation, self.step, self.committed_in, RECORD if self.step > 0 else b"", self.holds,
            NO_BLOCKS, every(self._description.blocks) if trained else NO_BLOCKS, status=self.status,
        )  # fmt: skip

    def ready(self) -> Ready:
        return Ready(self.promised, self.status)

    # ---- what becomes of it

    def may_stop(self, generation: int) -> bool:
        """Whether a PREPARE is news to it."""
        return self.alive and generation > self.promised

    def stop(self, generation: int) -> None:
        """PREPARE: no step more of its world."""
        self.promised, self.recovery = generation, None
        if self.generation:
            self.state = MemberState.STOPPED
        elif self.state is not MemberState.WARMING_UP:
            self.state = MemberState.WAITING

    def may_recover(self, plan: Plan) -> bool:
        """Whether it is to build the group of a plan that was made from inventories."""
        stands = self.state in (MemberState.STOPPED, MemberState.WAITING) and self.recovery is None
        return self.alive and stands and plan.generation == self.promised and self.rank_in(plan) is not None

    def begin(self, plan: Plan) -> None:
        """Its next world, in which it may have no place."""
        rank = self.rank_in(plan)
        self.promised, self.recovery = max(self.promised, plan.generation), None
        if rank is None:
            self.state = MemberState.LEFT
            return
        if plan.recovery is not None:
            self._stand_at(plan, plan.recovery.counted[rank])
        self.generation, self.boundaries, self.state = plan.generation, 0, MemberState.TRAINING
        self.remaining = tuple(lane for lane in plan.lanes_of(rank) if lane not in self.finished)

    def _stand_at(self, plan: Plan, counted: bool) -> None:
        """Where a world begins that was made from inventories."""
        recovery, rank = plan.recovery, self.rank_in(plan)
        assert recovery is not None and rank is not None
        if recovery.checkpoint or not counted or self.step != recovery.step:
            self.finished = set()
        if recovery.checkpoint or self.step < 0:
            self.committed_in, self.holds = 0, plan.kept_by(rank)
        self.step = recovery.step

    def commit(self, steps: int, telemetry: Telemetry) -> None:
        """So many steps of its world are committed."""
        self.step, self.boundaries, self.committed_in = self.step + steps, self.boundaries + steps, self.generation
        self.finished, self.telemetry = set(), telemetry
