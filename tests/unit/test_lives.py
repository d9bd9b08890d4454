"""Whatever happens to a job, it ends with the bits of one that nothing happened to: lives drawn from seeds.

Real engines in one process and the real job machine. `SHOAL_LIVES=500 pytest tests/unit/test_lives.py` tries more; a
life that ends otherwise tells what it was.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from crew import Crew, Task, Worker, undisturbed
from shoal.process.faults import POINTS
from shoal_protos.acts import DrainWorker, Pause, Resume
from tiers import check

pytestmark = check("starts processes")

LIVES = int(os.environ.get("SHOAL_LIVES", "4"))
MOST_WORKERS = 5
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Life:
    """One job and what befalls it. Who is killed is killed while every block has its copies."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        one_of = self.chance.choice
        self.task = Task(
            {
                "max_steps": one_of((14, 24)), "lanes": one_of((4, 5, 8)), "stage": one_of((0, 1, 1)),
                "mirrors": one_of((1, 1, 2)), "micro_batches_per_lane": one_of((1, 1, 2)),
                "shoal": {"fill_bytes_per_step": one_of((0, 50_000, 200_000))},
            }
        )  # fmt: skip
        self.names = iter(LETTERS)
        self.first = "".join(next(self.names) for _ in range(one_of((1, 2, 3, 3, 4))))
        self.log = [f"seed {seed}: {self.task.options}, {self.first} at first"]
        self.paused = False

    def live(self, crew: Crew) -> str:
        """The fingerprint at its end."""
        crew.train_to(1)
        for _ in range(self.chance.randint(1, 6)):
            if crew.allowed < self.task.options["max_steps"] - 2 and not crew.job.durable.phase.is_over:
                getattr(self, self.chance.choice(("train", "kill", "strike", "strike", "come", "drain", "pause")))(crew)
        if self.paused:
            crew.request(Resume())
        return crew.finish()

    def train(self, crew: Crew) -> None:
        if not self.paused:
            crew.train_to(crew.allowed + self.chance.randint(1, 2))
            self.log.append(f"trains to {crew.allowed}")

    def come(self, crew: Crew) -> None:
        if len([worker for worker in crew.workers.values() if worker.alive]) < MOST_WORKERS:
            self.log.append(f"{crew.add(next(self.names)).name} comes")

    def kill(self, crew: Crew) -> None:
        victim = self._dispensable(crew)
        if victim is not None:
            self.log.append(f"{victim.name} is killed")
            crew.kill(victim.name)

    def strike(self, crew: Crew) -> None:
        """It dies at a point of the coming step, or of a later change."""
        victim = self._dispensable(crew)
        if victim is not None:
            point = self.chance.choice(POINTS)
            self.log.append(f"{victim.name} dies at {point} from step {crew.allowed + 1} on")
            crew.plant(victim.name, crew.allowed + 1, point)
            crew.train_to(crew.allowed + 1)

    def drain(self, crew: Crew) -> None:
        victim = self._dispensable(crew)
        if victim is not None:
            self.log.append(f"{victim.name} is drained")
            crew.request(DrainWorker(victim.link.worker))

    def pause(self, crew: Crew) -> None:
        if self.paused or crew.at_rest():
            crew.request(Resume() if self.paused else Pause())
            self.paused = not self.paused
            self.log.append("paused" if self.paused else "resumed")

    def _dispensable(self, crew: Crew) -> Worker | None:
        """Somebody whose blocks all have another copy; nobody where another one may go too."""
        members, roster = crew.members(), crew.job.durable.roster
        going = any(roster[worker.link.worker].leaving or worker.planned for worker in members)
        if self.paused or going or len(members) < 2 or not crew.at_rest():
            return None
        return self.chance.choice(members)


@pytest.mark.parametrize("seed", range(LIVES))
def test_any_life_ends_with_the_bits_of_an_undisturbed_one(seed: int) -> None:
    life = Life(seed)
    try:
        with Crew(life.first, life.task) as crew:
            assert life.live(crew) == undisturbed(life.task)
            assert [world.lost_steps for world in crew.job.durable.history if world.lost_steps] == []
            assert [worker.failure for worker in crew.workers.values() if worker.failure] == []
    except AssertionError as error:
        error.add_note("\n".join(life.log))
        raise
