"""Stage 2: the same bits as stage 1 through losses anywhere in a round, joins, drains, standbys, skips and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from integration.scripts import Model
from shoal.blocks.shard_sums import ShardSums
from shoal.faults import Faults
from shoal.session.alone import AloneLink
from shoal.training.engine import Engine
from shoal_controller.core.machine.events import DrainWorker
from shoal_protos.errors import UserError

STEPS = 7
LANES = 5


def options(stage: int = 2, **more: Any) -> dict[str, Any]:
    return {"max_steps": STEPS, "lanes": LANES, "stage": stage, **more}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_stages_1_and_2_have_the_same_bits_in_every_world(micro_batches: int) -> None:
    right = undisturbed(Task(options(stage=1, micro_batches_per_lane=micro_batches)))
    for workers, mirrors in (("a", 1), ("ab", 0), ("abc", 1), ("abcd", 2)):
        task = Task(options(mirrors=mirrors, micro_batches_per_lane=micro_batches))
        with Crew(workers, task) as crew:
            crew.train_to(2)
            crew.add("e")
            assert crew.finish() == right, (workers, mirrors)


@pytest.mark.parametrize(
    "point", ["forward", "backward", "exchange", "mirror", "fill", "vote", "optimizer", "hand_out", "prepare", "begin"]
)
@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_loss_anywhere_in_a_step_costs_this_step_at_most_and_no_bit(point: str, victim: str) -> None:
    task = Task(options())
    with Crew("abc", task) as crew:
        crew.plant(victim, 3, point)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == undisturbed(Task(options(stage=1)))


@pytest.mark.parametrize("point", ["forward", "backward"])
@pytest.mark.parametrize("lane", range(LANES))
def test_a_loss_at_any_lane_of_a_step_runs_the_whole_step_again(lane: int, point: str) -> None:
    """A worker of two has three lanes, the other two: what the dead one was sent of them is lost."""

    def die(engine: Engine) -> None:
        if engine.global_step == 3 and engine.generation == 1 and engine.context.loop.lane == lane:
            me = engine.context.link.worker
            crew.plant(me, 4, point) if point == "backward" else crew.plant("b" if me == "a" else "a", 4, point)

    task = Task(options(), in_loop=die)
    with Crew("ab", task) as crew:
        crew.train_to(3)
        assert crew.finish() == undisturbed(Task(options(stage=1)))


def test_two_losses_one_during_the_recovery_from_the_other() -> None:
    task = Task(options(mirrors=2))
    with Crew("abcd", task) as crew:
        crew.plant("d", 3, "exchange")
        crew.plant("c", 3, "promote")
        assert crew.finish() == undisturbed(Task(options(stage=1)))


def test_a_drained_worker_takes_no_gradient_with_it() -> None:
    task = Task(options())
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("b"))
        assert crew.finish() == undisturbed(Task(options(stage=1)))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_skipped_micro_batch_counts_as_one_of_zeros(micro_batches: int) -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        if int(batch["tokens"].sum()) % 3 == 0:
            engine.skip()
            return
        engine.backward(loss)
        engine.step()

    right = undisturbed(Task(options(stage=1, micro_batches_per_lane=micro_batches), body=body))
    with Crew("abc", Task(options(micro_batches_per_lane=micro_batches), body=body)) as crew:
        crew.train_to(2)
        crew.kill("b")
        assert crew.finish() == right


class Odd(Model):
    """Calls a layer twice, recomputes another, and leaves one out."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.frozen
        rows = torch.utils.checkpoint.checkpoint(
            lambda x: torch.relu(self.up(x)).flatten(0, 1), hidden, use_reentrant=False
        )
        hidden = hidden + self.down(self.dropout(self.norm(rows))).view_as(hidden)
        hidden = hidden + self.down(torch.relu(self.up(hidden))).view_as(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def test_odd_modules_have_the_same_bits() -> None:
    right = undisturbed(Task(options(stage=0), model=lambda: Odd(0.1, False)))
    with Crew("abc", Task(options(), model=lambda: Odd(0.1, False))) as crew:
        crew.train_to(2)
        crew.plant("c", 4, "backward")
        assert crew.finish() == right


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (0, 2), (2, 0)])
def test_a_checkpoint_of_one_stage_goes_on_in_another(first: int, then: int, tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path), "every_steps": 3}}
    with Crew("abc", Task(options(stage=first, shoal=place, max_steps=3))) as crew:
        crew.finish()
    with Crew("ab", Task(options(stage=then, shoal=place))) as crew:
        assert crew.finish() == undisturbed(Task(options(stage=1)))


def test_gradients_are_gone_after_a_backward_and_reduced_ones_are_of_own_blocks_only() -> None:
    seen: list[bool] = []

    def look(engine: Engine) -> object:
        sums = engine.context.state.sums
        assert isinstance(sums, ShardSums)
        if engine.global_step == 4:
            seen.append(sums.live._flats == {} and all(p.grad is None for p in engine.module.parameters()))
            seen.append(sums.reduced.bytes < 0.6 * engine.context.state.weights.bytes)
        return engine.step()

    with Crew("abcd", Task(options(mirrors=1, lanes=4), step=look)) as crew:
        crew.finish()
    assert seen and all(seen)


def test_a_gradient_that_the_script_puts_there_is_refused() -> None:
    def meddle(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        parameter = engine.module.get_parameter("up.weight")
        parameter.grad = torch.ones_like(parameter)
        engine.step()

    with ONE_AT_A_TIME:
        engine = engine_of(Task(options()), AloneLink(), Faults([]))
        with pytest.raises(UserError, match="gradients were changed between"):
            for batch in engine:
                meddle(engine, batch)
