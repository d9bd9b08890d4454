"""Thousands of seeds: the real machine, planner and membership under everything that can go wrong, invariants held.
`make test` runs a few of them, `make check` more, `make faults` the rest.

`python -m tests.simulation.run` runs more of them, larger worlds, or one seed again (docs/simulation.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from typing import Any

import pytest
from matrices import examples, further
from rule import holds
from tiers import check

from .run import attempt, children, gather, many, replay_log, tasks
from .script import Script

SEEDS = int(os.environ.get("SHOAL_SIMULATION_SEEDS", "2000"))
FIRST_SEEDS, FIRST_PODS, FIRST_CELLS = (40, 120), (12, 36), (12, 60)
"""Where `make test` ends, and where `make check` does."""
WITH_TIGHT_PARTS, FULL_OF_THE_WRONG_HOSTS = 16, 113
"""So many seeds; and one in which all the members that a coordinate may have are on hosts without their partners."""
ENOUGH = 80
"""So many seeds have met all that is rare."""
OPEN_ENDS = 400
"""So many have met a job that its scripts have ended after all its faults."""
PROCESSES = 2


def ranges(seeds: int, ends: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges of so many seeds, cut at these ends, none of them empty."""
    assert seeds > 0, f"SHOAL_SIMULATION_SEEDS is {SEEDS}; expected 1 or more"
    return list(pairwise([0, *(end for end in ends if end < seeds), seeds]))


def in_tiers(found: list[tuple[int, int]]) -> list[Any]:
    """The first range for `make test`, the next for `make check`, the last for `make faults`."""
    marks = ((), (check("many seeds"),), (further,))
    return [pytest.param(*one, marks=mark) for one, mark in zip(found, marks, strict=False)]


