"""Stage 2: the same bits as stage 1 through losses anywhere in a round, joins, drains, standbys, skips and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from integration.scripts import Model
from matrices import shortened
from reference import reference
from rule import Edit, holds, rule
from shoal.blocks.shard_sums import Leaves, ShardSums
from shoal.core.laying_out import lay_out
from shoal.core.layout import Trainable
from shoal.guards.write_guards import TakenGradient
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
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


@holds("Where gradients are sharded a broken")
@pytest.mark.parametrize(
    "point",
    shortened(
        ["forward", "backward", "exchange", "mirror", "fill", "vote", "optimizer", "hand_out", "prepare", "begin"],
        *("exchange", "vote", "prepare"),
    ),
)
@pytest.mark.parametrize("victim", shortened(["a", "c"], "a"))
def test_a_loss_anywhere_in_a_step_costs_this_step_at_most_and_no_bit(point: str, victim: str) -> None:
    task = Task(options())
    with Crew("abc", task) as crew:
        crew.plant(victim, 3, point)
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == reference(Task(options(stage=1)))


@rule(
    "Where gradients are sharded a broken step is run again from its first lane, and its reduction is forgotten "
    "with its world: what was sent lies with owners that may be dead",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal.training.resize",
            "        keeps_lanes = at_same_step and self._step.reducing.keeps_lanes\n",
            "        keeps_lanes = at_same_step\n",
        ),
        Edit("shoal.training.resize", "        self._step.reducing.forget()\n", ""),
    ],
)
@pytest.mark.parametrize("point", ["forward", "backward"])
@pytest.mark.parametrize("lane", shortened(range(LANES), LANES - 1))
def test_a_loss_at_any_lane_of_a_step_runs_the_whole_step_again(lane: int, point: str) -> None:
    """A worker of two has three lanes, the other two: what the dead one was sent of them is lost."""

    def die(engine: Engine) -> None:
        if engine.global_step == 3 and engine.generation == 1 and engine.context.loop.lane == lane:
            me = engine.context.link.worker
            crew.plant(me, 4, point) if point == "backward" else crew.plant("b" if me == "a" else "a", 4, point)

    task = Task(options(), in_loop=die)
    with Crew("ab", task) as crew:
        crew.train_to(3)
        assert crew.finish() == reference(Task(options(stage=1)))


def test_two_losses_one_during_the_recovery_from_the_other() -> None:
    task = Task(options(mirrors=2))
    with Crew("abcd", task) as crew:
        crew.plant("d", 3, "exchange")
        crew.plant("c", 3, "promote")
        assert crew.finish() == reference(Task(options(stage=1)))


def test_a_drained_worker_takes_no_gradient_with_it() -> None:
    task = Task(options())
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("b"))
        assert crew.finish() == reference(Task(options(stage=1)))


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
        assert crew.finish() == reference(Task(options(stage=1)))


def test_gradients_are_gone_after_a_backward_and_reduced_ones_are_of_own_blocks_only() -> None:
    seen: list[bool] = []

    def look(engine: Engine) -> object:
        sums = engine.context.state.sums
        assert isinstance(sums, ShardSums)
        if engine.global_step == 4:
            seen.append(sums.live._flats == {})
            seen.append(all(isinstance(p.grad, TakenGradient) for p in engine.context.state.parameters))
            seen.append(sums.reduced.bytes < 0.6 * engine.context.state.flats.bytes)
        return engine.step()

    with Crew("abcd", Task(options(mirrors=1, lanes=4), step=look)) as crew:
        crew.finish()
    assert seen and all(seen)


class Wide(torch.nn.Module):
    """One parameter, which fills its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 64))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.weight[tokens] - 0.01 * targets.unsqueeze(-1)).square().mean()


