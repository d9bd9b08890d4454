"""Cells of two real processes, beside a spare: the same bits in any number of cells, through any loss."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from faults.hosts import Hosts
from integration.cluster import Cluster
from integration.test_hosts import FarWorkers
from matrices import further, shortened
from rule import Edit, holds, rule
from shoal_protos.messages import START_AGAIN, WRONG_USE
from tiers import check, promise

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "integration.cell_scripts:train"
OPTIONS: dict[str, Any] = {"max_steps": 12, "lanes": 4}
COMPILE_SECONDS = 600
LAUNCHED = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from integration.cell_scripts import train
folder, options = sys.argv[1:]
train(result=os.path.join(folder, os.environ["SHOAL_WORKER_ID"]), **json.loads(options))
"""


def cells_of(by: str, workers: int, **options: Any) -> Cluster:
    return Cluster(workers, {**OPTIONS, "by": by, **options}, script=SCRIPT, pace=0.05)


@cache
def one_cell(by: str, **options: Any) -> dict[str, Any]:
    """What an undisturbed job of one cell comes to."""
    with cells_of(by, 2, **options) as cluster:
        cluster.wait_done()
        return cluster.result("w0")


@promise("a cell loses a process", "w1-hand")
@holds("Any number of cells ends in the same bits")
@pytest.mark.parametrize("by", ["hand", "plan"])
@pytest.mark.parametrize("killed", shortened(["w1", "w0"], "w1"))
def test_a_process_of_a_cell_is_killed_and_a_spare_takes_its_place(by: str, killed: str) -> None:
    with cells_of(by, 5) as cluster:
        cluster.wait_step(3)
        cluster.kill(killed)
        cluster.wait_done()
        report, result = cluster.report(), cluster.result("w2")
    assert report["fingerprint"] == one_cell(by)["fingerprint"]
    assert result["loss"] == one_cell(by)["loss"]
    assert [world["lost_steps"] for world in report["generations"]] == [0] * len(report["generations"])


def kills_a_whole_cell(cluster: Cluster) -> None:
    cluster.kill("w2", "w3")


def kills_one_of_each_coordinate(cluster: Cluster) -> None:
    cluster.kill("w0", "w3")


def freezes_one(cluster: Cluster) -> None:
    cluster.stop("w1")
    cluster.until("the others to go on", lambda job: job["workers"]["active"] < 5)
    cluster.cont("w1")


def drains_one(cluster: Cluster) -> None:
    cluster.drain("w1")
    cluster.wait_state("w1", "left", "gone", "drained")


def scales_down_and_up(cluster: Cluster) -> None:
    cluster.scale(2)
    cluster.wait_world(2)
    cluster.scale(4)
    cluster.add(2)
    cluster.wait_world(4)


@further
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "act", [kills_a_whole_cell, kills_one_of_each_coordinate, freezes_one, drains_one, scales_down_and_up]
)
def test_cells_end_in_the_same_bits_whatever_happens_to_their_processes(
    act: Callable[[Cluster], None], stage: int
) -> None:
    with cells_of("hand", 5, stage=stage, max_steps=40) as cluster:
        cluster.wait_step(3)
        act(cluster)
        cluster.wait_done()
        assert cluster.fingerprint == one_cell("hand", max_steps=40)["fingerprint"]


@check("a launcher's processes; the machine's decision is a test of seats")
@holds("Where another process in place of a spare one")
def test_a_spare_makes_room_by_itself_where_the_launcher_starts_one_that_a_cell_lacks(tmp_path: Path) -> None:
    options = {**OPTIONS, "by": "hand", "max_steps": 40, "pace": 0.2, "until": str(tmp_path / "go")}
    command = [sys.executable, "-c", LAUNCHED, str(tmp_path), json.dumps(options)]
    spec = {"launcher": "local", "command": command, "stall_seconds": 90.0}  # fresh Pythons on two busy cores
    with Cluster(5, options, spec=spec) as cluster:
        cluster.wait_world(5)
        cluster.wait_step(2)
        fewest = [name for name, worker in cluster.workers().items() if worker["coordinate"]["tensor"] == 1]
        cluster.kill(fewest[-1])
        cluster.wait_state(fewest[-1], "lost")
        cluster.scale(4)  # what may have been to take its place has no coordinate yet, and is not started: three at one
        cluster.until("a spare to make room", lambda _: "2 cells could train" in str(cluster.messages("draining")))
        cluster.until("a new one to train", lambda _: {"w5", "w6"} & active_of(cluster))
        (tmp_path / "go").touch()
        cluster.wait_done()
        assert cluster.fingerprint == one_cell("hand", max_steps=40)["fingerprint"]
        assert sum("could train" in sentence for sentence in cluster.messages("draining")) == 1
        assert [cells.partition(";")[0] for cells in cluster.messages("paired")] == ["2 cells train", "2 cells train"]
        assert not any(world["lost_steps"] for world in cluster.report()["generations"])