ALL, WITH_PODS = ranges(SEEDS, FIRST_SEEDS), ranges(-(-SEEDS // 4), FIRST_PODS)
WITH_CELLS = ranges(-(-SEEDS // 4), FIRST_CELLS)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Started before the first test, so that nobody takes it for something left behind."""
    with children(PROCESSES) as pool:
        yield pool


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("first", "end"), in_tiers(ALL))
def test_no_seed_breaks_an_invariant(pool: ProcessPoolExecutor, first: int, end: int) -> None:
    count = end - first
    bad, happened = many(pool, first, count, {})
    assert not bad, f"{bad[:5]}\n\nthe event log of seed {bad[0][0]}:\n{replay_log(bad[0][0])}"
    if count < ENOUGH:
        return  # too few to have met all that is rare
    assert happened["faults"] > count, "the seeds have drawn next to no faults"
    assert happened["still training"] > count / 4, "most jobs ended before their faults were over"
    assert happened["checkpoints"] > count, "next to nothing was saved"
    assert happened["from a checkpoint"] > count / 25, "next to no world began from a checkpoint"
    assert happened["all went back"] > count / 50, "next to no world went back"
    assert happened["damaged"], "no damaged checkpoint was met"
    assert happened["ended by its scripts"] or count < OPEN_ENDS, "no job's last step was one that its scripts had said"
    assert happened["put back"], "no store was put back to an older state"
    assert happened["believed at once"] or count < OPEN_ENDS, "no death of most was believed by a host that answers"
    assert happened["with spares"] > count / 4, "too few jobs had spares"
    assert happened["of several speeds"] > count / 8, "too few jobs had workers that are slow for life"
    assert happened["lanes shared anew"], "lanes followed no speed"
    assert happened["without lanes for their speed"], "nobody was too slow for any lane"
    assert all(happened[f"of stage {stage}"] > count / 10 for stage in range(4)), "a stage was hardly drawn"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("first", "end"), in_tiers(WITH_PODS))
def test_no_seed_with_pods_breaks_an_invariant(pool: ProcessPoolExecutor, first: int, end: int) -> None:
    shape, count = {"launcher": "kubernetes"}, end - first
    bad, happened = many(pool, first, count, dict(shape))
    assert not bad, f"{bad[:5]}\n\nthe event log of seed {bad[0][0]}:\n{replay_log(bad[0][0], **shape)}"
    if count < FIRST_PODS[0]:
        return  # too few to have met all that is rare
    assert happened["faults of pods"] > count, "next to nothing befell a pod"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("first", "end"), in_tiers(WITH_CELLS))
def test_no_seed_with_cells_breaks_an_invariant(pool: ProcessPoolExecutor, first: int, end: int) -> None:
    shape, count = {"cell": "drawn"}, end - first
    bad, happened = many(pool, first, count, dict(shape))
    assert not bad, f"{bad[:5]}\n\nthe event log of seed {bad[0][0]}:\n{replay_log(bad[0][0], **shape)}"
    assert all(happened[f"of cells of {cell}"] for cell in ("tensor 2", "pipeline 2, tensor 2")) or count < 2
    if count < FIRST_CELLS[0]:
        return  # too few to have met all that is rare
    assert happened["still training"] > count / 4, "most jobs ended before their faults were over"
    assert happened["from a checkpoint"], "no world began from a checkpoint"


@holds("Where a tight part lacks a process on its host")
@pytest.mark.timeout(900)
def test_jobs_whose_cells_have_parts_on_hosts_of_their_own_go_on_after_any_loss(pool: ProcessPoolExecutor) -> None:
    shape: dict[str, object] = {"cell": "2x2 tight"}
    seeds = [*range(WITH_TIGHT_PARTS), FULL_OF_THE_WRONG_HOSTS]
    bad, happened = gather(pool.map(attempt, [(seed, shape) for seed in seeds], chunksize=2))
    assert not bad, f"{bad[:5]}\n\nthe event log of seed {bad[0][0]}:\n{replay_log(bad[0][0], **shape)}"
    assert happened["still training"] > WITH_TIGHT_PARTS / 4, "most jobs ended before their faults were over"


def test_jobs_of_any_number_of_cells_come_to_one_state() -> None:
    ends = [
        _state_at_the_end(1),
        _state_at_the_end(2, "2"),
        _state_at_the_end(6, "2"),
        _state_at_the_end(5, "2", "w2"),
        _state_at_the_end(8, "2x2", "w7"),
    ]
    assert ends == [ends[0]] * len(ends) and len(ends[0]) == 8


def _state_at_the_end(workers: int, cell: str = "", dies: str = "") -> dict[int, int]:
    """The state of every block at the end of a job in which a worker dies, perhaps."""
    script = Script(f"job workers={workers} lanes=6 blocks=8 max_steps=12{f' cell={cell}' if cell else ''}")
    for command in ("start", "until step 4", *([f"kill {dies}"] if dies else []), "until phase succeeded"):
        script.do(command)
    trained = [process.training for process in script.simulation.processes.values() if process.training.step == 12]
    return {block: value for training in trained for block, value in training.blocks.items()}


@pytest.mark.parametrize("seeds", [1, 39, 40, 41, 120, 121, 2000])
def test_every_seed_is_in_one_range_and_no_range_is_empty(seeds: int) -> None:
    found = ranges(seeds, FIRST_SEEDS)
    assert [seed for first, end in found for seed in range(first, end)] == list(range(seeds))
    assert all(first < end for first, end in found)


@holds("Deaths by an unexplained signal")
def test_kills_that_come_faster_than_steps_never_fail_a_job_early() -> None:
    shape = {"kinds": "kill kill_in_a_change crash", "launcher": "local", "max_restarts": 3, "script": "",
             "step_seconds": 1.0}  # fmt: skip
    count = examples(80)
    bad, happened = gather(map(attempt, tasks(0, count, shape)))
    assert not bad, f"{bad}\n\n{replay_log(bad[0][0], **shape)}"
    assert happened["started anew"] > count / 8, "next to no job has lost its state"


@holds("A failure is forgiven only")
@pytest.mark.parametrize("script", ["raises", "outage", "dies"])
def test_a_script_that_never_passes_a_step_ends_its_job_in_few_tries(script: str) -> None:
    count = examples(18)
    bad, happened = gather(map(attempt, tasks(0, count, {"script": script})))
    assert not bad, f"{bad}\n\n{replay_log(bad[0][0], script=script)}"
    assert happened["ended failed"] == count


def test_a_seed_gives_the_same_history_again() -> None:
    assert replay_log(7) == replay_log(7)


def test_a_large_world_holds_too() -> None:
    bad, _ = gather(map(attempt, tasks(0, 8, {"workers": 12, "blocks": 256})))
    assert not bad, f"{bad}\n\n{replay_log(bad[0][0], workers=12, blocks=256)}"


def test_a_child_that_dies_ends_the_run_at_once() -> None:
    with children(2) as pool, pytest.raises(BrokenProcessPool):
        list(pool.map(os._exit, [9]))
