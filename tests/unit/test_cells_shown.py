"""What people see of a job whose lanes are trained by several processes together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from cells_driver import OF_PAIRS, PAIR, Pairs
from machine_driver import Driver, training
from rich.console import Console, RenderableType
from shoal_controller.api.answers import JobAnswer, WorkerAnswer
from shoal_controller.cli.tables import cells_table, job_lines, workers_table
from shoal_controller.core.machine.effects import Effect, Note
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.job_size import ImpossibleSize, JobSize, resized
from shoal_controller.core.machine.machine import step
from shoal_controller.core.machine.phases.admission import survival_sentence
from shoal_controller.core.machine.spec import Phase, State, WorkerBounds
from shoal_controller.core.machine.view import view
from shoal_controller.core.overview.holdings import holdings
from shoal_controller.core.overview.previews import lanes_among, preview
from shoal_controller.observe.metrics import Metrics, Sources
from shoal_protos.acts import ConfirmLost, DrainWorker, OperatorRequest, Scale
from shoal_protos.messages import Telemetry
from shoal_protos.plan import EVERYONE
from shoal_protos.rest import Json


def two_cells(spares: int = 0) -> Pairs:
    """Cells `w0` with `w1` and `w2` with `w3`, and younger processes beside."""
    job = Pairs(wanted=4 + spares)
    job.start(4 + spares)
    return job


def answers(job: Driver) -> tuple[Json, list[Json]]:
    """What REST says of a job, and of its workers."""
    shown = job.view
    workers = [WorkerAnswer.of(worker, shown.cell).model_dump(mode="json") for worker in shown.workers]
    return JobAnswer.of(shown).model_dump(mode="json"), workers


def test_rest_says_what_a_cell_is_how_many_train_and_who_is_where() -> None:
    job = two_cells(spares=1)
    job.seat("w5")
    shown, workers = answers(job)
    assert shown["cell"] == {"tensor": 2, "pipeline": 1, "context": 1, "expert": 1, "processes": 2}
    assert shown["cells"] == {"full": 2, "wanted": 2} and shown["workers"]["max"] == 16
    assert [(worker["coordinate"], worker["cell"]) for worker in workers] == [
        ({"tensor": 0}, 0), ({"tensor": 1}, 0), ({"tensor": 0}, 1), ({"tensor": 1}, 1), ({"tensor": 0}, None),
        ({"tensor": 1}, None),
    ]  # fmt: skip


def test_nothing_of_cells_is_answered_of_a_job_whose_cell_is_one_process() -> None:
    shown, workers = answers(training(2))
    assert not [name for one in (shown, *workers) for name in one if name.startswith(("cell", "coordinate"))]
    assert shown["last_checkpoint_step"] is None, "what is null in all jobs is answered"


def printed(part: RenderableType) -> list[str]:
    console = Console(width=200, highlight=False)
    with console.capture() as captured:
        console.print(part)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_command_shows_a_grid_of_cells_and_the_place_of_each_worker() -> None:
    shown, workers = answers(two_cells(spares=1))
    assert printed(cells_table(shown, workers)) == ["cell   t0  t1", "0      w0  w1", "1      w2  w3", "spare  w4  –"]
    assert job_lines(shown)[0].endswith("lanes 8, cells 2 of 2 (tensor 2)")
    head, *rows = printed(workers_table(workers))
    assert head.split()[3] == "cell"
    assert [row.split()[3] for row in rows] == ["0:t0", "0:t1", "1:t0", "1:t1", "–:t0"]
    assert "cell" not in printed(workers_table(answers(training(2))[1]))[0]


def test_metrics_count_cells_and_the_members_of_each_coordinate() -> None:
    metrics = Metrics()
    metrics.show(Sources(lambda: (two_cells(spares=1).view, training(2).view)))
    written = asyncio.run(metrics.scrape()).decode().splitlines()
    of_cells = ("shoal_job_cells", "shoal_job_coordinate_members")
    assert [line for line in written if line.startswith(of_cells)] == [
        'shoal_job_cells{job_name="job",state="full"} 2.0',
        'shoal_job_cells{job_name="job",state="wanted"} 2.0',
        'shoal_job_coordinate_members{coordinate="0",job_name="job"} 3.0',
        'shoal_job_coordinate_members{coordinate="1",job_name="job"} 2.0',
    ]


def test_a_cell_that_has_lost_a_member_is_not_counted_as_full() -> None:
    job = two_cells()
    job.die("w1")
    assert answers(job)[0]["cells"] == {"full": 1, "wanted": 2}
    job.die("w3")
    assert answers(job)[0]["cells"] == {"full": 0, "wanted": 2}


def test_a_coordinate_that_has_one_worker_is_named_where_copies_are_told() -> None:
    job = two_cells(spares=1)
    assert holdings(job.view).sentence.startswith("every block has 2 copies")
    job.die("w1")
    job.recover()
    sentence = holdings(job.view).sentence
    assert sentence.startswith("blocks at coordinate 1 (tensor 1) have one copy, as only one worker is there")


def test_void_lanes_are_counted_once_and_the_time_within_cells_is_each_workers() -> None:
    job = two_cells()
    telemetry = Telemetry(void_lanes=2, cell_wait_seconds=1.5)
    job.beat("w0", telemetry)
    job.beat("w1", replace(telemetry, void_lanes=1))
    job.beat("w0", replace(telemetry, void_lanes=3))
    job.restart()
    job.hello("w0")
    job.beat("w0", replace(telemetry, void_lanes=3))  # it tells the sum in every heartbeat
    assert job.counted("shoal_void_lanes_total") == 4
    metrics = Metrics()
    metrics.show(Sources(lambda: (job.view, training(2).view)))
    written = asyncio.run(metrics.scrape()).decode().splitlines()
    waited = [line for line in written if line.startswith("shoal_worker_cell_wait_seconds_total")]
    assert waited[0] == 'shoal_worker_cell_wait_seconds_total{job_name="job",worker="w0"} 1.5'
    assert len(waited) == 4, "of the workers of cells only"


# ---- what is told


class Told(Pairs):
    """Keeps the sentences of all that is told."""

    def __init__(self, wanted: int, **spec: Any) -> None:
        self.sentences: dict[EventKind, dict[str, None]] = {}
        super().__init__(wanted, **spec)

    def feed(self, event: Event) -> list[Effect]:
        effects = super().feed(event)
        for note in (effect for effect in effects if isinstance(effect, Note)):
            self.sentences.setdefault(note.kind, {})[note.message] = None
        return effects

    def sentences_of(self, kind: EventKind) -> list[str]:
        return list(self.sentences.get(kind, ()))


def test_a_seat_cells_that_are_new_and_a_coordinate_without_workers_are_told() -> None:
    job = Told(wanted=5)
    job.start(5)
    assert job.sentences_of(EventKind.SEATED)[:2] == [
        "worker w0 on host gets coordinate 0 (tensor 0)",
        "worker w1 on host gets coordinate 1 (tensor 1)",
    ]
    assert job.sentences_of(EventKind.PAIRED) == ["2 cells train; new: w0 with w1, w2 with w3"]
    job.die("w0")
    job.recover()
    assert job.sentences_of(EventKind.PAIRED)[1:] == ["2 cells train; new: w4 with w1"]
    assert job.sentences_of(EventKind.COORDINATE_MISSING) == []
    job.die("w1")
    job.die("w3")
    assert job.sentences_of(EventKind.COORDINATE_MISSING) == [
        "coordinate 1 (tensor 1) has no worker any more: no cell is whole until one is there"
    ]


@pytest.mark.parametrize(
    ("mirrors", "sentence"),
    [
        (1, "each block is kept by 2 workers, so 1 worker may be lost at once, where the job has 2 cells; "),
        (EVERYONE, "every worker keeps every block of its coordinate, so the job goes on while one at each lives; "),
    ],
)
def test_a_job_says_that_its_copies_are_in_other_cells(mirrors: int, sentence: str) -> None:
    assert survival_sentence(replace(OF_PAIRS, mirrors=mirrors)).startswith(sentence)


def test_a_coordinate_that_lacks_workers_is_told_once_though_others_lack_them_too() -> None:
    job = Told(wanted=2)
    job.start(2)
    job.exit("w1")
    job.exit("w0")
    sentences = job.sentences_of(EventKind.COORDINATE_MISSING)
    assert [sentence.partition(" (")[0] for sentence in sentences] == ["coordinate 1", "coordinate 0"]
    assert job.seat("w2") == 0
    assert EventKind.COORDINATE_MISSING not in [note.kind for note in job.of(Note)]


def test_a_job_whose_workers_could_make_more_cells_says_why_they_do_not_and_what_to_do() -> None:
    job = two_cells()
    assert job.view.reason == ""
    job.die("w1")
    job.recover()
    assert job.view.reason == "", "three workers make one cell"
    job.hello("w4", coordinate=0)
    assert job.view.reason == (
        '2 cells could train and 1 can, because coordinate 1 (tensor 1) has 1 worker: "shoal drain job w4" makes room '
        "there for another one"
    )


def test_a_job_that_waits_says_so_too_once_no_worker_is_still_to_come() -> None:
    job = Pairs(wanted=4, min_workers=4)
    for worker, coordinate in (("w0", 0), ("w1", 1), ("w2", 0)):
        assert job.seat(worker) == coordinate
        job.hello(worker, coordinate=coordinate)
    assert job.seat("w3") == 1
    assert "makes room" not in job.view.reason, "w3 may make it even"
    job.hello("w4", coordinate=0)
    job.exit("w3")
    assert job.view.phase is Phase.WAITING
    assert 'because coordinate 1 (tensor 1) has 1 worker: "shoal drain job w4"' in job.view.reason


# ---- what a request would do


def asked(job: Pairs, request: OperatorRequest) -> str:
    return preview(request, job.view, view(step(job.job, [request], job.now)[0], job.now))


def test_a_preview_shares_out_lanes_among_cells_as_the_planner_will() -> None:
    job = two_cells(spares=1)
    before = job.view
    assert before.world is not None and before.world.cells == ((0, 1), (2, 3))
    expected = lanes_among(before, before.world, ["w1", "w2", "w3", "w4"])
    assert asked(job, DrainWorker("w0")).startswith("drain w0: its 4 lanes go to w2 and w3, nothing is lost")
    job.feed(DrainWorker("w0"))
    assert {name: job.job.durable.planned[-1].lanes_by_worker[name] for name in expected} == expected
    assert len(set(expected.values())) == 2, "the spare one takes its place in the cell"


def test_a_preview_says_that_no_cell_is_left_and_which_coordinate_has_its_last_one() -> None:
    job = Pairs(wanted=3)
    job.start(3)
    assert asked(job, DrainWorker("w0")).startswith("drain w0: its 8 lanes go to w2, ")
    job.exit("w2")
    job.recover()
    before = job.view
    last = preview(DrainWorker("w1"), before, before)
    assert last.startswith("drain w1: it is the last one at coordinate 1 (tensor 1): no step runs without it")


def test_a_preview_names_no_idle_lanes_where_no_cell_is_left() -> None:
    job = Pairs(wanted=4, made_of=replace(OF_PAIRS, lanes=3, mirrors=EVERYONE))
    job.start(4)
    before = job.view
    gone = {"w1": State.LOST, "w3": State.DRAINING}
    workers = [replace(one, state=gone.get(one.worker, one.state)) for one in before.workers]
    after = replace(before, workers=tuple(workers))
    assert preview(ConfirmLost("w1"), before, after) == (
        "confirm that w1 is dead: no cell is whole without it, so no step runs until there is one, "
        "its blocks go on with their mirrors, no step is lost"
    )


def test_a_job_may_have_as_many_workers_as_its_cells_have_processes() -> None:
    size = JobSize("train", 4, WorkerBounds(2, None), 4, PAIR)
    assert size.top == 8 and OF_PAIRS.most_members == 2 * OF_PAIRS.lanes
    assert resized(size, Scale(8, None, 8)).wanted == 8
    with pytest.raises(ImpossibleSize, match="it has 4 lanes, and every cell of 2 workers trains at least one"):
        resized(size, Scale(None, None, 10))
    assert Pairs(made_of=replace(OF_PAIRS, lanes=3)).view.max_workers is None
