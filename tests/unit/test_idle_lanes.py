"""Lanes that do not divide: how much of the workers' capacity idles, and who says it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_driver import MADE_OF, Driver, training
from rest_listing import listing
from shoal_controller.api.answers import JobAnswer
from shoal_controller.cli.main import app
from shoal_controller.cli.tables import job_lines
from shoal_controller.core.machine.events import Disconnected
from shoal_controller.core.machine.machine import step, view
from shoal_controller.core.overview.idle_lanes import LANES_EACH, idle_lane_ratio, idle_lanes, idle_ratio, idle_sentence
from shoal_controller.core.overview.previews import preview
from shoal_controller.core.planning.lanes import NONE_IN_FLIGHT, share_lanes
from shoal_protos.acts import ConfirmLost, DrainWorker, OperatorRequest, Pause, Scale
from typer.testing import CliRunner


def job_of(workers: int, lanes: int) -> Driver:
    """A world of so many workers trains."""
    return training(workers, made_of=replace(MADE_OF, lanes=lanes))


def asked(job: Driver, request: OperatorRequest) -> str:
    return preview(request, job.view, view(step(job.job, [request], job.now)[0], job.now))


@given(st.integers(1, 200), st.integers(1, 40))
def test_the_part_that_idles_is_what_the_planners_shares_leave_of_all_turns(lanes: int, workers: int) -> None:
    shares = [len(one) for one in share_lanes(lanes, [NONE_IN_FLIGHT] * workers)]
    turns = workers * max(shares)
    assert idle_ratio(lanes, workers) == pytest.approx((turns - lanes) / turns)


@pytest.mark.parametrize(
    ("lanes", "workers", "wanted", "sentence"),
    [
        (32, 31, 32, "31 workers for 32 lanes: 2 rounds, 48% of the capacity idles; with 160 lanes 14%"),
        (5, 4, 4, "4 workers for 5 lanes: 2 rounds, 38% of the capacity idles; with 20 lanes 0%"),
        (1, 2, 2, "2 workers for 1 lane: 1 round, 50% of the capacity idles; with 10 lanes 0%"),
        (155, 32, 31, "32 workers for 155 lanes: 5 rounds, 3% of the capacity idles; with 160 lanes 0%"),
        (16, 3, 3, "3 workers for 16 lanes: 6 rounds, 11% of the capacity idles; with 15 lanes 0%"),
        (36, 7, 7, "7 workers for 36 lanes: 6 rounds, 14% of the capacity idles; with 35 lanes 0%"),
        (32, 32, 32, ""),
        (160, 32, 32, ""),
    ],
)
def test_a_sentence_says_how_many_rounds_what_idles_and_what_more_lanes_would_change(
    lanes: int, workers: int, wanted: int, sentence: str
) -> None:
    assert idle_sentence(lanes, workers, wanted) == (sentence if idle_ratio(lanes, workers) >= 0.05 else "")


def test_where_other_lanes_would_be_no_better_none_are_named() -> None:
    assert idle_sentence(LANES_EACH * 6, 4, 6) == "4 workers for 30 lanes: 8 rounds, 6% of the capacity idles"


def test_a_jobs_answer_and_describe_have_the_sentence_while_steps_run() -> None:
    job = job_of(4, lanes=5)
    says = "4 workers for 5 lanes: 2 rounds, 38% of the capacity idles; with 20 lanes 0%"
    answer = json.loads(JobAnswer.of(job.view).model_dump_json())
    assert (answer["idle_lane_ratio"], answer["idle_lanes"]) == (pytest.approx(3 / 8), says)
    assert f"  {says}" in job_lines(answer)
    older = {name: value for name, value in answer.items() if not name.startswith("idle")}
    assert says not in "".join(job_lines(older)), "of a controller that does not say it"
    job.feed(Pause())
    job.wait(2)
    paused = replace(job.view, world=replace(job.view.world, steps=False))  # type: ignore[type-var]
    assert (idle_lane_ratio(paused), idle_lanes(paused)) == (None, "")
    assert "idle_lane_ratio" in listing()


def test_a_joiner_counts_from_its_first_world_on() -> None:
    job = job_of(2, lanes=4)
    job.hello("w2")
    plan = job.job.durable.planned[-1]
    joined = replace(job.view, world=plan)
    assert len(plan.members) == 3 and idle_lane_ratio(joined) == pytest.approx(1 / 3)


def test_a_preview_says_what_idles_with_those_who_stay() -> None:
    job = job_of(4, lanes=4)
    says = "3 workers for 4 lanes: 2 rounds, 33% of the capacity idles; with 20 lanes 5%"
    assert asked(job, DrainWorker("w3", 5.0)).endswith(f", {says}")
    assert asked(job, Scale(3)).endswith("idles; with 15 lanes 0%")
    assert "idles" not in asked(job, Scale(2))
    job.feed(Disconnected(job.connections.pop("w3"), "reset"))
    assert asked(job, ConfirmLost("w3")).endswith(f", {says}")


def estimated(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["estimate", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_estimate_says_it_for_the_number_of_workers_that_is_asked(tmp_path) -> None:  # type: ignore[no-untyped-def]
    asked_for = "--params", "1e6", "--workers", "31", "--lanes", "32"
    says = "31 workers for 32 lanes: 2 rounds, 48% of the capacity idles; with 155 lanes 0%"
    assert says in estimated(*asked_for)
    assert "idles" not in estimated(*asked_for[:3], "32", *asked_for[4:])
    config = tmp_path / "train.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "shoal": {"lanes": 32}}')
    assert says in estimated("--config", str(config), "--workers", "31")
    rows = json.loads(estimated("--config", str(config), "--workers", "31", "--output", "json"))["counts"]
    assert {row["workers"]: round(row["idle_lane_ratio"], 2) for row in rows} == {
        1: 0.0, 2: 0.0, 4: 0.0, 8: 0.0, 16: 0.0, 31: 0.48, 32: 0.0,
    }  # fmt: skip
