"""A job whose cells have several processes, driven by hand as `machine_driver.Driver` drives one of single ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from machine_driver import MADE_OF, RUN, Driver
from shoal_controller.core.machine.effects import Send
from shoal_controller.core.machine.events import SeatAsked
from shoal_protos.description import Description
from shoal_protos.messages import AskSeat, MemberState, Refusal, Seat, Shutdown
from shoal_protos.runs import Runs
from shoal_protos.shape import Shape

PAIR, SQUARE = Shape(tensor=2), Shape(tensor=2, pipeline=2)
OF_PAIRS = replace(MADE_OF, cell=PAIR, homes=(Runs([(0, 4)]), Runs([(4, 8)])), models=(Runs([(0, 8)]), Runs([(2, 8)])))


class Pairs(Driver):
    """A job whose cells have two processes, or more."""

    def __init__(self, wanted: int = 4, made_of: Description = OF_PAIRS, **spec: Any) -> None:
        super().__init__(wanted, made_of, **spec)

    def ask(self, worker: str = "", incarnation: str = "", **fields: Any) -> Seat | Refusal | Shutdown:
        """The answer to a process that asks for its seat."""
        incarnation = incarnation or f"inc-{worker}"
        ask = AskSeat("job", worker, incarnation, "host", 7, self.made_of.cell, RUN)
        self._next += 1
        self.feed(SeatAsked(self._next, replace(ask, **fields)))
        (answer,) = [effect.message for effect in self.of(Send) if effect.connection == self._next]
        assert isinstance(answer, Seat | Refusal | Shutdown)
        return answer

    def seats(self, workers: int) -> list[int]:
        """The coordinates of so many that come, one after the other."""
        return [self.seat(f"w{number}") for number in range(workers)]

    def seat(self, worker: str, **fields: Any) -> int:
        answer = self.ask(worker, **fields)
        assert isinstance(answer, Seat), answer
        return answer.coordinate

    def start(self, workers: int) -> None:
        for number, coordinate in enumerate(self.seats(workers)):
            self.hello(f"w{number}", coordinate=coordinate)
        self.recover()

    def joins(self, worker: str) -> None:
        """It is ready to join, and the others begin the world that it is planned into."""
        self.beat(worker, state=MemberState.WAITING)
        (plan,) = self.job.durable.planned
        assert plan.rank_of(worker, f"inc-{worker}") is not None
        here, known = MemberState.TRAINING, self.statuses["w0"]
        for name in plan.workers:
            self.beat(
                name, generation=plan.generation, state=here, promised=plan.generation, step=known.step,
                committed_in=known.committed_in,
            )  # fmt: skip

    @property
    def leaving(self) -> list[str]:
        """Workers that are being drained, oldest first."""
        return [one.worker for one in self.job.durable.roster.values() if one.leaving and one.serves]