def active_of(cluster: Cluster) -> set[str]:
    return {name for name, worker in cluster.workers().items() if worker["state"] == "active"}


@check("torch.compile in processes; the crew has the bits")
@holds("Any number of cells ends in the same bits")
@pytest.mark.timeout(2 * COMPILE_SECONDS)
@pytest.mark.parametrize("backend", shortened(["aot_eager", "inductor"], "aot_eager"))
def test_a_compiled_model_keeps_its_one_graph_and_bits_though_its_cell_is_paired_anew(
    backend: str, tmp_path: Path
) -> None:
    """aot_eager traces as every backend and compiles nothing; inductor takes 50 s of a core for its kernels, once, and
    10 more in each process.
    """
    options: dict[str, Any] = {"compile": backend, "compiler_cache": str(tmp_path), "max_steps": 8}
    with cells_of("plan", 4, **options) as cluster:
        cluster.until("all to have compiled", lambda job: job["step"] > 0, COMPILE_SECONDS)
        for killed, left in (("w1", 3), ("w2", 2)):
            cluster.wait_step(cluster.job()["step"] + 1)
            cluster.kill(killed)
            cluster.wait_world(left)
        cluster.wait_done()
        fingerprint, survivor, pairs = cluster.fingerprint, cluster.result("w3"), cluster.messages("paired")
    assert pairs[-1] == "1 cell trains; new: w0 with w3"
    undisturbed = one_cell("plan", **options)
    assert fingerprint == undisturbed["fingerprint"]
    assert survivor["graphs"] == undisturbed["graphs"] == 1


@check("DTensors in processes; the crew has plain parameters")
@rule(
    "The part of a sharded DTensor that lies in a process is a view of its unit's memory, and goes with it",
    "Cells",
    broken_by=[
        Edit("shoal.cells.marks", "from_dlpack(memory) if stays else memory.data", "from_dlpack(memory)"),
        Edit("shoal.training.gathered_units", "_memory_of(local_of(tensor))", "_memory_of(tensor)"),
    ],
)
def test_a_process_is_killed_while_dtensors_are_sharded_and_no_bit_changes() -> None:
    with cells_of("plan", 5, stage=3) as cluster:
        cluster.wait_step(3)
        cluster.kill("w1")
        cluster.wait_done()
        assert cluster.fingerprint == one_cell("plan")["fingerprint"]


@check("a failure of processes")
def test_dtensors_that_are_sharded_are_not_compiled_and_a_sentence_says_so() -> None:
    with cells_of("plan", 2, stage=3, compile="aot_eager") as cluster:
        cluster.wait_phase("failed")
        assert cluster.wait_exit("w0") == WRONG_USE
        [sentence] = [line for line in cluster.log("w0").splitlines() if line.startswith("shoal: ")]
        assert '.weight" is a DTensor, which torch.compile cannot trace in memory that comes and goes' in sentence


def has_two_copies(cluster: Cluster) -> bool:
    """Whether five train, and each coordinate keeps a mirror of every block."""
    blocks, mirrors = Counter[int](), Counter[int]()
    workers = [worker for worker in cluster.workers().values() if worker["state"] == "active"]
    for worker in workers:
        blocks[worker["coordinate"]["tensor"]] += worker["blocks"]
        mirrors[worker["coordinate"]["tensor"]] += worker["mirrored_blocks"]
    return len(workers) == 5 and blocks[0] > 0 < blocks[1] and mirrors >= blocks


@further
@pytest.mark.timeout(600)
def test_layers_of_dtensors_have_the_same_bits_through_ten_kills() -> None:
    chance, options = Random(1), {**OPTIONS, "by": "plan", "max_steps": 150}
    with Cluster(5, options, script=SCRIPT, pace=0.4) as cluster:
        for _ in range(10):
            cluster.until("two copies of every block", lambda _: has_two_copies(cluster))
            killed = chance.choice(sorted(name for name, one in cluster.workers().items() if one["state"] == "active"))
            cluster.kill(killed)
            cluster.wait_state(killed, "lost", "gone")  # or the next one could get another coordinate
            cluster.add()
        cluster.wait_done()
        report = cluster.report()
    assert report["fingerprint"] == one_cell("plan", max_steps=150)["fingerprint"]
    assert [world["reason"] for world in report["generations"]].count("kill") == 10
    assert not any(world["lost_steps"] for world in report["generations"])


