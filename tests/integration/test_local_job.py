"""A job whose workers the controller starts itself: who is lost is replaced, what is lost begins anew.

Everything else about losses is tried with forked workers, which start a hundred times faster.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integration.cluster import Cluster, undisturbed, until
from tiers import promise

TESTS = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {"max_steps": 50}
SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(TESTS)!r})
from integration.scripts import train
folder, options = sys.argv[1:]
train(result=os.path.join(folder, os.environ["SHOAL_WORKER_ID"]), **json.loads(options))
"""


FAILING_SCRIPT = SCRIPT.replace(
    "folder, options",
    """
from integration.scripts import Brake
def hold(brake, step):
    if step == 3:
        raise ValueError("no such column")
Brake.hold = hold
folder, options""",
)


@contextmanager
def launched(folder: Path, text: str = SCRIPT, **more: Any) -> Iterator[Cluster]:
    """A job of two workers with the local launcher, at work until the file `go` is there."""
    script = folder / "train.py"
    script.write_text(text)
    options = {**OPTIONS, **more, "pace": 0.2, "until": str(folder / "go")}
    command = [sys.executable, str(script), str(folder), json.dumps(options)]
    spec = {"launcher": "local", "command": command, "stall_seconds": 90.0}  # fresh Pythons on two busy cores
    with Cluster(workers=2, options=OPTIONS, spec=spec) as cluster:
        yield cluster


@promise("a launcher")
def test_who_is_killed_or_drained_is_replaced_by_the_launcher(tmp_path: Path) -> None:
    with launched(tmp_path) as cluster:
        cluster.wait_step(2)
        cluster.kill("w0")
        cluster.wait_state("w0", "lost")
        cluster.wait_state("w2", "active")
        cluster.drain("w1")
        cluster.wait_state("w1", "left")
        cluster.wait_state("w3", "active")
        cluster.wait_world(2)
        (tmp_path / "go").touch()
        report = cluster.wait_undisturbed()
        log = Path(cluster.workers()["w3"]["log"])
        until("its last word", lambda: "done at step 50" in log.read_text())
    assert {"start", "kill", "join", "drain"} <= {world["reason"] for world in report["generations"]}


def test_workers_that_come_later_are_forked_from_a_warm_process_and_have_the_same_bits(tmp_path: Path) -> None:
    with launched(tmp_path) as cluster:
        cluster.wait_step(2)
        for newest in range(2, 12):  # until it has imported what it is to import
            cluster.drain(f"w{newest - 2}")
            cluster.wait_state(f"w{newest}", "active")
            log = (cluster.folder / "controller-1.log").read_text()
            if "a worker is forked" in log:
                break
        assert "a worker is forked" in log and "not forked" not in log
        cluster.wait_world(2)
        (tmp_path / "go").touch()
        cluster.wait_undisturbed()


@promise("no copy of a block lives")
def test_blocks_of_which_no_copy_lives_begin_anew_and_end_with_the_same_bits(tmp_path: Path) -> None:
    with launched(tmp_path, mirrors=0) as cluster:
        cluster.wait_step(2)
        cluster.kill("w1")
        cluster.until("the job to begin anew", lambda _: cluster.messages("anew"))
        assert "every process that held them is dead; starting again from step 0" in cluster.messages("anew")[0]
        cluster.wait_world(2)
        (tmp_path / "go").touch()
        cluster.wait_done()
        report = cluster.report()
        assert report["fingerprint"] == undisturbed(OPTIONS)
        assert sum(world["lost_steps"] for world in report["generations"]) >= 2


def test_a_script_that_raises_at_one_step_in_all_workers_twice_fails_its_job_with_exception_and_step(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, FAILING_SCRIPT) as cluster:
        until("the job to fail", lambda: cluster.job()["phase"] == "failed", patience=100)
        reason = cluster.job()["reason"]
        assert reason.startswith("two generations failed in the same way in all their members, so a third would too;")
        assert "at step 3: ValueError: no such column\nTraceback" in reason and "train.py" in reason
        assert len(cluster.messages("anew")) == 1
