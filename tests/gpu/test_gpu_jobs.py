"""Jobs on GPUs: one worker, and four that share a GPU over staged gloo, through a kill and a join.

Equal bits are asked for between worlds and stages on this machine, and never with a run on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.slow_start import SLOWLY
from integration.cluster import Cluster, alone, undisturbed

OPTIONS: dict[str, Any] = {"device": "cuda", "max_steps": 20}
WAITING: dict[str, Any] = {"device": "cuda", "max_steps": 40}
BF16 = {"precision": {"bf16": {"enabled": True}}}
FP16 = {"precision": {"fp16": {"enabled": True}}}


@pytest.mark.parametrize("precision", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_a_world_of_one_has_the_same_bits_in_every_stage_and_every_time(precision: dict[str, Any]) -> None:
    ends = [alone({**OPTIONS, **precision, "stage": stage}) for stage in (0, 1, 2, 3, 1)]
    assert len({end["fingerprint"] for end in ends}) == 1
    assert ends[0]["losses"][-1] < ends[0]["losses"][0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_workers_that_share_a_gpu_have_the_undisturbed_bits_through_a_kill_and_a_join(stage: int) -> None:
    with Cluster(workers=4, options={**WAITING, "stage": stage}, pace=SLOWLY) as cluster:
        cluster.wait_world(4)
        cluster.kill("w2")
        cluster.wait_world(3)
        cluster.add()
        cluster.wait_world(4)
        cluster.wait_undisturbed()


@pytest.mark.parametrize("more", [BF16, {"offload": "cpu"}, {**BF16, "offload": "cpu"}], ids=["bf16", "host", "both"])
@pytest.mark.parametrize("stage", [1, 3])
def test_half_precision_and_state_on_the_host_change_nothing_of_that(stage: int, more: dict[str, Any]) -> None:
    with Cluster(workers=3, options={**WAITING, **more, "stage": stage}, pace=SLOWLY) as cluster:
        cluster.wait_world(3)
        cluster.kill("w1")
        cluster.wait_world(2)
        cluster.wait_undisturbed()


def test_an_evaluation_after_every_step_changes_no_bit() -> None:
    with Cluster(workers=2, options={**OPTIONS, "stage": 3, "evaluate": True}) as cluster:
        cluster.wait_undisturbed()


def test_a_job_of_a_gpu_and_a_cpu_is_refused_in_one_sentence() -> None:
    with Cluster(workers=1, options=WAITING, pace=SLOWLY) as cluster:
        cluster.wait_step(2)
        (other,) = cluster.add(device="cpu")
        assert cluster.wait_exit(other) != 0
        assert "joined with another numeric identity: device is cpu, the job's is " in cluster.log(other)
        cluster.wait_done()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_workers_on_different_gpus_have_the_bits_of_one() -> None:
    with Cluster(workers=2, options={**WAITING, "device": "cuda:0"}, pace=SLOWLY) as cluster:
        cluster.add(device="cuda:1")
        cluster.wait_world(3)
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed({**WAITING, "device": "cuda:0"})