@check("a checkpoint of cells in processes; the crew has its bits")
def test_all_workers_of_two_cells_are_killed_and_one_cell_goes_on_from_their_checkpoint(tmp_path: Path) -> None:
    with cells_of("hand", 4, shoal={"checkpoint": {"path": str(tmp_path), "every_steps": 3}}) as cluster:
        step = cluster.wait_saved(3)
        cluster.kill("w0", "w1", "w2", "w3")
        cluster.scale(2)
        for worker in ("w0", "w1", "w2", "w3"):  # or both that come could get the place of one that is known to be dead
            cluster.wait_state(worker, "lost", "left", "gone")
        cluster.add(2)
        cluster.wait_done()
        report = cluster.report()
    assert report["fingerprint"] == one_cell("hand")["fingerprint"]
    assert report["generations"][-1]["from_step"] >= step


@check("statuses of processes; the crew has the bits")
@holds("A script that raises in a void lane")
@pytest.mark.parametrize("end", ["raise", "exit", "break"])
def test_a_process_whose_script_ends_in_a_void_lane_is_to_be_started_again_and_the_others_train_on(end: str) -> None:
    with cells_of("hand", 4, alone=end) as cluster:
        assert cluster.wait_exit("w0") == START_AGAIN
        cluster.wait_done()
        [failure] = cluster.messages("failed")
        assert failure.startswith("worker w0 failed: failed in a void lane: ")
        assert cluster.fingerprint == one_cell("hand")["fingerprint"]


@check("a failure of processes; the crew has the sentence")
@holds("Gradients that are said to be equal")
def test_a_script_whose_gradients_are_said_to_be_equal_and_are_not_fails_with_one_sentence() -> None:
    with cells_of("hand", 2, unequal=True) as cluster:
        cluster.wait_phase("failed")
        for worker in ("w0", "w1"):
            assert cluster.wait_exit(worker) == 1
            [sentence] = [line for line in cluster.log(worker).splitlines() if line.startswith("shoal: ")]
            assert 'parameter "norm.weight" is said to have equal gradients on both tensor coordinates' in sentence


@check("DTensors in half precision; the crew has plain parameters")
def test_one_and_two_cells_agree_on_dtensors_in_half_precision_and_so_do_stages() -> None:
    found = set()
    for workers, stage in ((2, 1), (4, 1), (4, 2), (4, 3)):
        with cells_of("plan", workers, stage=stage, precision={"bf16": {"enabled": True}}) as cluster:
            cluster.wait_done()
            found.add(cluster.report()["fingerprint"])
    assert len(found) == 1


@further
@pytest.mark.skipif(not Hosts.can_be_had(), reason="network namespaces need root, `ip`, `tc` and `nft`")
@pytest.mark.parametrize("hosts_apart", [(1, 2), (1, 3)], ids=["within a cell", "between two cells"])
def test_a_cable_that_is_cut_costs_one_process_of_a_cell_and_no_bit(hosts_apart: tuple[int, int]) -> None:
    given = {"options": {**OPTIONS, "by": "hand", "max_steps": 30}, "spec": {"progress_seconds": 2.0}}
    one, other = hosts_apart
    with Hosts(5) as hosts, FarWorkers(hosts, workers=5, script=SCRIPT, pace=0.06, **given) as cluster:
        cluster.wait_world(5)
        cluster.wait_step(3)
        hosts.cut(one, other)
        hosts.cut(other, one)
        step = cluster.job()["step"]
        cluster.wait_world(4)
        cluster.wait_step(step + 3)
        hosts.heal()
        cluster.wait_done()
        assert cluster.fingerprint == one_cell("hand", max_steps=30)["fingerprint"]


def definitions_of(example: str) -> str:
    """What it defines before it calls `shoal.cell`."""
    definitions, _, rest = (ROOT / "examples" / example).read_text().partition("\ncell = shoal.cell(config)")
    assert rest, f"{example} calls shoal.cell after its definitions"
    return definitions


def of_contexts(by: str, workers: int) -> Cluster:
    options = {"definitions": definitions_of("context_parallel.py"), "by": by, "max_steps": 12}
    return Cluster(workers, options, script="integration.cell_scripts:of_example", pace=0.05)


def of_dimensions(workers: int, example: str = "three_dimensional.py") -> Cluster:
    options = {"definitions": definitions_of(example), "by": "dimensions", "max_steps": 12}
    return Cluster(workers, options, script="integration.cell_scripts:of_example", pace=0.05)


