"""A store is backed up while its jobs train, and lost; another one, restored from the file, has the jobs train on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_command import shoal
from integration.cluster import Cluster, undisturbed, until
from matrices import further

LONG: dict[str, Any] = {"max_steps": 40}
JOBS = 10


class ManyJobs(Cluster):
    """One controller with jobs of one and two workers, of three lengths."""

    def steps_of(self, number: int) -> int:
        return 30 + number % 3

    def _submit(self) -> None:
        for number in range(JOBS):
            self._answer("POST", "/jobs", {**self.spec, "job": f"job-{number}", "workers": {"wanted": 1 + number % 2}})

    def _start_in_order(self) -> None:
        for number in range(JOBS):
            for worker in [f"w{index}" for index in range(1 + number % 2)]:
                env = {"SHOAL_CONTROLLER": f"{self.host}:{self.grpc_port}", "SHOAL_JOB": f"job-{number}",
                       "SHOAL_WORKER_ID": worker}  # fmt: skip
                who = f"job-{number}-{worker}"
                given = {"max_steps": self.steps_of(number), **self._pace, "result": str(self.result_file(who))}
                self.pids[who] = self.fork(who, self.script, given, env, self.folder / f"{who}.log")

    def views(self) -> list[dict[str, Any]]:
        return [self._answer("GET", f"/jobs/job-{number}") for number in range(JOBS)]

    def story(self) -> str:
        return "\n".join(map(str, self.views()))


def restored(cluster: Cluster, file: Path, jobs: str = "1 job") -> None:
    """What its controller has is lost, and comes back from the file."""
    cluster.kill_controller()
    shutil.rmtree(cluster.folder / "store")
    done = shoal("restore", str(file), "--store", f"embedded:{cluster.folder / 'restored'}")
    assert (done.returncode, done.stderr) == (0, "") and f"restored {jobs}, as of" in done.stdout
    cluster.start_controller(store="restored")


def backed_up(cluster: Cluster, file: Path, jobs: str = "1 job") -> None:
    done = shoal("backup", str(file), "--store", f"embedded:{cluster.folder / 'store'}")
    assert (done.returncode, done.stderr) == (0, "") and f"has {jobs}" in done.stdout


def test_jobs_train_on_after_a_restore_and_survive_what_comes(tmp_path: Path) -> None:
    with Cluster(workers=3, options=LONG, spec={"reconnect_seconds": 10.0}, pace=0.03) as cluster:
        cluster.wait_step(2)
        backed_up(cluster, tmp_path / "file")
        refused = shoal("restore", str(tmp_path / "file"), "--store", f"embedded:{cluster.folder / 'store'}")
        assert refused.returncode != 0 and "controller" in refused.stderr
        cluster.wait_step(cluster.job()["step"] + 2)
        restored(cluster, tmp_path / "file")
        cluster.wait_step(cluster.job()["step"] + 2)
        assert cluster.job()["generation"] == 1
        cluster.kill("w1")
        cluster.wait_world(2)
        cluster.add()
        cluster.wait_world(3)
        cluster.wait_undisturbed()


def test_a_backup_that_knows_fewer_worlds_than_there_were_is_caught_up_with_by_the_workers(tmp_path: Path) -> None:
    with Cluster(workers=3, options=LONG, pace=0.03) as cluster:
        cluster.wait_step(2)
        backed_up(cluster, tmp_path / "file")
        cluster.kill("w1")
        cluster.wait_world(2)
        restored(cluster, tmp_path / "file")
        cluster.wait_world(2)
        cluster.wait_undisturbed()


@further
@pytest.mark.timeout(300)
def test_ten_jobs_go_on_with_their_bits_from_a_backup_that_was_taken_while_they_trained(tmp_path: Path) -> None:
    with ManyJobs(pace=0.03) as cluster:
        until("all jobs to train", lambda: all(view["step"] >= 2 for view in cluster.views()))
        backed_up(cluster, tmp_path / "file", "10 jobs")
        restored(cluster, tmp_path / "file", "10 jobs")
        before = [view["step"] for view in cluster.views()]
        later = "all jobs to go on"
        until(later, lambda: all(view["step"] > step for view, step in zip(cluster.views(), before, strict=True)))
        cluster.release()
        until("all jobs to succeed", lambda: all(view["phase"] == "succeeded" for view in cluster.views()))
        for number in range(JOBS):
            report = cluster._answer("GET", f"/jobs/job-{number}/report")
            assert report["fingerprint"] == undisturbed({"max_steps": cluster.steps_of(number)})
            assert not any(world["lost_steps"] for world in report["generations"])
