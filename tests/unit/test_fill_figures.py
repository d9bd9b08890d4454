"""What fills move is in the report and in the metric alike, whoever controls meanwhile."""

from typing import Any

from machine_driver import Driver
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Effect
from shoal_protos.messages import Result, Telemetry


class Receiving(Driver):
    """Workers that tell in every heartbeat how many bytes they have received by fills since they began."""

    def __init__(self, workers: int) -> None:
        self.received: dict[str, int] = {}
        super().__init__(wanted=workers)
        self.start(workers)

    def beat(self, worker: str, telemetry: Telemetry | None = None, **fields: Any) -> list[Effect]:
        return super().beat(worker, telemetry or Telemetry(fill_bytes=self.received.get(worker, 0)), **fields)

    def receive(self, **counts: int) -> None:
        self.received |= counts
        for worker in counts:
            self.beat(worker)


def bytes_of(job: Driver) -> tuple[float, int]:
    """By the metric, and by the report."""
    return (
        job.counted("shoal_repartition_bytes_total", source="peer"),
        sum(resize.pause_bytes + resize.fill_bytes for resize in job.view.resizes),
    )


@holds("Bytes of fills count once")
def test_a_generations_fills_count_when_the_next_one_begins() -> None:
    job = Receiving(3)
    job.receive(w0=1000, w1=500)
    job.die("w2")
    job.recover()
    assert bytes_of(job) == (1500, 1500)
    assert [resize.fill_bytes for resize in job.view.resizes] == [1500, 0]


@rule(
    "Bytes of fills count once, for the metric and the report at the same moment: how much of what a worker has "
    "received is counted is in its record, for the next controller",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.progress",
            "            turn.mark(worker, fill_bytes_counted=received)\n",
            "",
        ),
        Edit("shoal_controller.core.machine.phases.ending", "    count_fills(turn)\n", ""),
    ],
)
def test_a_controller_that_starts_again_counts_no_fill_twice_and_none_less() -> None:
    job = Receiving(3)
    job.receive(w0=1000, w1=500)
    job.die("w2")
    job.recover()
    job.restart()
    for worker in ("w0", "w1"):
        job.hello(worker)
    assert bytes_of(job) == (1500, 1500)
    job.receive(w0=1000, w1=700)
    for worker in ("w0", "w1"):
        job.beat(worker, step=100, done=True, ended=True)
        job.say(worker, Result(100, "cafe", 0.5))
    assert job.view.phase.is_over
    assert bytes_of(job) == (1700, 1700)


@holds("Bytes of fills count once")
def test_the_fills_of_the_last_generation_count_when_the_job_ends() -> None:
    job = Receiving(1)
    job.receive(w0=300)
    job.beat("w0", step=100, done=True, ended=True)
    job.say("w0", Result(100, "cafe", 0.5))
    assert job.view.phase.is_over
    assert bytes_of(job) == (300, 300)


@holds("Bytes of fills count once")
def test_they_count_too_where_the_job_fails() -> None:
    job = Receiving(1)
    job.wait(1)
    job.receive(w0=300)
    job.say("w0", Result(2, "", None, failure="the config is wrong", everyone=True))
    assert job.view.phase == "failed"
    assert bytes_of(job) == (300, 300)


@holds("Bytes of fills count once")
def test_the_fills_of_a_generation_that_trains_on_count_once_a_minute() -> None:
    job = Receiving(1)
    job.wait(1)
    job.receive(w0=300)
    job.beat("w0", step=2)
    job.now += 61.0
    job.receive(w0=400)
    job.beat("w0", step=3)
    job.tick()
    assert bytes_of(job) == (400, 400)
