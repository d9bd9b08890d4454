"""Mixed faults on real jobs for as long as is asked, and equal fingerprints at the end of each.

    python -m tests.faults.run --minutes 60          make faults MINUTES=60
    python -m tests.faults.run --seed 17 --rounds 1  one round again
    python -m tests.faults.run --stage 3 --kinds kill  only kills, only in stage 3 of ZeRO
    python -m tests.faults.run --one-host    workers that pass messages through shared memory

A round is one job: a worker on each of some hosts, faults of every kind drawn from its seed while it trains, then
everything is healed and it ends. Stages of ZeRO take turns. Its fingerprint has to be that of an undisturbed run in
stage 0. Exit status 1 where it is not, where a job fails, or where it does not end. Without root no links are cut and
no disk is filled: then it says so.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.hosts import Hosts, Loopback
from faults.job import NAME, PAUSE, SCRIPT, Job, wait
from faults.stranger import MANNERS

STEPS, PACE = 500, 0.08
WORKERS = 4
STAGES = (0, 1, 2, 3)
LAST_FAULT = 440
"""The step after which nothing more strikes."""
END_SECONDS = 240.0


class Faults:
    """What strikes one job. Each method is one kind; `pending` undoes what has an end, at its time."""

    def __init__(self, job: Job, chance: random.Random, only: Collection[str] = ()) -> None:
        self._job, self._chance = job, chance
        self._pending: list[tuple[float, Callable[[], None]]] = []
        self.counts: Counter[str] = Counter()
        self._controller_is_here = True
        kinds = [self.kill, self.kill_two, self.freeze, self.terminate, self.drain, self.scale, self.pause, self.save]
        kinds += [self.kill_controller, self.freeze_controller]
        if job.hosts.has_links:
            kinds += [self.cut_pair, self.cut_one_way, self.cut_from_controller, self.fill_disk]
            kinds += [self.refuse, self.refuse_controller, self.lose, self.shape, self.take_port]
        self._kinds = [kind for kind in kinds if not only or kind.__name__ in only]

    def strike(self) -> None:
        kind = self._chance.choice(self._kinds)
        self.counts[kind.__name__] += 1
        kind()

    def undo_due(self, everything: bool = False) -> None:
        now = time.monotonic()
        due = [undo for at, undo in self._pending if everything or at <= now]
        self._pending = [(at, undo) for at, undo in self._pending if not (everything or at <= now)]
        for undo in due:
            undo()

    def _later(self, least: float, most: float, undo: Callable[[], None]) -> None:
        self._pending.append((time.monotonic() + self._chance.uniform(least, most), undo))

    def _host(self) -> int:
        return self._chance.randint(1, WORKERS)

    def _two(self) -> tuple[int, int]:
        one, other = self._chance.sample(range(1, WORKERS + 1), 2)
        return one, other

    # ---- workers

    def kill(self) -> None:
        self._job.signal_worker(self._host(), signal.SIGKILL)

    def kill_two(self) -> None:
        for host in self._two():
            self._job.signal_worker(host, signal.SIGKILL)

    def freeze(self) -> None:
        host = self._host()
        self._job.signal_worker(host, signal.SIGSTOP)
        self._later(0.3, 8.0, lambda: self._job.signal_worker(host, signal.SIGCONT))

    def terminate(self) -> None:
        self._job.signal_worker(self._host(), signal.SIGTERM)

    # ---- operators

    def drain(self) -> None:
        active = [one["worker"] for one in self._workers() if one["state"] == "active"]
        if active:
            path = f"/jobs/{NAME}/workers/{self._chance.choice(active)}/drain"
            self._job.rest("POST", path, {"grace_seconds": self._chance.choice([0.5, 5.0, 30.0])})

    def scale(self) -> None:
        self._job.rest("POST", f"/jobs/{NAME}/scale", {"workers": self._chance.randint(1, WORKERS)})

    def pause(self) -> None:
        self._job.rest("POST", f"/jobs/{NAME}/pause")
        self._later(0.1, 3.0, self.resume)

    def resume(self) -> None:
        self._job.rest("POST", f"/jobs/{NAME}/resume")

    def save(self) -> None:
        self._job.rest("POST", f"/jobs/{NAME}/checkpoints")

    def _workers(self) -> list[dict[str, object]]:
        return (self._job.rest("GET", f"/jobs/{NAME}/workers") or {}).get("workers", [])

    # ---- the controller

    def kill_controller(self) -> None:
        if self._controller_is_here:
            self._controller_is_here = False
            self._job.kill_controller()
            self._later(0.0, 8.0, self._start_controller)

    def _start_controller(self) -> None:
        self._job.start_controller()
        self._controller_is_here = True

    def freeze_controller(self) -> None:
        if self._controller_is_here:
            self._controller_is_here = False
            self._job.freeze_controller(True)
            self._later(0.5, 8.0, self._thaw_controller)

    def _thaw_controller(self) -> None:
        self._job.freeze_controller(False)
        self._controller_is_here = True

    # ---- links and disk

    def cut_pair(self) -> None:
        one, other = self._two()
        self._cut(one, other)
        self._cut(other, one)

    def cut_one_way(self) -> None:
        self._cut(*self._two())

    def cut_from_controller(self) -> None:
        self._cut(*self._chance.choice([(0, self._host()), (self._host(), 0)]))

    def _cut(self, source: int, target: int) -> None:
        self._hinder(lambda hosts: hosts.cut(source, target))

    def refuse(self) -> None:
        source, target = self._two()
        self._hinder(lambda hosts: hosts.refuse(source, target))

    def refuse_controller(self) -> None:
        """A firewall between the controller and some hosts: what the living refuse proves nothing."""
        chosen = self._chance.sample(range(1, WORKERS + 1), self._chance.randint(1, WORKERS))
        self._hinder(lambda hosts: [hosts.refuse(0, host) for host in chosen])

    def lose(self) -> None:
        (source, target), percent = self._two(), self._chance.choice([1, 5, 20])
        self._hinder(lambda hosts: hosts.lose(source, target, percent))

    def shape(self) -> None:
        host, kbit = self._host(), self._chance.choice([500, 2_000, 20_000])
        self._hinder(lambda hosts: hosts.shape(host, kbit))

    def _hinder(self, act: Callable[[Hosts], object]) -> None:
        assert isinstance(self._job.hosts, Hosts)
        act(self._job.hosts)
        self._later(1.0, 20.0, self._job.hosts.heal)

    def take_port(self) -> None:
        stranger = self._job.take_port(self._host(), self._chance.choice(MANNERS))
        if stranger is not None:
            self._later(5.0, 30.0, stranger.kill)

    def fill_disk(self) -> None:
        self._job.fill_disk()
        self._later(1.0, 8.0, self._job.free_disk)


def undisturbed(steps: int = STEPS) -> str:
    """The fingerprint of a world of one."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": str(steps), "CHECKPOINTS": ""}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(SCRIPT)], env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=True
        )
    return done.stdout.split("FINGERPRINT ")[1].split()[0]


