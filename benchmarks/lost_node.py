"""A pod that is lost with its node: from the loss to the first step of the others. `python benchmarks/lost_node.py`,
as root: each node is a network namespace, and its cable is pulled out, so that nobody is told of anything.

Three pods of small forked processes train, each on a node of its own. The target is three heartbeats, one step and
half a second. Elapsed is from the pull to the controller's record of the first committed step of the world without
that pod; a step is the median that the job reports.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tables import show, spread, verdict

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from faults.hosts import Hosts
from integration.cluster import QUICK, until, warmed
from integration.job_of_pods import JobOfPods, host_of, launched

WORKERS, STEPS = 3, 400
HEARTBEATS, EXTRA_SECONDS = 3, 0.5
COLUMNS = ("heartbeat, s", "step, s", "to the next step, s", "of it beyond 3 heartbeats and a step, s", "target")


def trial(folder: Path) -> tuple[float, float]:
    """How long a step is, and how long it took to the first one without the lost pod."""
    with Hosts(WORKERS) as hosts, launched(WORKERS, WORKERS, folder, JobOfPods, hosts, max_steps=STEPS) as (job, pods):
        job.wait_world(WORKERS)
        job.wait_step(job.job()["step"] + 15)
        step, generation = job.report()["step_seconds_median"], job.job()["generation"]
        node = job.node_of("w1")
        pods.silence(node)
        began = time.time()
        hosts.unplug(host_of(node))
        trains = until("the others to train", lambda: first_step(job, generation))
        return step, trains - began


def first_step(job: JobOfPods, generation: int) -> float:
    """When the first step of a later world was committed; 0: none was."""
    times = [one["time"] for one in job.events() if one["kind"] == "trains" and one["generation"] > generation]
    return min(times, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    given = parser.parse_args()
    heartbeat, found = QUICK["heartbeat_seconds"], []
    with warmed():
        for number in range(given.trials):
            with tempfile.TemporaryDirectory(prefix="lost-node-") as name:
                found.append(trial(Path(name)))
            print(f"{number + 1}/{given.trials}: step {found[-1][0]:.3f} s, next step {found[-1][1]:.3f} s", flush=True)
    beyond = [elapsed - HEARTBEATS * heartbeat - step for step, elapsed in found]
    row = [f"{heartbeat:g}", spread([step for step, _ in found]), spread([elapsed for _, elapsed in found]),
           spread(beyond), verdict(max(beyond), EXTRA_SECONDS)]  # fmt: skip
    show("A pod lost with its node", COLUMNS, [row])


if __name__ == "__main__":
    main()
