"""Workers that die: at each instant of a step, in the middle of a change, several at once, the last, on their way in.

Deaths at an instant are planted (`SHOAL_FAULT`); the others come from outside. Every run ends with the bits of the
undisturbed one. Workers are ranked in the order of their ids, and w0's rendezvous server builds the groups.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from integration.cluster import Cluster, undisturbed, until
from matrices import shortened
from rule import holds
from shoal_protos.messages import START_AGAIN
from tiers import promise

SHORT: dict[str, Any] = {"max_steps": 8}
TWO_MIRRORS: dict[str, Any] = {**SHORT, "mirrors": 2}
LONG: dict[str, Any] = {"max_steps": 30}
PACE = 0.03

INSTANTS = ("forward", "backward", "exchange", "mirror", "vote", "in_vote", "optimizer", "hand_out")
KILLED = -signal.SIGKILL


def rolled_forward(cluster: Cluster) -> list[str]:
    return [worker for worker in cluster.pids if "rolled_forward" in cluster.log(worker)]


# ---- in a step


@pytest.mark.parametrize("instant", shortened(INSTANTS, "exchange", "in_vote"))
@promise("a worker is killed", "exchange", "in_vote")
def test_a_worker_killed_at_any_instant_of_a_step_costs_no_step(instant: str) -> None:
    with Cluster(workers=3, options=SHORT, faults=f"w1@4:{instant}:kill") as cluster:
        report = cluster.wait_undisturbed()
        assert cluster.exit_code("w1") == KILLED
    first, second = report["generations"][:2]
    assert (first["reason"], second["reason"], second["workers"]) == ("start", "kill", 2)


@pytest.mark.parametrize("instant", shortened(["exchange", "in_vote", "optimizer"], "optimizer"))
@promise("stage 0", "optimizer")
def test_in_stage_0_everyone_has_a_copy_of_every_block(instant: str) -> None:
    faults = f"w0@4:{instant}:kill,w2@5:{instant}:kill"
    with Cluster(workers=3, options={**SHORT, "stage": 0}, faults=faults) as cluster:
        cluster.wait_undisturbed()
        assert [cluster.exit_code(worker) for worker in ("w0", "w2")] == [KILLED, KILLED]


def kill_once_w0_has_passed(cluster: Cluster, victim: str) -> None:
    """A victim of `in_vote:stop`. One that dies at once may take the row back: what w0 has not read when the world is
    stopped it never reads, and then nobody has passed the vote.
    """
    cluster.until("w0 to have passed the vote", lambda _: cluster.workers()["w0"]["step"] == 4)
    cluster.kill(victim)


@promise("a worker is killed")
def test_who_has_not_passed_a_torn_vote_rolls_forward() -> None:
    with Cluster(workers=3, options=SHORT, faults="w1@4:in_vote:stop") as cluster:
        kill_once_w0_has_passed(cluster, "w1")
        cluster.wait_undisturbed()
        assert rolled_forward(cluster) == ["w2"]


@pytest.mark.parametrize("victim", shortened(["w0", "w1"], "w0"))
def test_one_of_the_last_two_can_die(victim: str) -> None:
    with Cluster(workers=2, options=SHORT, faults=f"{victim}@4:hand_out:kill") as cluster:
        report = cluster.wait_undisturbed()
        assert report["generations"][-1]["workers"] == 1


@holds("What a process has seen to die")
def test_a_death_is_believed_at_once_though_the_dead_process_seems_to_be_connected() -> None:
    spec = {"workers": {"wanted": 3}, "suspect_after": 1000, "stall_seconds": 3600.0}
    with Cluster(workers=2, options=LONG, pace=PACE, spec=spec) as cluster:
        cluster.add(keeps_sockets=True)
        cluster.wait_step(3)
        cluster.kill("w2")
        cluster.wait_world(2)
        assert "another process of its host has seen it end" in cluster.messages("lost")[0]
        cluster.wait_undisturbed()


def test_the_death_of_a_lone_worker_is_believed_at_once_where_its_host_answers_at_another_port() -> None:
    spec = {"workers": {"wanted": 1, "max": 1}, "reconnect_seconds": 3600.0}
    with Cluster(workers=1, options=LONG, pace=PACE, spec=spec) as cluster:
        cluster.wait_step(3)
        cluster.add()  # for which there is no room in the world
        cluster.until("w1 to say hello", lambda _: "w1" in cluster.workers())
        cluster.kill("w0")
        cluster.until("w1 to train", lambda _: cluster.workers()["w1"]["state"] == "active")
        assert "and answers at another port" in cluster.workers()["w0"]["why"]
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed(LONG)


# ---- several


def test_two_workers_die_at_once_and_mirrors_of_both_live_on() -> None:
    with Cluster(workers=4, options={**LONG, "mirrors": 2}, pace=PACE) as cluster:
        cluster.wait_step(3)
        cluster.kill("w1", "w3")
        cluster.wait_world(2)
        cluster.wait_undisturbed()


@promise("no copy of a block lives")
def test_a_job_without_a_launcher_and_a_checkpoint_begins_anew_where_no_copy_of_a_block_lives() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(3)
        cluster.kill("w1", "w2")
        cluster.add()  # which may be a joiner before the loss is known
        assert cluster.wait_exit("w0") == START_AGAIN
        sentences = [line for line in cluster.log("w0").splitlines() if line.startswith("shoal: no living copy of")]
        assert len(sentences) == 1 and "the job begins anew, which takes a fresh process" in sentences[0]
        cluster.add(2)  # whose place `shoal worker` would have taken
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed(LONG)
        assert "the job begins anew" not in cluster.job()["reason"] and cluster.messages("anew")


def test_a_job_to_which_too_few_come_to_begin_anew_fails_and_says_which_blocks_were_lost() -> None:
    spec = {"workers": {"wanted": 3, "min": 2}, "stall_seconds": 3.0}
    with Cluster(workers=3, options=LONG, pace=PACE, spec=spec) as cluster:
        cluster.wait_step(3)
        cluster.kill("w1", "w2")
        cluster.wait_phase("failed")
        reason = cluster.job()["reason"]
        assert "no living copy of" in reason and "0 of 2 workers came to begin anew within 3 s" in reason


def test_one_is_killed_and_one_is_frozen_at_once() -> None:
    with Cluster(workers=4, options={**LONG, "mirrors": 2}, pace=PACE) as cluster:
        cluster.wait_step(3)
        cluster.stop("w2")
        cluster.kill("w1")
        cluster.wait_world(2)
        cluster.cont("w2")
        cluster.wait_world(3)  # as a joiner with another id
        assert cluster.workers()["w2"]["state"] == "left"
        cluster.wait_undisturbed()


# ---- in the middle of a change


@pytest.mark.parametrize("instant", shortened(["prepare", "group", "promote", "opened"], "group"))
@promise("a worker is lost in the midst of a change", "group")
def test_a_second_worker_dies_while_the_loss_of_the_first_is_mended(instant: str) -> None:
    with Cluster(workers=4, options=TWO_MIRRORS, faults=f"w1@4:exchange:kill,w2@3:{instant}:kill") as cluster:
        report = cluster.wait_undisturbed()
        assert [cluster.exit_code(worker) for worker in ("w1", "w2")] == [KILLED, KILLED]
        assert report["generations"][-1]["workers"] == 2


def test_the_worker_whose_store_builds_the_group_dies_while_it_is_built() -> None:
    with Cluster(workers=4, options=TWO_MIRRORS, faults="w3@4:exchange:kill,w0@3:group:kill") as cluster:
        cluster.wait_undisturbed()
        assert cluster.exit_code("w0") == KILLED


def test_a_worker_dies_while_it_rolls_forward() -> None:
    with Cluster(workers=4, options=TWO_MIRRORS, faults="w1@4:in_vote:stop,w2@3:roll_forward:kill") as cluster:
        kill_once_w0_has_passed(cluster, "w1")
        cluster.wait_undisturbed()
        assert [cluster.exit_code(worker) for worker in ("w1", "w2")] == [KILLED, KILLED]
        assert rolled_forward(cluster) == ["w3"]


@pytest.mark.parametrize("how", shortened(["kill", "stop"], "stop"))
def test_a_worker_is_lost_while_others_begin_the_forward_that_its_parameters_come_beside(how: str) -> None:
    with Cluster(workers=3, options=SHORT, faults=f"w1@4:arrival:{how}") as cluster:
        report = cluster.wait_undisturbed()
        assert report["generations"][-1]["workers"] == 2


@pytest.mark.parametrize("how", shortened(["kill", "stop"], "kill"))
@promise("stage 3", "kill")
def test_a_worker_is_lost_while_others_gather_what_it_has(how: str) -> None:
    """Within their forward, which runs again by itself."""
    options = {**SHORT, "stage": 3, "evaluate": True}
    with Cluster(workers=3, options=options, faults=f"w1@4:gather:{how}") as cluster:
        report = cluster.wait_undisturbed()
        assert report["generations"][-1]["workers"] == 2


@pytest.mark.parametrize("how", shortened(["kill", "stop"], "kill"))
@promise("stage 2", "kill")
def test_a_worker_is_lost_in_a_backward_whose_gradients_are_leaving(how: str) -> None:
    """Others wait for it within theirs."""
    with Cluster(workers=3, options={**SHORT, "stage": 2}, faults=f"w1@4:backward:{how}") as cluster:
        report = cluster.wait_undisturbed()
        assert report["generations"][-1]["workers"] == 2


@pytest.mark.parametrize("stage", shortened([0, 2, 3], 3))
def test_a_worker_is_lost_in_the_very_vote_in_which_a_planned_change_begins(stage: int) -> None:
    faults = "w1@0:in_vote_to_begin:kill"
    with Cluster(workers=3, options={**LONG, "stage": stage}, faults=faults, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.add()
        assert cluster.wait_exit("w1") == KILLED
        cluster.wait_world(3)
        cluster.wait_undisturbed()


@pytest.mark.parametrize("victim", shortened(["w0", "w1"], "w0"))
def test_a_worker_dies_when_a_planned_change_begins(victim: str) -> None:
    with Cluster(workers=3, options=LONG, faults=f"{victim}@0:begin:kill", pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.add()
        assert cluster.wait_exit(victim) == KILLED
        cluster.wait_world(3)
        cluster.wait_undisturbed()


@pytest.mark.parametrize("victim", shortened(["w0", "w2"], "w2"))
def test_a_worker_dies_in_the_middle_of_a_fill(victim: str) -> None:
    options = {**LONG, "shoal": {"fill_bytes_per_step": 40_000}}  # a block a step
    with Cluster(workers=2, options=options, faults=f"{victim}@0:fill:kill", pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.add()
        assert cluster.wait_exit(victim) == KILLED
        cluster.wait_world(2)
        cluster.wait_undisturbed()


@pytest.mark.parametrize("instant", shortened(["backward", "group", "join"], "group"))
@promise("a worker is lost in the midst of a change", "group")
def test_a_joiner_dies_on_its_way_in(instant: str) -> None:
    """`backward`: in its warm-up."""
    with Cluster(workers=2, options=LONG, faults=f"w2@0:{instant}:kill", pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.add()
        assert cluster.wait_exit("w2") == KILLED
        cluster.wait_state("w2", "lost")
        cluster.wait_world(2)
        cluster.wait_undisturbed()


# ---- after the last step


def test_a_worker_dies_after_the_last_step_before_it_has_given_its_digests() -> None:
    with Cluster(workers=3, options=SHORT, faults="w1@8:after_last:kill") as cluster:
        cluster.wait_undisturbed()
        assert cluster.exit_code("w1") == KILLED


def test_workers_that_are_done_die_while_another_still_finishes() -> None:
    with Cluster(workers=2, options=SHORT, spec={"workers": {"wanted": 3}}) as cluster:
        lingers = cluster.folder / "lingers"
        cluster.add(linger=str(lingers))
        until("two scripts to end", lambda: all(cluster.result_file(worker).exists() for worker in ("w0", "w1")))
        cluster.kill("w0", "w1")
        cluster.wait_state("w0", "lost")
        cluster.wait_state("w1", "lost")
        lingers.touch()
        cluster.wait_undisturbed()
        assert cluster.wait_exit("w2") == 0
