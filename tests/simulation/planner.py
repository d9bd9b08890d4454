"""The planner's process: it answers at once, late, wrongly, never, or dies over a question, as the seed has it.

It is a part of the controller's process: what it was asked and has not answered is lost with that one.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from shoal_controller.core.machine.effects import AskPlanner
from shoal_controller.core.machine.events import PlannerAnswered, PlannerBegan, PlannerFailed
from shoal_controller.core.planning.question import answer
from shoal_protos.plan import Plan

if TYPE_CHECKING:
    from .simulation import Simulation

KINDS = ("prompt", "slow", "unreliable")
SECONDS = (0.02, 0.3, 1.5, 4.0)
"""Within one of which a slow one answers: at the longest when the machine waits no longer."""
LOST, DEATHS, WRONG = 0.15, 0.2, 0.1
"""The part of the questions whose answer is lost, over which an unreliable one dies, or which it answers wrongly."""

LINES = (0.0, 0.0, 0.0, 0.5, 1.5)
"""How long a question stands in line behind those of other jobs, in times of `progress_seconds`."""


class Planner:
    """See the module's text. Chance of its own, so that it changes nothing in what a seed drew before."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.chance = Random(f"{simulation.seed} planner")
        self.kind = "prompt" if simulation.still else self.chance.choice(KINDS)
        self.answered, self.dropped, self.deaths, self.wrong = 0, 0, 0, 0
        self._out: dict[int, float | None] = {}
        """Since when each question of this life is being answered; None: it stands in line."""

    def is_given_up_for(self, reason: str) -> bool:
        """Whether a job may end because this planner has failed: one that answers every question may not."""
        return "the planner has failed for" in reason and self.deaths + self.dropped + self.wrong > 0

    def begin_life(self) -> None:
        """A controller's process begins, and its planner's with it."""
        self._out.clear()

    def mend(self) -> None:
        """From now on it answers every question, in its time."""
        self.kind = "slow" if self.kind == "unreliable" else self.kind

    def ask(self, asked: AskPlanner) -> PlannerAnswered | None:
        """The answer, if there is one at once."""
        self._look(asked)
        if self.kind == "prompt":
            self.answered += 1
            self._out.clear()
            return PlannerAnswered(asked, answer(asked.question))
        luck = self.chance.random() if self.kind == "unreliable" else 1.0
        line = self.chance.choice(LINES) * self.simulation.spec.progress_seconds if self.kind == "unreliable" else 0.0
        self.simulation.clock.after(line, self._begin, asked.number, self.simulation.host.life)
        if luck < LOST:
            self.dropped += 1
            self.simulation.say("the planner's answer to question", asked.number, "is lost")
            return None
        event: PlannerAnswered | PlannerFailed = PlannerAnswered(asked, answer(asked.question))
        if luck < LOST + DEATHS:
            self.deaths += 1
            event = PlannerFailed(asked.number, "the planner's process has ended (exit status -9)")
        elif luck < LOST + DEATHS + WRONG and isinstance(event.answer, Plan):
            self.wrong += 1
            self.simulation.say("the planner's answer to question", asked.number, "is wrong")
            event = PlannerAnswered(asked, self._wrong(event.answer))
        seconds = self.chance.choice(SECONDS) * self.chance.random()
        self.simulation.clock.after(line + seconds, self._tell, event, asked.number, self.simulation.host.life)
        return None

    def _wrong(self, plan: Plan) -> Plan:
        """What a planner with a defect might give: sound or not, it is no answer to the question."""
        stranger = replace(plan.members[-1], incarnation="of nobody")
        return self.chance.choice((
            replace(plan, shares=plan.shares[:-1]),
            replace(plan, shares=tuple(replace(share, lanes=()) for share in plan.shares)),
            replace(plan, members=(*plan.members[:-1], stranger)),
            replace(plan, generation=plan.generation + 1),
        ))  # fmt: skip

    def _look(self, asked: AskPlanner) -> None:
        """● One question is out at a time: another one comes only after its answer, or long after it was taken up."""
        now, limit = self.simulation.clock.now, self.simulation.spec.progress_seconds
        early = [number for number, at in self._out.items() if at is None or now - at <= limit]
        if early:
            self.simulation.watch.violated("the planner is asked twice", f"questions {early} and {asked.number}")
        self._out[asked.number] = None

    def _begin(self, number: int, life: int) -> None:
        """The questions of other jobs that came before this one are answered."""
        host = self.simulation.host
        if host.alive and host.life == life and number in self._out:
            self._out[number] = self.simulation.clock.now
            host.feed(PlannerBegan(number))

    def _tell(self, event: PlannerAnswered | PlannerFailed, number: int, life: int) -> None:
        host = self.simulation.host
        if host.alive and host.life == life:
            self.answered += 1
            self._out.pop(number, None)
            host.feed(event)