class Tiny(torch.nn.Module):
    """The gradients of two lanes add up to what is below the least normal number: flushed, it is −0.0."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_flush_denormal(True)
        self.weight = torch.nn.Parameter(torch.full((100,), -0.0))
        self.calls = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.weight * (-1.5e-38 if self.calls % 2 else 1.3e-38)).sum()


def test_sums_that_are_flushed_to_zero_have_the_same_bits_in_all_stages() -> None:
    found = set()
    for stage in range(4):
        task = Task(
            options(stage=stage, lanes=2, gradient_clipping=0),
            model=Tiny,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        )
        try:
            found.add(undisturbed(task))
        finally:
            torch.set_flush_denormal(False)
    assert len(found) == 1


@holds("Sharded gradients are added up")
@pytest.mark.parametrize("shape", [(4, 4_096), (3, 4_000)])
def test_a_gradient_that_fills_a_bucket_is_its_memory_and_another_is_copied(shape: tuple[int, int]) -> None:
    leaves = Leaves(lay_out([Trainable("p", shape, torch.float32, 0)]), are_narrow=True)
    gradient = torch.randn(shape)
    place, values = gradient.data_ptr(), gradient.flatten().clone()
    leaves.add(0, gradient)
    del gradient
    leaves.complete(0)
    found = leaves.range(0, 0, values.numel())
    fills = shape == (4, 4_096)
    assert (found.data_ptr() == place) is fills
    assert torch.equal(found, values)
    leaves.release(0)
    assert (leaves.bytes == 0) is fills, "memory that is a gradient's goes with it; other memory serves the next bucket"


@holds("Sharded gradients are added up")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("keeps_storage", [False, True])
def test_a_gradient_that_a_hook_has_kept_stays_as_it_was(micro_batches: int, keeps_storage: bool) -> None:
    kept: list[tuple[Any, torch.Tensor]] = []

    def keep(one: torch.Tensor) -> None:
        kept.append((one.untyped_storage() if keeps_storage else one, one.clone()))

    task = Task(
        options(micro_batches_per_lane=micro_batches),
        model=Wide,
        prepare=lambda engine: engine.module.weight.register_hook(keep),
    )
    right = undisturbed(Task(options(stage=0, micro_batches_per_lane=micro_batches), model=Wide))
    with Crew("ab", task) as crew:
        assert crew.finish() == right
    assert len(kept) >= STEPS * LANES * micro_batches
    assert all(torch.equal(torch.empty(0).set_(one).view_as(was) if keeps_storage else one, was) for one, was in kept)


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


HALF = {"precision": {"bf16": {"enabled": True}}}


def in_between(action: Callable[[Engine, torch.Tensor], object]) -> Callable[[Engine, Any], None]:
    """A loop that does this between `engine.backward` and `engine.step`."""

    def body(engine: Engine, batch: Any) -> None:
        loss, again = engine.module(**batch), engine.module(**batch)
        engine.backward(loss)
        action(engine, again)
        engine.step()

    return body


@rule(
    "Where gradients were taken already (sharded, or in half precision), whatever a script does with a `.grad` "
    "before `engine.step` is refused: with None there, `clip_grad_norm_` would do nothing and say nothing",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal.guards.write_guards",
            "            parameter.grad = taken\n",
            "            assert taken is not None\n",
        ),
        Edit(
            "shoal.guards.write_guards",
            "        if not all(parameter.grad is None or parameter.grad is taken for parameter, taken in pairs):\n",
            "        if not self._parameters:\n",
        ),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stage": 0, **HALF}], ids=["stage 2", "bf16"])
@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (lambda engine, _: torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0), "`gradient_clipping`"),
        (lambda engine, _: engine.module.up.weight.grad.norm(), "cannot be read or changed .*register_hook"),
        (lambda engine, _: engine.module.zero_grad(set_to_none=False), "cannot be read or changed between"),
        (lambda _, again: again.backward(), "gradients were changed between"),
    ],
    ids=["clip", "norm", "zero", "another backward"],
)
def test_a_gradient_that_has_left_cannot_be_used_in_silence(
    action: Callable[[Engine, torch.Tensor], object], sentence: str, more: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=sentence):
        undisturbed(Task(options(**{"stage": 2, **more}), body=in_between(action)))


def test_a_gradient_that_is_dropped_or_not_there_is_fine() -> None:
    def drop(engine: Engine, _: object) -> None:
        assert engine.module.frozen.grad is None
        engine.module.zero_grad()

    assert undisturbed(Task(options(), body=in_between(drop))) == undisturbed(
        Task(options(stage=0), body=in_between(lambda *_: None))
    )


def fail(parameter: torch.Tensor) -> None:
    pytest.fail("a script's hook has run")


def hook_on(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(fail)
    return model


@rule(
    "A script has no hook on accumulated gradients (`register_post_accumulate_grad_hook`): it would find a "
    "lane's gradient in one world and a sum in another, before it has left or after; it is looked for before it "
    "runs, wherever a gradient is made",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.blocks.flat", "        refuse_hooks(name, parameter, own=0)\n", ""),
        Edit(
            "shoal.training.reducing",
            "            refuse_hooks(self._names[number], parameter, OWN_HOOKS)\n",
            "            pass\n",
        ),
    ],
)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    "task",
    [{"model": lambda: hook_on(Model(0.1, True))}, {"prepare": lambda engine: hook_on(engine.module)}],
    ids=["before initialize", "after it"],
)
def test_a_hook_on_accumulated_gradients_is_refused_by_the_parameters_name(stage: int, task: dict[str, Any]) -> None:
    """It would see a lane's gradient here and a sum of several there."""
    with pytest.raises(UserError, match=r'parameter ".*" has a hook by register_post_accumulate_grad_hook'):
        undisturbed(Task(options(stage=stage), **task))


