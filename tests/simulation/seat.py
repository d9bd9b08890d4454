"""How a simulated process comes by its coordinate: it asks until it is told, builds its model, and says hello."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal_protos.messages import AskSeat, Refusal, Seat, Shutdown, ToWorker

if TYPE_CHECKING:
    from .network import Stream
    from .worker import SimWorker

AGAIN_SECONDS = 0.4
SHARE_OF_WISHES = 0.3
"""The part of processes whose launcher tells them the coordinate of a dead one; of any, here."""


class AskedSeat:
    """See the module's text. `is_open`: no answer has come."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self.is_open = False
        self._wish = -1
        self._stream: Stream | None = None

    def ask(self) -> None:
        """Again and again while no controller answers."""
        worker, simulation = self.worker, self.worker.simulation
        if not self.is_open and worker.chance.random() < SHARE_OF_WISHES:
            self._wish = worker.chance.randrange(simulation.cell.processes)
        self.is_open = True
        self.leave()
        self._stream = simulation.dial(worker)
        if self._stream is not None:
            run = simulation.spec.run if worker.launched else ""
            ask = AskSeat(
                "job", worker.asked_id, worker.incarnation, simulation.host_of(worker.pid), worker.pid,
                simulation.cell, run, self._wish,
            )  # fmt: skip
            self._stream.up(self._stream.host.seat_asked, self._stream, ask)
        patience = AGAIN_SECONDS * (1 + worker.chance.random()) + 2 * simulation.host.late
        worker.after(patience, self._again)

    def _again(self) -> None:
        if self.is_open:
            self.ask()

    def leave(self) -> None:
        """No answer is heard any more on the stream that it has asked on."""
        if self._stream is not None:
            self._stream.break_off()
        self._stream = None

    def on_message(self, message: ToWorker) -> None:
        """The answer to any of its questions."""
        worker = self.worker
        if isinstance(message, Seat):
            self.is_open = False
            worker.coordinate, worker.asked_id = message.coordinate, message.worker
            process = worker.session.dialogue.process
            worker.session.dialogue.process = replace(process, coordinate=message.coordinate)
            worker.say("is seated as", message.worker, "at", worker.simulation.cell.named(message.coordinate))
            worker.begin()
        elif isinstance(message, Shutdown) or (isinstance(message, Refusal) and not message.unknown_job):
            self.is_open = False
            worker.end(2, "it gets no seat")
