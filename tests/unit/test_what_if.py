"""A job on a trace, simulated: its seconds add up, a calm world trains all the time, the real machine decides."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from shoal_controller.cli.main import app
from shoal_controller.cli.what_if import figures_of
from shoal_controller.core.machine.figures import Use
from shoal_controller.simulation import fleet, traces
from shoal_controller.simulation.paces import Paces, SimulatedJob
from shoal_controller.simulation.sweep import Aims, GridRow, TraceOutcome, best, grid, simulate, within
from shoal_controller.simulation.traces import Move, TraceWindow
from shoal_protos.errors import UserError
from typer.testing import CliRunner

PACES = Paces(lane=1.0, overhead=0.5, start=20.0, group=0.1, restore=3.0)
HOUR = 3600.0


def calm(machines: int) -> TraceWindow:
    return TraceWindow(frozenset(range(machines)), (), HOUR)


def lost_and_back(*machines: int) -> TraceWindow:
    """They go after a quarter of an hour, and come back five minutes later."""
    moves = [Move(900.0, machine, False) for machine in machines]
    moves += [Move(1200.0, machine, True) for machine in machines]
    return TraceWindow(frozenset(range(4)), tuple(moves), HOUR)


def part(outcome: TraceOutcome, use: Use) -> float:
    return outcome.uses[use] / (outcome.job.workers * outcome.seconds)


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_a_world_that_never_changes_trains_all_the_time(workers: int) -> None:
    found = simulate(SimulatedJob(workers, 3 * workers), PACES, calm(workers))
    assert found.goodput == pytest.approx(1.0)
    assert found.steps == math.ceil(HOUR / PACES.step(3)), "the step under way at the end is finished"
    assert found.undisturbed == pytest.approx(1.0, abs=0.001)


def test_lanes_that_do_not_divide_are_no_goodput() -> None:
    found = simulate(SimulatedJob(4, 5), PACES, calm(4))
    assert found.goodput == pytest.approx(5 / 8)
    assert part(found, Use.IDLE_LANE) == pytest.approx(3 / 8)


def test_machines_that_are_not_there_are_missing() -> None:
    found = simulate(SimulatedJob(4, 12), PACES, calm(3))
    assert part(found, Use.MISSING) == pytest.approx(1 / 4)
    assert found.goodput == pytest.approx(3 / 4)
    assert found.undisturbed == pytest.approx(1.0, abs=0.001)


def test_a_lost_machine_costs_the_time_that_it_is_away_its_start_and_next_to_nothing_of_the_others() -> None:
    found = simulate(SimulatedJob(4, 12), PACES, lost_and_back(3))
    assert found.uses[Use.MISSING] == pytest.approx(300.0, abs=1.0)
    assert found.uses[Use.STARTING] == pytest.approx(PACES.start)
    assert found.uses[Use.PAUSED] < 4 * PACES.step(4)
    assert not found.returns and not found.lost_steps and not found.failure
    assert (found.losses, found.joins) == (1, 1)


def test_a_machine_that_goes_where_a_step_ends_costs_that_step_and_none_before() -> None:
    paces = replace(PACES, lane=0.5, latency=0.0, group=0.0)
    assert paces.step(3) == 2.0
    found = simulate(SimulatedJob(4, 12), paces, lost_and_back(3))
    assert found.uses[Use.PAUSED] < 4 * paces.step(4)
    assert found.undisturbed == pytest.approx(1.0, abs=0.03)


def test_where_all_copies_of_a_block_go_the_job_goes_back_to_its_last_checkpoint() -> None:
    job = SimulatedJob(4, 12, save_steps=50)
    one, two = (simulate(replace(job, mirrors=mirrors), PACES, lost_and_back(2, 3)) for mirrors in (1, 2))
    assert (one.returns, two.returns) == (1, 0)
    assert 0 < one.lost_steps < 50 and one.uses[Use.LOST_STEP] > 0 == two.uses[Use.LOST_STEP]
    assert one.steps < two.steps


def test_where_none_is_saved_it_begins_anew() -> None:
    found = simulate(SimulatedJob(4, 12), PACES, lost_and_back(0, 1, 2, 3))
    assert found.returns and found.lost_steps > 200
    assert found.uses[Use.LOST_STEP] > 0.3 * found.uses[Use.TRAINING]


def test_a_spare_that_mirrors_trains_when_a_worker_is_lost() -> None:
    window = replace(lost_and_back(3), first=frozenset(range(5)))
    alone, spared = (
        simulate(SimulatedJob(4, 12, spares=spares), PACES, within(window, SimulatedJob(4, 12, spares=spares)))
        for spares in (0, 1)
    )
    assert spared.steps > alone.steps
    assert part(spared, Use.MISSING) < part(alone, Use.MISSING) == pytest.approx(300 / (4 * HOUR), abs=0.001)


def test_training_waits_for_a_save() -> None:
    job = SimulatedJob(2, 6, save_steps=10)
    found = simulate(job, replace(PACES, save=3.5), calm(2))
    assert part(found, Use.PAUSED) == pytest.approx(3.5 / (3.5 + 10 * PACES.step(3)), abs=0.01)


def test_the_longer_workers_start_the_less_is_trained() -> None:
    starts = (0.0, 10.0, 60.0, 300.0, 900.0)
    steps = [simulate(SimulatedJob(4, 12), replace(PACES, start=start), lost_and_back(3)).steps for start in starts]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


@given(
    counts=st.lists(st.integers(0, 4), min_size=2, max_size=12),
    minutes=st.integers(1, 30),
    mirrors=st.integers(1, 2),
    lanes=st.integers(4, 12),
    save_steps=st.sampled_from((0, 20)),
    least=st.integers(1, 2),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_seconds_of_the_wanted_workers_add_up(
    counts: list[int], minutes: int, mirrors: int, lanes: int, save_steps: int, least: int
) -> None:
    trace = [(place * 60.0 * minutes, count) for place, count in enumerate(counts)]
    if not any(counts):
        return
    window = traces.window(traces.moves(trace, 0), 4, 0.0, trace[-1][0] + 60.0, 0)
    job = SimulatedJob(4, lanes, mirrors, save_steps=save_steps, least=least)
    found = simulate(job, PACES, window)
    assert sum(found.uses.values()) == pytest.approx(4 * found.seconds)
    assert min(found.uses.values()) >= 0
    in_flight = found.losses * PACES.step(lanes)
    assert found.uses[Use.TRAINING] <= found.machine_seconds + in_flight + 1e-6, "only machines that are there train"
    assert found == simulate(job, PACES, window), "the same again"


def test_the_machine_that_decides_is_the_controllers() -> None:
    from shoal_controller.core.machine import machine
    from shoal_controller.core.planning import question

    assert fleet.step is machine.step and fleet.answer is question.answer


# ---- which one to take


def tried(job: SimulatedJob, window: TraceWindow, aims: Aims) -> GridRow:
    return GridRow(simulate(job, PACES, window), aims)


def test_of_those_that_keep_the_deadline_the_cheapest_is_the_best() -> None:
    aims = Aims(price=2.0, steps=1000)
    few, many = (tried(SimulatedJob(count, 12), calm(count), aims) for count in (2, 4))
    assert few.cost_of_a_step == pytest.approx(2 * 2.0 * few.outcome.seconds / HOUR / few.outcome.steps)
    assert few.cost is not None and many.cost is not None and few.cost < many.cost
    assert many.seconds is not None and few.seconds is not None and many.seconds < few.seconds
    assert best([few, many]) is few
    hurried = [GridRow(one.outcome, replace(aims, deadline=many.seconds + 1)) for one in (few, many)]
    assert best(hurried) is hurried[1]
    poor = [GridRow(one.outcome, replace(aims, deadline=many.seconds + 1, budget=few.cost)) for one in (few, many)]
    assert best(poor) is None


def test_a_grid_has_every_combination_once() -> None:
    found = grid(SimulatedJob(4, 4), {"lanes": [8, 16, 8], "mirrors": [1, 2]})
    assert [(job.lanes, job.mirrors) for job in found] == [(8, 1), (8, 2), (16, 1), (16, 2)]


# ---- traces


def test_a_trace_of_fewer_machines_is_scaled_and_one_that_is_too_short_begins_again() -> None:
    counts = [(0.0, 2), (60.0, 1), (90.0, 2)]
    assert traces.scaled(counts, 10) == [(0.0, 10), (60.0, 5), (90.0, 10)]
    assert traces.scaled(counts, 2) == counts
    assert traces.repeated(counts, 100.0) == [*counts, (90.0, 2), (150.0, 1), (180.0, 2)]


# ---- the command


def what_if(*arguments: str) -> tuple[int, str, str]:
    """Its exit status, output and errors."""
    done = CliRunner().invoke(app, ["what-if", *arguments])
    return done.exit_code, done.stdout, done.stderr


ARGUMENTS = ["--workers", "4", "--step-seconds", "2", "--for", "2h"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs --workers and --step-seconds"),
        ([*ARGUMENTS, "--lanes", "3"], "--lanes has 3, and --workers is 4"),
        ([*ARGUMENTS, "--lanes", "4,x"], "--lanes is '4,x'; expected whole numbers from 1"),
        ([*ARGUMENTS, "--lanes", "65537"], "--lanes is '65537'; expected whole numbers from 1 to 65536"),
        ([*ARGUMENTS, "--step-seconds", "1e-9"], "--step-seconds is 1e-09; expected 0.001 to 1e+09"),
        ([*ARGUMENTS, "--mirrors", "4"], "expected at most 3"),
        ([*ARGUMENTS, "--mirrors", "0", "--spares", "1"], "its config has mirrors 0"),
        ([*ARGUMENTS, "--lanes", "5", "--spares", "2"], "expected at most 1 spare"),
        ([*ARGUMENTS, "--min", "5"], "--min has 5; expected at most 4"),
        ([*ARGUMENTS, "--lanes", ",".join(map(str, range(4, 150)))], "the grid has 146 jobs; expected at most 100"),
        ([*ARGUMENTS, "--from", "20h"], "expected less than 11.4h, the last change of the trace"),
        ([*ARGUMENTS, "--from", "soon"], "--from is 'soon'; expected hours, days or weeks"),
        ([*ARGUMENTS, "--overhead-seconds", "2"], "expected more than 2, the overhead of a step"),
        ([*ARGUMENTS, "--start-seconds", "nan"], "--start-seconds is nan"),
        ([*ARGUMENTS, "--deadline", "7d"], "--deadline needs --steps"),
        ([*ARGUMENTS, "--budget", "5", "--steps", "9"], "--budget needs --steps and --price"),
    ],
)
def test_wrong_use_is_one_sentence(arguments: list[str], sentence: str) -> None:
    code, output, error = what_if("p3", *arguments)
    assert (code, output) == (2, "")
    assert sentence in error and error.startswith("shoal: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0,4\n60000,3\n30000,4\n", "is not sorted: 30 s comes after 60 s"),
        ("0,0\n60000,0\n", "names no machine at any time"),
        ("nothing\n", "is no trace"),
        ("0,4\n60000,-3\n", "names -3 machines at 60 s; expected 0 to 100,000"),
        ("0,4\n60000,100001\n", "names 100001 machines at 60 s"),
        ('{"metadata": {"gap_seconds": NaN}, "data": [4, 3]}', "has a count at nan s; expected times from 0 s on"),
        ("-60000,4\n60000,3\n", "has a count at -60 s"),
        ("0,4\n", "has counts at 0 s only; expected a later one"),
        ('{"metadata": {"gap_seconds": 300}, "data": [4, Infinity]}', "is no trace"),
        ('{"data": ' + "[" * 100_000, "is no trace"),
        ("0,0\n3600000,0\n36000000,4\n", "has no machine in the 2 h 0 min from 0h on"),
    ],
)
def test_a_trace_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    place = tmp_path / "trace.csv"
    place.write_text(text)
    code, output, error = what_if(str(place), *ARGUMENTS)
    assert (code, output) == (2, "")
    assert sentence in error and error.count("\n") == 1


MEASURED = {
    "job": {"job": "train", "lanes": 12, "workers": {"wanted": 4}},
    "report": {"step_seconds_median": 1.7, "worker_seconds": {"starting": 30.0}},
    "members": [
        {"lanes": [0, 1, 2, 3], "lane_seconds": seconds, "step": 40} for seconds in (0.3, 0.35, 0.4)
    ],
}  # fmt: skip


def test_a_measured_job_gives_its_size_and_its_seconds() -> None:
    found = figures_of(**MEASURED)
    assert (found["workers"], found["lanes"]) == (4, 12)
    assert found["overhead_seconds"] == pytest.approx(1.7 - 4 * 0.35)
    assert found["lane_seconds"] == pytest.approx(0.35)
    assert found["start_seconds"] == pytest.approx(10.0)


def test_a_measured_lane_takes_as_long_with_another_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(_: str, __: str) -> dict[str, Any]:
        return figures_of(**MEASURED)

    monkeypatch.setattr("shoal_controller.cli.what_if.measured_figures", measured)
    for workers, step in ((4, "1.35"), (12, "0.65")):
        _, output, error = what_if("p3", "--measured", "train", "--workers", str(workers), "--for", "1h")
        assert not error and f"A step that {workers} workers share evenly takes {step} s" in output


def test_a_measured_job_of_cells_is_one_sentence() -> None:
    of_cells = MEASURED["job"] | {"cell": {"processes": 2}}
    with pytest.raises(UserError, match=r"job train trains in cells of 2 processes, .* a cell in place of a worker"):
        figures_of(**MEASURED | {"job": of_cells})


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"report": MEASURED["report"] | {"step_seconds_median": None}}, "no step has been timed"),
        ({"members": [{"lanes": [0], "step": 1}]}, "no lane of a living worker has been timed"),
    ],
)
def test_a_measured_job_without_figures_is_one_sentence(part: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"job train has no figures to go by: {why}"):
        figures_of(**MEASURED | part)


def test_a_measured_job_whose_controller_is_not_there_is_exit_3() -> None:
    code, _, error = what_if("p3", "--measured", "train", "--url", "http://127.0.0.1:1")
    assert code == 3 and error.count("\n") == 1


def test_no_figure_is_printed_without_what_was_assumed() -> None:
    code, output, error = what_if("p3", *ARGUMENTS, "--lanes", "12,20", "--price", "0.9", "--steps", "5000")
    assert (code, error) == (0, "")
    assert "A step that 4 workers share evenly takes 2 s" in output and "Not simulated:" in output
    assert output.index("Not simulated:") < output.index("goodput") and output.count("<- best") == 1
    code, output, _ = what_if("p3", *ARGUMENTS, "--output", "json")
    found = json.loads(output)
    assert found["assumed"] and len(found["jobs"]) == 1
    (job,) = found["jobs"]
    assert sum(job["worker_seconds"].values()) == pytest.approx(job["wanted_seconds"])


def test_it_says_that_nothing_keeps_the_deadline() -> None:
    code, output, _ = what_if("p3", *ARGUMENTS, "--steps", "1000000", "--deadline", "1d")
    assert code == 0 and "None of these makes 1,000,000 steps within 1 d" in output
