"""State that leaves a GPU: to files, to checkpoints and to a joiner. What comes back has the undisturbed bits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from gpu.slow_start import SLOWLY
from integration.cluster import Cluster, undisturbed

OPTIONS: dict[str, Any] = {"device": "cuda", "max_steps": 40}
ON_HOST: dict[str, Any] = {"offload": "cpu"}
PARAMETERS_TOO: dict[str, Any] = {**ON_HOST, "offload_param": True}
BF16: dict[str, Any] = {"precision": {"bf16": {"enabled": True}}}
SEVERAL_STEPS: dict[str, Any] = {"shoal": {"fill_bytes_per_step": 200_000}}
"""For a fill: four blocks in each."""


@pytest.mark.parametrize(
    ("stage", "precision", "more"),
    [(1, {}, {}), (3, BF16, {}), (3, {}, {"offload_param": True})],
    ids=["stage 1", "stage 3 in bf16", "parameters on the host"],
)
def test_a_worker_killed_in_the_middle_of_a_write_of_its_file_costs_no_step_and_no_bit(
    stage: int, precision: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    options = {**OPTIONS, **precision, **more, "stage": stage, "offload": str(tmp_path)}
    script = "integration.scripts:train_and_die_writing"
    with Cluster(workers=3, options=options, script=script, pace=SLOWLY) as cluster:
        assert cluster.wait_exit("w1") == -signal.SIGKILL
        cluster.wait_world(2)
        cluster.add()
        cluster.wait_world(3)
        cluster.wait_undisturbed({**OPTIONS, **precision, **ON_HOST})
        assert "state_files" in cluster.log("w0")


@pytest.mark.parametrize(
    ("saved", "loaded", "precision"), [(1, 3, {}), (3, 1, BF16)], ids=["stage 1 to 3", "stage 3 to 1 in bf16"]
)
def test_a_checkpoint_of_three_is_loaded_by_two_in_another_stage(
    saved: int, loaded: int, precision: dict[str, Any], tmp_path: Path
) -> None:
    def options(stage: int, place: Path) -> dict[str, Any]:
        checkpoint = {"path": str(place), "every_steps": 2}
        return {**OPTIONS, **precision, "stage": stage, "shoal": {"checkpoint": checkpoint}}

    first, second = tmp_path / "first", tmp_path / "second"
    with Cluster(workers=3, options=options(saved, first), pace=SLOWLY) as cluster:
        cluster.wait_world(3)
        step = cluster.wait_saved(cluster.job()["step"] + 1)
    with Cluster(workers=2, options=options(loaded, second), spec={"resume": str(first)}) as cluster:
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed({**OPTIONS, **precision}), "other bits than the undisturbed run"
        assert cluster.report()["generations"][0]["from_step"] >= step


@pytest.mark.parametrize(
    ("stage", "precision", "more"),
    [(1, {}, {}), (3, BF16, {}), (3, {}, PARAMETERS_TOO)],
    ids=["stage 1", "stage 3 in bf16", "parameters on the host"],
)
def test_a_joiner_that_mirrors_all_goes_on_alone_with_what_it_was_filled_with(
    stage: int, precision: dict[str, Any], more: dict[str, Any]
) -> None:
    options = {**OPTIONS, **precision, **more, **SEVERAL_STEPS, "stage": stage, "mirrors": 2}
    with Cluster(workers=2, options=options, pace=SLOWLY) as cluster:
        cluster.wait_world(2)
        cluster.add()
        cluster.until("all three to hold every block", lambda _: copies(cluster) == 3)
        cluster.kill("w0", "w1")
        cluster.wait_world(1)
        report = cluster.wait_undisturbed({**OPTIONS, **precision, **(ON_HOST if more else {})})
        assert sum(world["bytes"]["fill"] for world in report["generations"]) > 0


def copies(cluster: Cluster) -> int:
    """Members that hold every block, as an owner or as a mirror."""
    found = httpx.get(f"{cluster.url}/v1/jobs/job/holdings").json()
    held = [sum(stop - start for start, stop in (*member["owned"], *member["mirrored"])) for member in found["members"]]
    return held.count(found["blocks"])