@check("eight processes; the crew has the bits of both dimensions, and joins")
@pytest.mark.timeout(300)
def test_eight_processes_of_the_example_in_three_dimensions_lose_one_and_are_scaled_and_no_bit_changes() -> None:
    with of_dimensions(8) as cluster:
        cluster.wait_world(8)
        cluster.wait_step(cluster.job()["step"] + 1)
        cluster.kill("w5")
        cluster.wait_world(7)
        cluster.wait_step(cluster.job()["step"] + 1)
        cluster.scale(4)
        cluster.wait_world(4)
        cluster.wait_done()
        report = cluster.report()
    assert not any(world["lost_steps"] for world in report["generations"])
    with of_dimensions(4) as cluster:
        cluster.wait_done()
        assert cluster.fingerprint == report["fingerprint"]


@check("experts in processes; the crew has the bits")
def test_a_process_of_a_cell_that_divides_experts_is_killed_and_a_spare_takes_its_place() -> None:
    with of_dimensions(5, "experts.py") as cluster:
        cluster.wait_step(3)
        cluster.kill("w1")
        cluster.wait_done()
        several = cluster.result("w2")
    with of_dimensions(2, "experts.py") as cluster:
        cluster.wait_done()
        assert cluster.result("w0") == several


@check("contexts in processes; the crew has the bits")
@pytest.mark.parametrize("by", shortened(["ulysses", "ring"], "ring"))
def test_a_process_of_a_cell_that_divides_sequences_is_killed_and_a_spare_takes_its_place(by: str) -> None:
    with of_contexts(by, 5) as cluster:
        cluster.wait_step(3)
        cluster.kill("w1")
        cluster.wait_done()
        several = cluster.result("w2")
    with of_contexts(by, 2) as cluster:
        cluster.wait_done()
        assert cluster.result("w0") == several


@check("a failure of processes")
def test_attention_of_torchs_context_parallel_on_the_cpu_is_refused_in_a_sentence() -> None:
    with of_contexts("torch", 2) as cluster:
        cluster.wait_phase("failed")
        assert cluster.wait_exit("w0") == WRONG_USE
        [sentence] = [line for line in cluster.log("w0").splitlines() if line.startswith("shoal: ")]
        assert "torch has no kernel on the CPU for attention over DTensors, as its context_parallel makes" in sentence


def test_the_examples_of_the_page_on_cells_run() -> None:
    options = {"page": str(ROOT / "docs/cells.md"), "definitions": definitions_of("tensor_parallel.py")}
    with Cluster(2, options, script="integration.cell_scripts:of_the_page") as cluster:
        cluster.wait_done()
        for worker in ("w0", "w1"):
            assert cluster.wait_exit(worker) == 0
        assert cluster.result("w0") == cluster.result("w1")


def _are_mirrored(cluster: Cluster) -> bool:
    workers = cluster.workers().values()
    return len(workers) == 4 and all(worker["mirrored_blocks"] for worker in workers)


def through_a_kill(made: Callable[..., Cluster], go: Path) -> Any:
    """What a process of one cell tells at its end, the same on both; and on two cells, though one is killed."""
    with made(2) as cluster:
        cluster.wait_done()
        undisturbed = cluster.result("w0")
        assert undisturbed == cluster.result("w1")
    with made(4, pace=0.3, until=str(go)) as cluster:
        cluster.until("copies of all blocks", lambda _: _are_mirrored(cluster), 120)
        cluster.kill("w1")
        cluster.wait_state("w1", "lost")
        go.touch()
        cluster.wait_done()
        assert cluster.result("w2") == undisturbed
        assert not any(world["lost_steps"] for world in cluster.report()["generations"])
    return undisturbed


def of_stages(workers: int, **brake: Any) -> Cluster:
    options = {"definitions": (ROOT / "examples/pipeline.py").read_text(), "max_steps": 20, **brake}
    return Cluster(workers, options, script="integration.cell_scripts:of_stages")


@check("stages in processes, which take their time to import torch's schedules; the crew has the bits")
@holds("A schedule's stages shake hands anew")
@pytest.mark.timeout(300)
def test_the_example_of_pipelines_ends_in_the_same_bits_though_a_process_is_killed(tmp_path: Path) -> None:
    through_a_kill(of_stages, tmp_path / "go")


def of_layers(workers: int, **brake: Any) -> Cluster:
    options = {"definitions": (ROOT / "examples/deepspeed_pipeline.py").read_text(), "steps": 20, **brake}
    return Cluster(workers, options, script="integration.cell_scripts:of_layers")


@check("stages in processes, as by Shoal's own names; the crew has the bits")
@holds("The n-th call of `train_batch` is the job's n-th step")
@pytest.mark.timeout(300)
def test_the_example_of_deepspeeds_pipelines_ends_in_the_same_bits_though_a_process_is_killed(tmp_path: Path) -> None:
    assert through_a_kill(of_layers, tmp_path / "go")["step"] == 20