class Sparse(Model):
    """Some of its gradients are rows of an embedding; tokens come more than once."""

    def __init__(self, dropout: float, buffers: bool) -> None:
        super().__init__(dropout, buffers)
        self.rows = torch.nn.Embedding(256, 16, sparse=True)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets) + self.rows(tokens % 5).square().mean()


@holds("Sharded gradients are added up")
@pytest.mark.parametrize(
    "more", [{}, HALF, {"micro_batches_per_lane": 2}], ids=["float32", "bf16", "two micro-batches"]
)
def test_sparse_gradients_have_the_bits_of_stage_0(more: dict[str, Any]) -> None:
    right = undisturbed(Task(options(stage=0, **more), model=lambda: Sparse(0.1, True)))
    with Crew("abc", Task(options(**more), model=lambda: Sparse(0.1, True))) as crew:
        assert crew.finish() == right


Buffer = torch.Tensor | np.ndarray[Any, Any] | None


class Scaled(torch.autograd.Function):
    """Makes every gradient in one buffer of its own, or returns a parameter as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, buffer: Buffer) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.buffer = buffer
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scale = ctx.saved_tensors
        buffer = torch.from_numpy(ctx.buffer) if isinstance(ctx.buffer, np.ndarray) else ctx.buffer
        made = scale if buffer is None else buffer.copy_((gradient * x).flatten(0, -2).sum(0))
        return gradient * scale, made.view(-1), None


class Reusing(torch.nn.Module):
    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256)
        self.first, self.second = (torch.nn.Parameter(torch.full((64,), value)) for value in (0.5, 2.0))
        self.memory = [buffer]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = torch.tanh(Scaled.apply(self.embedding(tokens), self.first, *self.memory))
        logits = self.head(Scaled.apply(rows, self.second, *self.memory))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@holds("Sharded gradients are added up")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "buffer",
    [lambda: torch.empty(64), lambda: np.empty(64, np.float32), lambda: None],
    ids=["a buffer that is written again", "one of numpy's", "a parameter"],
)
def test_a_gradient_whose_memory_has_other_uses_has_the_bits_of_stage_0(
    buffer: Callable[[], Buffer], stage: int
) -> None:
    """It was read when its bucket was complete: then the buffer had the next gradient, and the parameter no memory."""
    task, right = (Task(options(stage, max_steps=3), model=lambda: Reusing(buffer())) for stage in (stage, 0))
    with Crew("ab", task) as crew:
        assert crew.finish() == undisturbed(right)


def test_a_module_may_be_compiled_while_its_gradients_have_left() -> None:
    def compiled() -> torch.nn.Module:
        torch._dynamo.reset()
        model = Model(0.0, False)
        model.compile(backend="eager")
        return model

    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        with torch.no_grad():
            engine.module(**batch)
        engine.step()

    one, other = (Task(options(stage, max_steps=2), model=compiled, body=body) for stage in (0, 2))
    assert undisturbed(one) == undisturbed(other)
