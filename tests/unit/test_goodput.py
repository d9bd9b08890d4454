"""The arithmetic of benchmarks/goodput.py: which machines a trace takes, and where machine-seconds went."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_controller.simulation import traces

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
from goodput_account import Logged, account  # noqa: E402

RATES = {1: 10.0, 2: 20.0, 3: 30.0}
MACHINES = 3


def steps(machine: int, *times: float, first: int = 1) -> list[Logged]:
    """Steps of ten micro-batches, one after another."""
    return [Logged(time, machine, "step", number, 10) for number, time in enumerate(times, first)]


def test_undisturbed_machines_have_a_goodput_of_one_and_train_all_the_time() -> None:
    calm = [time / 2 for time in range(41)]  # two machines: a step each half a second
    log = [line for machine in range(2) for line in steps(machine, *calm)]
    found = account(log, [(0, 0.0, 20.0), (1, 0.0, 20.0)], RATES, 0.0, 20.0)
    assert found.goodput == 1.0
    assert found.uses == {"training": 40.0, "starting": 0.0, "waiting": 0.0, "redone": 0.0, "longer": 0.0}


def test_a_machine_that_comes_starts_waits_and_trains() -> None:
    alone = [float(time) for time in range(1, 7)]  # a step a second
    log = [*steps(0, 0.0, *alone, 8.0, *(8.5 + half / 2 for half in range(4)))]
    log += [Logged(2.5, 1, "began"), Logged(5.0, 1, "ready"), *steps(1, 8.0, 8.5, 9.0, 9.5, 10.0, first=8)]
    found = account(log, [(0, 0.0, 10.0), (1, 2.0, 10.0)], RATES, 0.0, 10.0)
    # the second machine: two seconds and a half and half a second to ready, then three seconds to a step of half a one
    assert found.uses["starting"] == 3.0
    assert found.uses["waiting"] == 2.5
    assert found.machine_seconds == 18.0


def test_steps_that_a_restart_makes_again_are_redone_and_count_once() -> None:
    log = [*steps(0, 0.0, 1.0, 2.0, 3.0), Logged(4.0, 0, "began"), Logged(5.0, 0, "ready")]
    log += steps(0, 6.0, 7.0, 8.0, first=3)  # steps 3 and 4 again, and the fifth
    found = account(log, [(0, 0.0, 8.0)], RATES, 0.0, 8.0)
    assert found.committed == 40
    assert found.uses == {"training": 4.0, "starting": 2.0, "waiting": 0.0, "redone": 2.0, "longer": 0.0}
    assert found.longest_gap == 5.0


def test_a_time_without_machines_asks_for_nothing() -> None:
    found = account(steps(0, 0.0, 1.0, 2.0), [(0, 0.0, 2.0)], RATES, 0.0, 60.0)
    assert found.goodput == 1.0


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2), st.sampled_from(["began", "ready", "step", "discarded"]))),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 15), st.floats(15, 30)), max_size=3, unique_by=lambda s: s[0]),
)
def test_the_uses_add_up_to_the_machine_seconds_for_any_log(
    lines: list[tuple[float, int, str]], spans: list[tuple[int, float, float]]
) -> None:
    log = [Logged(time, machine, kind, number % 7, 10) for number, (time, machine, kind) in enumerate(lines)]
    log += steps(0, 0.5)
    found = account(log, spans, RATES, 0.0, 30.0)
    assert found.machine_seconds == pytest.approx(sum(until - since for _, since, until in spans))
    assert all(seconds >= 0 for seconds in found.uses.values())


# ---- traces


@given(st.integers(0, 50), st.floats(0, 30_000), st.floats(60, 10_000), st.integers(0, 2))
def test_a_window_never_has_fewer_machines_than_the_least_nor_a_machine_twice(
    seed: int, start: float, seconds: float, least: int
) -> None:
    found = traces.window(traces.moves(traces.read(traces.SHIPPED), seed), MACHINES, start, seconds, least)
    there = set(found.first)
    for move in found.moves:
        assert move.comes != (move.machine in there)
        (there.add if move.comes else there.discard)(move.machine)
        assert len(there) >= min(least, len(found.first))
    assert sum(count * lasts for count, lasts in found.counts()) == pytest.approx(
        sum(until - since for _, since, until in found.spans())
    )


def test_the_shipped_trace_is_that_of_the_paper() -> None:
    counts = traces.read(traces.SHIPPED)
    assert (len(counts), max(there for _, there in counts), counts[-1][0]) == (163, 32, 40_920.0)


def test_the_harsh_trace_has_no_machine_for_two_fifths_of_the_time() -> None:
    counts = traces.harsh()
    gone = sum(later - at for (at, there), (later, _) in pairwise(counts) if not there)
    assert gone / counts[-1][0] == pytest.approx(0.4, abs=0.02)


def test_a_typical_window_has_as_many_moves_as_the_trace_has_on_average() -> None:
    counts = traces.read(traces.SHIPPED)
    found = traces.typical(counts, 4, 5400.0, 1, 1)
    own = [move for move in traces.moves(counts, 1) if move.machine < 4 and move.at > 0]
    assert abs(len(found.moves) - len(own) * 5400 / counts[-1][0]) < 1
    assert len(found.first) == 4


def test_a_trace_of_skypilot_is_read(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    place.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [4, 4, 0, 2]}))
    assert traces.read(place) == [(0.0, 4), (300.0, 4), (600.0, 0), (900.0, 2)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0,3\n120000,4\n60000,5\n", "is not sorted: 60 s comes after 120 s"),
        ("0,0\n60000,0\n", "names no machine at any time"),
        ("", "names no machine at any time"),
        ("time,nodes\n", "is no trace"),
        ('{"data": [1]}', "is no trace"),
        ('{"metadata": {"gap_seconds": 300}, "data": 3}', "is no trace"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    place = tmp_path / "trace"
    place.write_text(text)
    with pytest.raises(traces.BadTrace, match=sentence) as error:
        traces.read(place)
    assert str(place) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_trace_in_which_nothing_happens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(traces.BadTrace, match="take a longer window"):
        traces.typical([(0.0, 4), (36_000.0, 4)], 4, 3600.0, 1, 1)
    with pytest.raises(traces.BadTrace, match="No such file"):
        traces.read(tmp_path / "none.csv")
