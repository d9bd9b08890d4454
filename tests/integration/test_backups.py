"""A store is backed up while its jobs train, and lost; another one, restored from the file, has the jobs train on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from forked_command import shoal
from integration.cluster import Cluster

LONG: dict[str, Any] = {"max_steps": 40}


def restored(cluster: Cluster, file: Path) -> None:
    """What its controller has is lost, and comes back from the file."""
    cluster.kill_controller()
    shutil.rmtree(cluster.folder / "store")
    done = shoal("restore", str(file), "--store", f"embedded:{cluster.folder / 'restored'}")
    assert (done.returncode, done.stderr) == (0, "") and "restored 1 job, as of" in done.stdout
    cluster.start_controller(store="restored")


def backed_up(cluster: Cluster, file: Path) -> None:
    done = shoal("backup", str(file), "--store", f"embedded:{cluster.folder / 'store'}")
    assert (done.returncode, done.stderr) == (0, "") and "has 1 job" in done.stdout


def test_jobs_train_on_after_a_restore_and_survive_what_comes(tmp_path: Path) -> None:
    with Cluster(workers=3, options=LONG, pace=0.03) as cluster:
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