def round_of(seed: int, stage: int, kinds: Collection[str], hosts: Hosts | Loopback, expected: str) -> str:
    """Empty where it ended as the undisturbed run did, else what is wrong. `kinds`: of faults, empty: all."""
    chance = random.Random(seed)
    began = time.monotonic()
    with Job(hosts, WORKERS, STEPS, PACE, stage) as job:
        faults = Faults(job, chance, kinds)
        wait("the first checkpoint", lambda: job.look().get("last_checkpoint_step"), 120)
        while job.look().get("step", 0) < LAST_FAULT and time.monotonic() - began < END_SECONDS:
            faults.strike()
            pause_until = time.monotonic() + chance.uniform(0.2, 5.0)
            while time.monotonic() < pause_until:
                faults.undo_due()
                job.replace_ended()
                PAUSE.wait(0.1)
        faults.undo_due(everything=True)
        hosts.heal()
        job.free_disk()
        faults.resume()
        job.rest("POST", f"/jobs/{NAME}/scale", {"workers": WORKERS})
        deadline = time.monotonic() + END_SECONDS
        while (phase := job.look().get("phase")) not in ("succeeded", "failed", "cancelled"):
            if time.monotonic() > deadline:
                print(job.story())
                return f"seed {seed}: no end {END_SECONDS:.0f} s after everything was healed; {job.look()}"
            job.replace_ended()
            PAUSE.wait(0.2)
        report = job.report()
        lost = sum(world["lost_steps"] for world in report["generations"])
        print(
            f"seed {seed}, stage {stage}: {phase} at step {report['steps']}, {len(report['generations'])} worlds, "
            f"{lost} steps gone back, {time.monotonic() - began:.0f} s; {dict(faults.counts)}",
            flush=True,
        )
        if phase == "succeeded" and report["fingerprint"] == expected:
            return ""
        print(job.story())
        return f"seed {seed}: {phase}, fingerprint {report['fingerprint']}, expected {expected}"


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no controller is left behind
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=60.0, help="no round begins after so many")
    arguments.add_argument("--rounds", type=int, default=1_000_000, help="at most so many")
    arguments.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments.add_argument("--stage", type=int, choices=STAGES, help="of ZeRO (default: each in turn)")
    arguments.add_argument("--kinds", nargs="+", default=(), metavar="KIND", help="of faults, by name (default: all)")
    arguments.add_argument("--one-host", action="store_true", help="all workers on one, which has no links to hinder")
    given = arguments.parse_args()
    has_links = Hosts.can_be_had() and not given.one_host
    end = time.monotonic() + 60 * given.minutes
    expected = undisturbed()
    if not has_links:
        print("not root, no `ip` and `nft`, or one host: no links are cut and no disk is filled", flush=True)
    wrong, rounds = [], 0
    while time.monotonic() < end and rounds < given.rounds:
        with Hosts(WORKERS) if has_links else Loopback() as hosts:
            seed = given.seed + rounds
            stage = STAGES[seed % len(STAGES)] if given.stage is None else given.stage
            found = round_of(seed, stage, given.kinds, hosts, expected)
        rounds += 1
        if found:
            wrong.append(found)
            print(found, flush=True)
    print(f"{rounds - len(wrong)} of {rounds} rounds ended with the undisturbed fingerprint")
    return 1 if wrong or not rounds else 0


if __name__ == "__main__":
    sys.exit(main())
