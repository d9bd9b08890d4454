"""Groups over NCCL: members with a device each, or several on one where there are fewer (nccl_members.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.slow_start import SLOWLY
from integration.cluster import Cluster
from rule import rule

TESTS = Path(__file__).parents[1]


def act(name: str, size: int) -> None:
    """Each of so many members in a process of its own."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    members = [
        subprocess.Popen(
            [sys.executable, "-m", "gpu.nccl_members", name, str(rank), str(size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        addresses = [member.stdout.readline().strip() for member in members if member.stdout]
        ends = []
        for member in members:
            assert member.stdin
            member.stdin.write(json.dumps(addresses) + "\n")
            member.stdin.flush()
        for member in members:
            ends.append(member.communicate(timeout=80.0))
        for rank, (member, (printed, failure)) in enumerate(zip(members, ends, strict=True)):
            assert member.returncode == 0, f"rank {rank} exited with {member.returncode}:\n{printed}{failure}"
    finally:
        for member in members:
            member.kill()
            member.communicate()


@pytest.mark.parametrize("size", [2, 3])
def test_messages_have_what_was_computed_in_the_order_of_their_tags(size: int) -> None:
    act("messages_in_order", size)


@rule("NCCL is aborted by `abort()`", "Groups", needs="CUDA and NCCL")
@pytest.mark.parametrize("size", [2, 3])
def test_an_abort_ends_a_wait_for_a_message_that_never_comes_and_one_that_is_half_way(size: int) -> None:
    act("rank_0_aborts", size)


def test_a_death_ends_the_waits_of_all_others_and_their_device_goes_on() -> None:
    act("rank_0_dies", 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_workers_go_by_nccl_through_a_kill_and_a_join(stage: int) -> None:
    devices = [f"cuda:{index % torch.cuda.device_count()}" for index in range(2)]
    options = {"device": devices[0], "max_steps": 40, "stage": stage}
    with Cluster(workers=1, options=options, script="gpu.nccl_members:train", pace=SLOWLY) as cluster:
        (other,) = cluster.add(device=devices[1])
        cluster.wait_world(2)
        cluster.until("NCCL to be used", lambda _: '"over": "NCCL"' in cluster.log(other))
        cluster.kill(other)
        cluster.wait_world(1)
        cluster.add(device=devices[1])
        cluster.wait_world(2)
        cluster.wait_undisturbed()
