"""What a script reports, evaluations too, on its way to people: the last number of each name, until it is another."""

from __future__ import annotations

from typing import Any

import pytest
from crew import Task, engine_of, train
from machine_driver import Driver, training
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_controller.core.machine.view import view
from shoal_protos.errors import UserError
from shoal_protos.messages import MOST_REPORTS, Heartbeat, Result, Status, Telemetry
from shoal_protos.wire.worker import decode_worker, encode_worker


class Told(AloneLink):
    """Keeps what the controller would be told."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[tuple[int, dict[str, float]]] = []

    def publish(self, status: Status, telemetry: Telemetry) -> None:
        self.published.append((status.step, dict(telemetry.reports)))
        super().publish(status, telemetry)


def test_a_number_is_told_at_once_and_until_it_is_reported_again() -> None:
    link = Told()

    def step(engine: Engine) -> None:
        if engine.global_step == 1:
            engine.report(once=0.5)
        if engine.step() and engine.global_step in (1, 4):
            with engine.evaluating():
                for part in engine.shard(range(22)):
                    engine.report(seen=part.double().mean() + engine.global_step)
            assert link.published[-1][1]["seen"] == engine.reports["seen"], "before the next step, also after the last"

    task = Task({"max_steps": 4}, step=step)
    train(engine_of(task, link, Faults([])), task, lambda: None)
    last = {step: reports for step, reports in link.published if step > 0}
    assert [sorted(last[step]) for step in (1, 2, 3)] == [["seen"], ["once", "seen"], ["once", "seen"]]
    assert last[3]["once"] == 0.5 and last[3]["seen"] == last[1]["seen"] != last[4]["seen"]


def report(job: Driver, worker: str, step: int, **reports: float) -> None:
    job.beat(worker, step=step, telemetry=Telemetry(reports=reports))


def shown(job: Driver) -> dict[str, float]:
    return dict(view(job.job, job.now).reports)


def test_a_job_shows_what_its_furthest_member_has_reported_and_keeps_it_when_it_has_ended() -> None:
    job = training(2)
    step = job.statuses["w0"].step
    report(job, "w0", step, accuracy=0.5, first=1.0)
    report(job, "w1", step, accuracy=0.25)
    assert shown(job) == {"accuracy": 0.5, "first": 1.0}
    report(job, "w1", step + 1, accuracy=0.75)
    assert shown(job) == {"accuracy": 0.75, "first": 1.0}
    for worker in ("w0", "w1"):
        job.say(worker, Result(step + 1, fingerprint="ab", loss=0.5))
    job.restart()
    assert shown(job) == {"accuracy": 0.75, "first": 1.0}


def test_a_name_is_told_as_one_line_and_more_than_can_be_shown_are_refused() -> None:
    job = training(1)

    def through_the_wire(reports: dict[str, float]) -> Any:
        heartbeat = Heartbeat(job.statuses["w0"], Telemetry(reports=reports), 0)
        return decode_worker(encode_worker(heartbeat), 8)

    read = through_the_wire({"a\nb\x1b": 0.5})
    assert dict(read.telemetry.reports) == {"a b\N{REPLACEMENT CHARACTER}": 0.5}
    with pytest.raises(UserError, match=r"telemetry.reports has 33 entries; at most 32 are allowed"):
        through_the_wire({str(number): 0.0 for number in range(MOST_REPORTS + 1)})
