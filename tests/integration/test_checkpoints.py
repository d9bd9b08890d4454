"""Checkpoints with real processes: runs killed whole, blocks without a copy, jobs that begin from another job's."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.cluster import Cluster, alone, undisturbed, until
from matrices import shortened
from object_store import object_store
from rule import holds
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.storage import LocalStorage
from tiers import promise

STEPS = 30
PACE = 0.02
STEPS_BETWEEN = 12
"""Enough for some between each two kills."""


def options(place: object, **checkpoint: Any) -> dict[str, Any]:
    return {"max_steps": STEPS, "shoal": {"checkpoint": {"path": str(place), **checkpoint}}}


def whole(place: Path) -> list[int]:
    """Steps of the whole checkpoints, newest first; each of them is read."""
    found = list(checkpoints(LocalStorage(place), lambda _: None))
    for one in found:
        verify(one.reader())
    return [one.name.step for one in found]


def ends_undisturbed(cluster: Cluster) -> None:
    """The job ends, and with the bits of a run that saved nothing and was never disturbed."""
    cluster.wait_done()
    assert cluster.fingerprint == undisturbed({"max_steps": STEPS})


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sizes", shortened([[2, 4], [2, 3, 1, 4, 3]], [2, 4]), ids=["twice", "five times"])
@promise("all workers are lost", "twice")
def test_a_run_that_is_killed_whole_again_and_again_ends_in_the_undisturbed_fingerprint(
    tmp_path: Path, sizes: list[int]
) -> None:
    chance, steps = random.Random(7), STEPS_BETWEEN * len(sizes)
    expected = undisturbed({"max_steps": steps})
    given = options(tmp_path, every_steps=2) | {"max_steps": steps}
    with Cluster(workers=3, options=given, pace=PACE) as cluster:
        running, before = ["w0", "w1", "w2"], 0
        for size in sizes:
            for worker in running:
                cluster.wait_state(worker, "active")
            before = cluster.wait_saved(before + 1)
            cluster.wait_step(before + chance.randint(0, 4))
            cluster.kill(*running)
            cluster.kill_controller()
            cluster.start_controller()
            for worker in running:
                cluster.lost(worker)  # a controller that never reached it cannot tell a dead one from a firewall
            cluster.scale(size)
            running = cluster.add(size)
        cluster.release()
        cluster.wait_phase("succeeded")
        report = cluster.report()
        assert report["fingerprint"] == expected
        assert [world["from_step"] > 0 for world in report["generations"] if world["reason"] == "start"][1:] == (
            [True] * len(sizes)
        )
        assert whole(tmp_path)


@promise("no copy of a block lives")
def test_all_go_back_when_two_die_at_once_that_held_the_only_copies(tmp_path: Path) -> None:
    with Cluster(workers=4, options=options(tmp_path, every_steps=3), pace=PACE) as cluster:
        step = cluster.wait_saved(3)
        cluster.kill("w1", "w2")
        cluster.wait_world(2)
        ends_undisturbed(cluster)
        (restore,) = (world for world in cluster.report()["generations"] if world["reason"] == "restore")
        assert restore["from_step"] >= step and restore["bytes"]["checkpoint"] > 0
        assert 'shoal_repartition_bytes_total{job_name="job",source="checkpoint"}' in cluster.metrics()


def test_a_checkpoint_is_asked_for_listed_and_counted(tmp_path: Path) -> None:
    def listing() -> list[dict[str, Any]]:
        return list(httpx.get(f"{cluster.url}/v1/jobs/job/checkpoints", timeout=60).json()["checkpoints"])

    with Cluster(workers=2, options=options(tmp_path), pace=PACE) as cluster:
        cluster.wait_step(2)
        assert listing() == []
        assert httpx.post(f"{cluster.url}/v1/jobs/job/checkpoints", timeout=60).status_code == 202
        step = cluster.wait_saved(1)
        until("its size", lambda: listing()[0]["bytes"])
        (listed,) = listing()
        assert (listed["step"], listed["generation"]) == (step, 1) and listed["bytes"] > 100_000
        assert listed["saved"] is not None, "its world was heard to save it"
        assert Path(listed["path"]).parent == tmp_path
        figures = cluster.metrics()
        assert f'shoal_checkpoint_last_step{{job_name="job"}} {float(step)}' in figures
        for phase in ("copy", "write", "commit"):
            assert f'shoal_checkpoint_seconds_count{{job_name="job",phase="{phase}"}} 1.0' in figures
        assert f'shoal_checkpoint_bytes_total{{job_name="job"}} {float(listed["bytes"])}' in figures
        ends_undisturbed(cluster)
        assert whole(tmp_path) == [step], "one was asked for"


@promise("all workers are lost")
def test_a_job_begins_from_another_jobs_checkpoint_in_another_world(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with Cluster(workers=3, options=options(first, every_steps=5), pace=PACE) as cluster:
        step = cluster.wait_saved(5)
    other = {**options(second), "stage": 0, "mirrors": 2}
    with Cluster(workers=2, options=other, spec={"resume": str(first)}) as cluster:
        ends_undisturbed(cluster)
        assert cluster.report()["generations"][0]["from_step"] >= step


@promise("a worker is drained")
def test_the_last_worker_saves_when_it_is_terminated(tmp_path: Path) -> None:
    with Cluster(workers=1, options=options(tmp_path), pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.drain("w0", grace_seconds=1.0)
        cluster.wait_phase("waiting")
        assert cluster.wait_exit("w0") == 0
        (step,) = whole(tmp_path)
        assert cluster.job()["step"] == step
        cluster.add()
        ends_undisturbed(cluster)


def test_a_place_that_fails_is_told_and_training_is_unharmed(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with Cluster(workers=2, options=options(place, every_steps=2), pace=PACE) as cluster:
        cluster.wait_saved(2)
        place.rename(tmp_path / "away")
        place.write_text("in the way")
        cluster.until("a failure", lambda _: cluster.messages("checkpoint_failed"))
        assert any(
            "a file of that name is in the way" in sentence for sentence in cluster.messages("checkpoint_failed")
        )
        assert "shoal_checkpoint_failures_total{" in cluster.metrics()
        cluster.until("that it is said", lambda job: "last save: the checkpoint of step " in job["reason"])
        place.unlink()
        (tmp_path / "away").rename(place)
        ends_undisturbed(cluster)
        assert whole(place)[0] == STEPS


@holds("A job that has succeeded has the last checkpoint")
def test_a_job_whose_last_checkpoint_cannot_be_saved_fails_and_says_why(tmp_path: Path) -> None:
    place = tmp_path / "place"
    spec = {"stall_seconds": 5.0}
    with Cluster(workers=2, options=options(place, every_steps=20), pace=PACE, spec=spec) as cluster:
        step = cluster.wait_saved(20)
        place.rename(tmp_path / "away")
        place.write_text("in the way")
        assert httpx.post(f"{cluster.url}/v1/jobs/job/checkpoints", timeout=60).status_code == 202
        cluster.wait_phase("failed")
        job = cluster.job()
        assert (
            "all steps are done, but the last checkpoint that was due is missing: the checkpoint of step 30 failed"
            in (job["reason"])
        )
        assert f"Started again, the job goes on from step {step}." in job["reason"]
        assert job["step"] == STEPS
        assert [cluster.wait_exit(worker) for worker in ("w0", "w1")] == [1, 1]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty place in a real object store."""
    with object_store(monkeypatch):
        yield "s3://ckpt/job"


def test_a_job_saves_to_an_object_store_and_goes_on_from_it(s3: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    given = options(s3, every_steps=4) | {"max_steps": 10}
    first = alone(given, env=environment)
    assert first["step"] == 10
    further = alone({**given, "max_steps": STEPS}, env=environment)
    assert further["fingerprint"] == undisturbed({"max_steps": STEPS})
    assert len(further["losses"]) < STEPS  # it did not begin at step 0
