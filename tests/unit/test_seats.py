"""Seats: which coordinate a process gets, for how long, and what a job with cells of several processes refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from cells_driver import OF_PAIRS, PAIR, SQUARE, Pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_driver import MADE_OF, stored, through_the_store, training
from matrices import examples
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Persist
from shoal_controller.core.machine.job_size import ImpossibleSize
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.stored_form import changed_records
from shoal_controller.core.planning.seats import Seated, best_seat, first_to_stay, with_room
from shoal_controller.elastic_jobs.resource_forms import ACCEPTED, Seen, job_spec_of, status_of
from shoal_protos.acts import DrainWorker, Scale
from shoal_protos.description import first_difference
from shoal_protos.errors import Conflict, UserError
from shoal_protos.messages import Refusal, Seat, Shutdown
from shoal_protos.shape import ONE, Shape, broken_shape, full_cells


def refused(answer: Seat | Refusal | Shutdown) -> str:
    assert isinstance(answer, Refusal), answer
    return answer.sentence


# ---- which coordinate


@rule(
    "A process gets the coordinate at which the fewest are; where dimensions are tight, first one that its host lacks "
    "beside what it has of a cell, then one of a part that the fewest hosts have begun",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.seats",
            "(begun.get(place, 0), everywhere[place], place",
            "(place",
        ),
        Edit("shoal_controller.core.planning.seats", "begun |= dict", "dict"),
        Edit("shoal_controller.core.planning.seats", "place != wish, joined[place], place)", "place != wish, place)"),
        Edit("shoal_controller.core.planning.seats", "on_host[place] < most]", "False]"),
    ],
)
def test_a_process_gets_the_coordinate_with_the_fewest_and_completes_its_host() -> None:
    assert Pairs(made_of=replace(OF_PAIRS, cell=SQUARE)).seats(6) == [0, 1, 2, 3, 0, 1]
    job = Pairs(wanted=3)
    job.hello("w0", coordinate=job.seat("w0"))
    assert [job.seat("w1"), job.seat("w2")] == [1, 0], "in order, while nothing trains"
    job = Pairs(wanted=3)
    job.start(3)
    assert [job.seat("has died while it built its model"), job.seat("comes in its place")] == [1, 1]
    here = [Seated("w0", 0, "a"), Seated("w1", 1, "a"), Seated("w2", 2, "a"), Seated("w3", 2, "b")]
    assert best_seat(SQUARE, here, "b") == 3
    assert best_seat(replace(SQUARE, tight=("tensor",)), here, "a") == 3  # what stage 1 of this host lacks
    assert best_seat(replace(SQUARE, tight=("pipeline",)), here, "b") == 0  # beside its stage 1 of tensor 0
    assert best_seat(replace(SQUARE, tight=("tensor",)), here, "c") == 0  # two hosts have begun a stage 1
    assert best_seat(replace(SQUARE, tight=("tensor",)), here[:3], "c") == 3


@holds("A process gets the coordinate at which the fewest are")
@settings(max_examples=examples(60), deadline=None)
@given(st.permutations("aabbccdd"))
def test_hosts_whose_processes_ask_in_any_order_make_whole_parts_of_as_many_cells_as_can_be(asking: list[str]) -> None:
    tight, here = replace(SQUARE, tight=("tensor",)), list[Seated]()
    for host in asking:
        here.append(Seated(f"w{len(here)}", best_seat(tight, here, host), host))
    parts = Counter(tuple(sorted(one.coordinate for one in here if one.host == host)) for host in "abcd")
    assert parts == {(0, 1): 2, (2, 3): 2}


def test_a_wish_decides_between_coordinates_that_have_equally_few() -> None:
    here = [Seated("w0", 0), Seated("w1", 1), Seated("w2", 2)]
    assert [best_seat(SQUARE, here[:1], "", wish) for wish in (-1, 0, 2, 99)] == [1, 1, 2, 1]
    assert best_seat(SQUARE, here, "", wish=1) == 3


@rule(
    "A process has one coordinate for its life: it is stored before it is told, and the same where it asks again",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.seating",
        "    if record.seated != ask.incarnation:\n",
        "    if True:\n",
    ),
)
def test_a_process_that_asks_again_has_its_seat_also_after_a_restart() -> None:
    job = Pairs()
    first = job.ask(incarnation="a")
    assert isinstance(job.effects[0], Persist) and first == Seat("w0", 0)
    assert [job.ask(incarnation=name) for name in "bc"] == [Seat("w1", 1), Seat("w2", 0)]
    assert job.ask(incarnation="a", wish=1) == first
    job.restart()
    assert job.ask(incarnation="a", wish=1) == first and job.ask(incarnation="b") == Seat("w1", 1)


def test_a_seat_lapses_with_its_process_or_where_it_never_says_hello() -> None:
    job = Pairs(launcher="local")
    job.seats(4)
    job.exit("w1")
    assert job.seat("w4") == 1
    by_hand = Pairs(stall_seconds=5.0)
    by_hand.ask(incarnation="a")
    by_hand.wait(6)
    assert by_hand.ask(incarnation="b") == Seat("w1", 0)
    by_hand.now += 6
    by_hand.restart()
    by_hand.wait(1)
    assert by_hand.job.durable.roster["w1"].serves, "while there was no controller it could not join"


@rule(
    "A worker is refused whose model is of another coordinate than its seat, or of cells of another shape",
    "A change of the world",
    broken_by=[
        Edit("shoal_controller.core.machine.phases.admission", " or seating.wrong_seat(turn, hello)", ""),
        Edit(
            "shoal_controller.core.machine.phases.seating",
            '        return shapes_differ(name, cell, durable.cell) or ""\n',
            '        return ""\n',
        ),
        Edit(
            "shoal_protos.description",
            "        shapes_differ(worker, theirs.cell, jobs.cell)  # another model follows from it\n        or",
            "        ",
        ),
    ],
)
def test_a_worker_at_another_coordinate_or_of_another_shape_is_refused() -> None:
    job = Pairs()
    job.seats(2)
    job.hello("w1", coordinate=0)
    (refusal,) = [message for message in job.messages_to("w1") if isinstance(message, Refusal)]
    assert refusal.sentence == (
        "worker w1 on host has built its model for coordinate 0 (tensor 0); its seat is coordinate 1 (tensor 1). Start "
        "it again."
    )
    job.hello("w1", coordinate=2)
    assert isinstance(job.messages_to("w1")[0], Refusal)
    assert refused(job.ask("w9", cell=SQUARE)) == (
        "worker w9 joined with cells of another shape: pipeline 2, tensor 2; the job's is tensor 2. Start it with the "
        "job's script and config."
    )
    assert (first_difference("w9", MADE_OF, OF_PAIRS) or "").startswith("worker w9 joined with cells of another shape")


def test_one_that_is_gone_says_nothing_of_the_jobs_cells() -> None:
    job = Pairs(stall_seconds=5.0)
    job.ask(incarnation="a", cell=SQUARE)
    job.wait(6)
    assert job.ask(incarnation="b") == Seat("w1", 0)
    assert job.job.durable.cell == PAIR


def test_a_process_that_the_store_has_forgotten_keeps_the_coordinate_of_its_model() -> None:
    job = Pairs()
    job.hello("w7", coordinate=1)
    assert job.job.durable.roster["w7"].coordinate == 1
    assert job.seat("w0") == 0


# ---- how many


@rule(
    "A job has as many cells as its rarest coordinate has members: so many train, and that many it needs",
    "A change of the world",
    broken_by=Edit(
        "shoal_protos.shape",
        "    return min(counts[coordinate] for coordinate in range(processes))",
        "    return sum(counts.values()) // processes",
    ),
)
def test_a_job_begins_once_its_workers_make_full_cells() -> None:
    assert [full_cells(line, 2) for line in ([0, 0, 0], [0, 1, 0], [1, 0, 1, 0])] == [0, 1, 2]
    job = Pairs(wanted=2)
    job.hello("w0", coordinate=0)
    job.hello("w1", coordinate=0)
    job.wait(20)
    assert job.view.phase is Phase.WAITING
    assert "2 of 2 workers ready, coordinate 1 (tensor 1) has no member" in job.view.reason
    job.hello("w2", coordinate=1)
    job.wait(1)
    assert job.view.phase is Phase.STARTING


@rule(
    "The bounds of a job are multiples of a cell's processes, and it wants one cell at least",
    "A change of the world",
    broken_by=[
        Edit("shoal_controller.core.machine.job_size", "if most is not None and most % processes)", "if False)"),
        Edit(
            "shoal_controller.core.machine.phases.seating",
            "    if durable.wanted < cell.processes and not turn.spec.wanted_by_default:\n",
            "    if False:\n",
        ),
    ],
)
def test_bounds_that_break_a_cell_are_refused() -> None:
    assert refused(Pairs(min_workers=3).ask("w0")) == (
        "job job cannot have at least 3 workers: a cell of it has 2 workers; expected a multiple of that. Change "
        "workers.min and workers.max."
    )
    assert "up to 5 workers" in refused(Pairs(max_workers=5).ask("w0"))
    assert refused(Pairs(wanted=1).ask("w0")) == (
        "job job asks for 1 worker, but a cell of its script (tensor 2) has 2. Ask for so many at least."
    )
    assert refused(Pairs(spares=1).ask("w0")).startswith("job job cannot have 1 spare: spares are for jobs whose ")
    job = Pairs()
    job.seats(4)
    with pytest.raises(ImpossibleSize, match="cannot have at least 3 workers: a cell of it has 2 workers"):
        job.feed(Scale(None, 3, None))
    job.feed(Scale(5, None, None))  # a spare
    assert job.view.wanted == 5 and job.view.min_workers == 2


def test_a_job_that_says_what_its_cells_are_refuses_workers_with_others_and_has_its_bounds_at_once() -> None:
    job = Pairs(cell=SQUARE)
    assert (job.view.cell, job.view.min_workers) == (SQUARE, 4)
    assert refused(job.ask("w0")).startswith(
        "worker w0 joined with cells of another shape: tensor 2; the job's is pipeline 2, tensor 2."
    )
    assert "tensor 2; the job's is one process" in refused(Pairs(cell=ONE).ask("w0"))
    assert Pairs(cell=PAIR).seats(2) == [0, 1]


def test_a_resource_has_one_cell_at_least_and_its_status_counts_cells() -> None:
    spec = {"command": ["python"], "cell": {"tensor": 2}, "kubernetes": {"image": "i"}}
    asked = job_spec_of({"metadata": {"name": "job", "uid": "u"}, "spec": spec})
    assert (asked.wanted, asked.min_workers, asked.cell) == (2, 2, PAIR)
    with pytest.raises(UserError, match=r"`workers\.min` is 3, but a cell has 2 processes"):
        job_spec_of({"metadata": {"name": "job", "uid": "u"}, "spec": {**spec, "workers": {"min": 3}}})
    job = Pairs(wanted=5, cell=PAIR)
    job.start(5)
    status = status_of(job.view, Seen("job", 1, ACCEPTED, 0.0), {})
    assert status["cells"] == {"full": 2, "wanted": 2, "processes": 2}
    assert "cells" not in status_of(training().view, Seen("job", 1, ACCEPTED, 0.0), {})


def test_a_number_of_workers_that_nobody_chose_becomes_one_of_whole_cells() -> None:
    job = Pairs(wanted=7, wanted_by_default=True)
    job.ask("w0")
    assert job.view.wanted == 6
    few = Pairs(wanted=1, wanted_by_default=True)
    few.ask("w0")
    assert few.view.wanted == 2


def test_at_most_as_many_cells_as_lanes_are_members() -> None:
    job = Pairs(wanted=4, made_of=replace(OF_PAIRS, lanes=2))
    job.start(4)
    job.wait(1)
    job.seat("w4")
    job.hello("w4", coordinate=0)
    job.wait(2)
    assert not job.job.durable.planned and job.view.max_workers == 4


@rule(
    "Where a job is scaled down its youngest cell goes whole, and what stays is even over the coordinates",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.scaling",
        "    if cell.processes == 1:\n",
        "    if True:\n",
    ),
)
def test_the_youngest_cell_goes_whole() -> None:
    line = [Seated(f"w{age}", coordinate) for age, coordinate in enumerate((0, 0, 1, 0, 1))]
    cells = [("w0", "w4"), ("w1", "w2")]
    assert first_to_stay(PAIR, line, cells, 2)[:2] == ["w1", "w2"]
    assert first_to_stay(PAIR, line, cells, 3)[2:] == ["w0", "w4", "w3"]
    assert first_to_stay(PAIR, line, [], 2) == ["w0", "w2", "w1", "w4", "w3"]
    job = Pairs(launcher="local")
    job.start(4)
    job.exit("w1")
    job.recover()
    job.hello("w4", coordinate=job.seat("w4"))
    job.feed(Scale(2, None, None))
    assert [record.worker for record in job.job.durable.roster.values() if record.leaving] == ["w0", "w4"]


@rule(
    "Where another process in place of a spare one makes one cell more, the spare is drained and a launcher starts the "
    "other: one at a time, and never one of a whole cell",
    "Cells",
    broken_by=[
        Edit("shoal_controller.core.machine.machine", "        seating.make_even(turn)\n", "        pass\n"),
        Edit("shoal_controller.core.machine.phases.seating", " and one.worker not in busy]", "]"),
        Edit("shoal_controller.core.machine.phases.seating", "    if len(here) < len(serving) or ", "    if "),
        Edit(
            "shoal_controller.core.machine.phases.seating", "    if counts[lacking] >= possible:\n", "    if False:\n"
        ),
        Edit("shoal_controller.core.machine.phases.seating", "== lacking\n", "is not None\n"),
    ],
)
def test_a_spare_process_makes_room_for_one_that_a_cell_lacks() -> None:
    job = Pairs(launcher="local")
    for worker, coordinate, host in (("w0", 0, "a"), ("w1", 1, "b"), ("w3", 0, "b")):
        job.hello(worker, coordinate=coordinate, host=host)
    job.wait(11)
    job.recover()
    assert job.job.durable.current and job.job.durable.current.workers_of_cells == [("w3", "w1")]
    job.hello("w2", coordinate=0, host="c")
    assert job.leaving == ["w2"] and job.spawned == ["w4"]
    assert job.job.durable.roster["w2"].leaving_because == (
        "2 cells could train and 1 can, because coordinate 1 (tensor 1) has 1 worker; the process in its place gets "
        "that one"
    )
    job.wait(2)
    job.hello("w4", coordinate=job.seat("w4"))
    staying = [one.coordinate for one in job.job.durable.roster.values() if one.serves and not one.leaving]
    assert staying == [0, 1, 0, 1]
    job.wait(2)
    assert job.leaving == ["w2"], "which has not gone yet, and no other"
    pods = Pairs(wanted=6, launcher="kubernetes", started_together=2)
    for number, coordinate in enumerate((0, 1, 0, 0, 0)):
        pods.hello(f"w{number}", coordinate=coordinate)
    assert not pods.leaving, "w5 is still to come"
    pods.hello("w5", coordinate=0)
    assert pods.leaving == ["w5"]
    pods.wait(2)
    assert pods.leaving == ["w5"] and [*pods.job.durable.roster][6:] == ["w6", "w7"], "those of another pod are"


@holds("Where another process in place of a spare one")
def test_one_is_not_asked_to_make_room_where_its_host_would_give_another_coordinate() -> None:
    """Else it went on so for ever."""
    tight = replace(SQUARE, tight=("tensor",))
    job = Pairs(wanted=4, made_of=replace(OF_PAIRS, cell=tight, homes=(), models=()), launcher="local")
    for number, coordinate in enumerate((0, 0, 0, 1)):
        job.hello(f"w{number}", coordinate=coordinate)
    assert not job.leaving


@rule(
    "A first world begins only where as many cells are whole as a job has to have, though all that it wants are there",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.waiting",
        " >= _patience(turn, ready)) and turn.durable.are_enough(chosen)",
        " >= PATIENCE_SECONDS) and turn.durable.full_cells(chosen)",
    ),
)
def test_a_job_whose_workers_make_too_few_cells_waits_and_begins_no_world_after_the_other() -> None:
    job = Pairs(wanted=4, min_workers=4)
    for number, coordinate in enumerate((0, 1, 0, 0)):
        job.hello(f"w{number}", coordinate=coordinate)
    assert job.job.durable.last_generation == 0
    job.hello("w4", coordinate=1)
    assert job.job.attempt is not None


def test_one_that_joins_a_world_without_a_cell_makes_one_at_once() -> None:
    job = Pairs(wanted=2, made_of=replace(OF_PAIRS, cell=replace(PAIR, tight=("tensor",))))
    for number, (coordinate, host) in enumerate(((0, "a"), (1, "b"))):
        job.hello(f"w{number}", coordinate=coordinate, host=host)
    job.recover()
    assert job.job.durable.current is not None and not job.job.durable.current.trainers
    job.hello("w2", coordinate=1, host="a")
    job.joins("w2")
    assert job.job.attempt is None and job.job.durable.current.workers_of_cells == [("w0", "w2")]


@rule(
    "Who is the last one at its coordinate is the last one of the job: its blocks have no other place",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.operator_requests",
        "if other.coordinate == record.coordinate]",
        "if True]",
    ),
)
def test_the_last_one_at_a_coordinate_is_not_drained() -> None:
    job = Pairs(wanted=3)
    job.start(3)
    with pytest.raises(Conflict, match="worker w1 is the last one of job job at coordinate 1"):
        job.feed(DrainWorker("w1", 5.0))
    job.feed(DrainWorker("w0", 5.0))
    assert job.job.durable.roster["w0"].leaving


def test_there_is_room_for_so_many_at_each_coordinate() -> None:
    joiners = [Seated("w4", 0), Seated("w5", 1), Seated("w6", 1)]
    assert with_room(PAIR, joiners, [Seated("w0", 0), Seated("w1", 0), Seated("w2", 1)], each=2) == ["w5"]


# ---- a job whose cell is one process


def test_nothing_of_cells_is_stored_or_shown_of_a_job_whose_cell_is_one_process() -> None:
    job = training(2)
    state, records = stored(job.job.durable)
    words = ("coordinate", "seated", '"cell"', "homes")
    assert not [word for text in (state, *records.values()) for word in words if word in text]
    assert "cell" not in changed_records(None, job.job.durable)
    of_pairs = Pairs()
    of_pairs.start(4)
    assert through_the_store(of_pairs.job.durable) == of_pairs.job.durable


def test_a_shape_names_its_places_and_one_that_there_is_not_is_refused() -> None:
    assert [SQUARE.named(coordinate) for coordinate in (0, 3)] == [
        "coordinate 0 (stage 0, tensor 0)",
        "coordinate 3 (stage 1, tensor 1)",
    ]
    assert str(ONE) == "one process" and ONE.named(0) == "coordinate 0"
    assert broken_shape(Shape(tensor=0)) == "its tensor is 0; expected 1 or more"
    assert broken_shape(Shape(tensor=64, pipeline=64)).startswith("it has 4096 processes")
    assert broken_shape(Shape(tensor=2, tight=("width",))).startswith("its tight dimension 'width' is none of")
    assert not broken_shape(SQUARE)
