"""The rules of a step that bits depend on, on real engines in one process (docs/rules.md lists them).

Each test fails when its rule is broken: it was tried.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from crew import Crew, Task, Worker, undisturbed
from integration.scripts import optimizer_of
from rule import Edit, holds, rule
from shoal.blocks.flat import TAKEN_BYTES, adopt, empty_flats, lay_out_model, trainable
from shoal.blocks.values import WholeValues
from shoal.core.layout import Bucket, Layout
from shoal.exchange.finite import subtree_sums
from shoal.exchange.traffic import HANDED
from shoal.group.group import GATHER_TAG
from shoal.offload.state_place import StatePlace, held_blocks
from shoal.optim.twin import SIZES
from shoal.process.host_memory import tensor_bytes
from shoal.state.training_state import TrainingState
from shoal.training.engine import Engine
from shoal_controller.core.machine.durable import Standing
from shoal_protos.errors import UserError
from shoal_protos.runs import Runs, every
from torch import nn

TASK = Task({"max_steps": 6})


# ---- arithmetic


@pytest.fixture(params=[1, TAKEN_BYTES], ids=["taken", "cleared"])
def first_gradients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all parameters here are large, or small."""
    monkeypatch.setattr("shoal.blocks.flat.TAKEN_BYTES", request.param)


@rule(
    "The first gradient of a lane is added to zeros, or taken from its parameter as 0 + g, whatever lay in the "
    "copy before; later ones are added to it, in views that are put back before every backward; a parameter "
    "without one has zeros. `zero_grad()` drops the views, and a gradient that autograd assigns instead of "
    "adding can be −0.0",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.training.lane_loop", "        state.sums.live.put_back(state.parameters)\n", ""),
        Edit("shoal.blocks.flat", "        torch.add(gradient, 0.0, out=view)\n", "        view.copy_(gradient)\n"),
        Edit("shoal.blocks.flat", "            put_first(gradient, view)\n", "            view.add_(gradient)\n"),
        Edit("shoal.blocks.lane_sums", "        self.live.complete()\n        while", "        while"),
        Edit("shoal.blocks.lane_sums", "        self.live.begin()\n", ""),
    ],
)
@pytest.mark.usefixtures("first_gradients")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loop_that_drops_every_gradient_gets_the_same_bits(micro_batches: int) -> None:
    options = {"max_steps": 3, "micro_batches_per_lane": micro_batches}

    def zero_grad(engine: Engine) -> None:
        engine.module.zero_grad(set_to_none=True)
        assert engine.context.state.record is None or engine.context.state.record.norm, "there are no gradients"

    assert undisturbed(Task(options, in_loop=zero_grad)) == undisturbed(Task(options))


@holds("The first gradient of a lane is added")
def test_large_and_small_gradients_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_steps": 3, "micro_batches_per_lane": 2}
    cleared = undisturbed(Task(options))
    monkeypatch.setattr("shoal.blocks.flat.TAKEN_BYTES", 1)
    assert undisturbed(Task(options)) == cleared


@holds("The first gradient of a lane is added")
def test_what_lay_in_a_gradient_copy_before_a_lane_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.blocks.flat.TAKEN_BYTES", 1)

    def poison(engine: Engine) -> None:
        for view in engine.context.state.sums.live._views:
            view.data.fill_(torch.nan)  # as if it had been there: unseen

    assert undisturbed(Task({"max_steps": 3}, in_loop=poison)) == undisturbed(Task({"max_steps": 3}))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@rule(
    "The norm sums rows of 4,096 elements: longer rows give other bits with two threads",
    "Arithmetic and layout",
    broken_by=Edit("shoal.exchange.finite", "ROW = 4_096", "ROW = 8_192"),
)
@pytest.mark.parametrize("block", [1 << 16, 1 << 18])
def test_the_norm_has_the_same_bits_at_1_2_and_4_threads_however_large_a_block_is(block: int) -> None:
    blocks = 32
    layout = Layout(block, (Bucket(0, 0, torch.float32, (), blocks, block * blocks),))
    gradients = [torch.randn(block * blocks, generator=torch.Generator().manual_seed(0))]
    found = []
    for count in (1, 2, 4):
        with threads(count):
            whole = subtree_sums(WholeValues(layout, gradients), every(blocks), layout)
            alone = [
                subtree_sums(WholeValues(layout, gradients), Runs.of([number]), layout) for number in range(blocks)
            ]
        found.append(torch.cat([whole, *alone]).tolist())
    assert found[0] == found[1] == found[2]


@holds("The norm sums rows of")
def test_the_norm_sums_rows_of_4096_elements_and_then_pairs() -> None:
    """Rows of another length give other bits, and so another fingerprint of every run that clips."""
    blocks, block = 4, 16_384
    layout = Layout(block, (Bucket(0, 0, torch.float32, (), blocks, block * blocks),))
    gradient = torch.randn(block * blocks, generator=torch.Generator().manual_seed(0))

    def summed(row: int) -> float:
        sums = [float(part.pow(2).sum().double()) for part in gradient.view(-1, row)]
        while len(sums) > 1:
            sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
        return sums[0]

    assert subtree_sums(WholeValues(layout, [gradient]), every(blocks), layout).tolist() == [summed(4096)]
    assert len({summed(row) for row in (2048, 4096, 8192, 16_384)}) == 4


@rule(
    "An optimizer's kernel runs on whole blocks: a fused kernel gives other bits on other slices",
    "Arithmetic and layout",
    broken_by=Edit("shoal.core.layout", "SMALLEST_BLOCK = 4_096", "SMALLEST_BLOCK = 4_099"),
)
def test_a_fused_kernel_on_the_blocks_of_two_holders_gives_the_bits_of_the_whole_tensor() -> None:
    """On slices that are cut elsewhere, one update in some hundreds of a slice's last elements comes out otherwise."""
    generator, size = torch.Generator().manual_seed(0), 256 * 4096
    value = torch.randn(size, generator=generator)
    mine, theirs = nn.Module(), nn.Module()
    mine.weight, theirs.weight = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    optimizer, plain = (torch.optim.AdamW(module.parameters(), fused=True) for module in (mine, theirs))
    layout, parameters = lay_out_model(trainable(mine, optimizer))
    flats, gradients = adopt(layout, parameters), empty_flats(layout)
    holders = [
        held_blocks(StatePlace(), layout, optimizer, WholeValues(layout, flats), {"weight": mine.weight})
        for _ in range(2)
    ]
    for rank, holder in enumerate(holders):
        holder.hold(Runs.of(range(rank, layout.blocks, 2)))
    for _ in range(20):
        theirs.weight.grad = torch.randn(size, generator=generator)
        gradients[0][:size].copy_(theirs.weight.grad)
        for holder in holders:
            holder.apply(WholeValues(layout, gradients), 1.0)
        plain.step()
    assert torch.equal(mine.weight, theirs.weight)


@rule(
    "A worker's hello contains its numeric identity",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.training.start",
        "updates_on_host=config.updates_on_host, in_cells=config.cell.processes > 1\n        ),",
        "updates_on_host=config.updates_on_host, in_cells=config.cell.processes > 1, environ={}\n        ),",
    ),
)
def test_a_worker_whose_kernels_are_steered_otherwise_says_so_in_its_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    def steered() -> nn.Module:
        monkeypatch.setenv("MKL_CBWR", "AVX2")
        return TASK.model()

    with Crew("ab", TASK) as crew:
        stranger = crew.add("c", replace(TASK, model=steered))
        crew.until("its end", lambda: not stranger.alive)
        assert "another numeric identity: MKL_CBWR is AVX2, the job's is not set" in stranger.failure


# ---- what is there before the vote, and what comes after it


def everything(state: TrainingState) -> str:
    """Digest of all that a commit or a hand-out writes."""
    total = hashlib.sha256(str(state.step).encode())
    tensors = [*state.weights.flats, *state.buffers.committed.values()]
    tensors += [value for _, kept in sorted(state.held.home.states(state.held.runs).items()) for value in kept.values()]
    for tensor in tensors:
        total.update(tensor_bytes(tensor))
    return total.hexdigest()


@rule(
    "Every member has the next step's buffers before it votes",
    "Arithmetic and layout",
    broken_by=Edit("shoal.training.step", "        self._exchange_buffers()\n", ""),
)
def test_every_member_has_the_next_buffers_before_it_votes() -> None:
    entered: dict[int, list[dict[str, list[float]]]] = {}

    def look(worker: Worker, point: str, step: int) -> None:
        if point == "vote" and not worker.engine.context.is_over:
            pending = worker.engine.context.state.buffers.pending
            entered.setdefault(step, []).append({name: value.flatten().tolist() for name, value in pending.items()})

    with Crew("abc", TASK) as crew:
        crew.watchers.append(look)
        crew.finish()
    assert sorted(entered) == [1, 2, 3, 4, 5, 6]
    for buffers in entered.values():
        assert len(buffers) == 3 and buffers[0] and buffers.count(buffers[0]) == 3


@rule(
    "Nothing that writes parameters, optimizer state or the next pending gradients is posted or run before the "
    "vote has passed",
    "A step",
    broken_by=Edit(
        "shoal.training.step",
        "        record = self._pass_vote(reduction",
        "        self._begin_hand_out().finish()\n        record = self._pass_vote(reduction",
    ),
)
def test_nothing_that_a_commit_or_hand_out_writes_is_touched_or_posted_before_the_vote_has_passed() -> None:
    state_of: dict[tuple[str, int], str] = {}
    posts_of: dict[str, int] = {}
    looked = 0

    def look(worker: Worker, point: str, step: int) -> None:
        nonlocal looked
        world = worker.engine.context.world
        if world is None or worker.engine.context.is_over:
            return
        posts = [way[2] for kind, way in world.group.wire.posts if way[kind == "receive"] == world.rank]
        if point == "backward":  # what was handed out after the last step is here
            state_of.setdefault((worker.name, step), everything(worker.engine.context.state))
        elif point == "vote":
            assert posts.count(HANDED) == worker.engine.context.boundaries * handed(worker)
            posts_of[worker.name] = len(posts)
        elif point == "optimizer":
            assert state_of[worker.name, step] == everything(worker.engine.context.state)
            assert set(posts[posts_of[worker.name] :]) == {GATHER_TAG}
            looked += 1

    with Crew("abc", TASK) as crew:
        crew.watchers.append(look)
        crew.finish()
    assert looked == 3 * 6


@rule(
    "A member enters a vote that can decide only after waiting for everything that it posted: the last hand-out's "
    "sends, sends to mirrors, fills",
    "A step",
    broken_by=[
        Edit(
            "shoal.exchange.canonical",
            "works += [work for one in self._leaving for work, _ in self._flight[one].sends]",
            "works += []",
        ),
        Edit(
            "shoal.training.step",
            "        wait_for(sends, self._world.group)\n        record = self._pass_vote(reduction",
            "        record = self._pass_vote(reduction",
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, {"shoal": {"fill_bytes_per_step": 100_000}}], ids=["plain", "fills"])
def test_who_enters_a_vote_has_waited_for_all_that_it_posted(options: dict[str, Any]) -> None:
    looked, filled = 0, 0

    def look(worker: Worker, point: str, _: int) -> None:
        nonlocal looked, filled
        world = worker.engine.context.world
        if point == "vote" and world is not None:
            assert not world.group.unwaited
            looked += 1
            filled += bool(world.plan.fill_slice(worker.engine.context.boundaries))

    with Crew("abc", Task({"max_steps": 12, **options})) as crew:
        crew.watchers.append(look)
        crew.train_to(2)
        crew.kill("b")
        crew.finish()
    assert looked > 20
    assert filled


def handed(worker: Worker) -> int:
    """Messages of one hand-out that this member sends and receives."""
    world = worker.engine.context.world
    assert world is not None
    flow = world.traffic.handed(0)
    return sum(map(len, (*flow.sends, *flow.receives)))


# ---- numbers


def test_a_report_of_several_numbers_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match=r"engine.report got accuracy of shape \(3,\); expected one number"):
        undisturbed(replace(TASK, in_loop=lambda engine: engine.report(accuracy=torch.ones(3))))


# ---- hyper-parameters and the optimizer


@rule(
    "Hyper-parameters that differ between members fail the job, and the error names group and key",
    "A step",
    broken_by=Edit("shoal.guards.agreed_values", "    if len(set(record.hypers)) <= 1:\n", "    if True:\n"),
)
@pytest.mark.parametrize("note", ["short", "long " * 10_000])
def test_hyper_parameters_that_differ_fail_the_job_naming_group_and_key(note: str) -> None:
    def with_a_note(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = optimizer_of(model)
        for group in optimizer.param_groups:
            group["a note of the script's"] = note
        return optimizer

    def other_rate(engine: Engine) -> None:
        if engine.global_step == 2:
            engine.context.state.optimizer.param_groups[1]["lr"] = 0.5

    task = replace(TASK, optimizer=with_a_note)
    with Crew("abc", task, {"c": replace(task, in_loop=other_rate)}) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed"
        assert "the hyper-parameters of rank 2 differ from rank 0's at step 3" in crew.job.durable.reason
        assert "lr of optimizer group 1 is 0.5 here and 0.003 there" in crew.job.durable.reason


FEW = sum(SIZES)
"""Of a trial."""


class Failing(torch.optim.AdamW):
    """Where it `fails`, its third update is torn: one group is updated, the other is not. In a trial it does
    not: what all members leave alone would be another then.
    """

    fails = False
    updates = 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        if self.fails and self.updates == 3 and sum(one.numel() for one in self.param_groups[0]["params"]) > FEW:
            self.param_groups[0]["params"][0].add_(1.0)
            raise ArithmeticError("no more")
        return super().step(closure)


def failing(model: nn.Module) -> torch.optim.Optimizer:
    return Failing(optimizer_of(model).param_groups)


def failing_here(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Failing(optimizer_of(model).param_groups)
    optimizer.fails = True
    return optimizer


def stubborn_step(engine: Engine) -> None:
    try:
        engine.step()
    except ArithmeticError:
        return  # a user's loop that swallows every error


@holds("A worker whose optimizer raises")
def test_a_script_that_swallows_the_error_of_its_optimizer_cannot_go_on_with_torn_state() -> None:
    with pytest.raises(UserError, match="left the job because its update failed: ArithmeticError: no more"):
        undisturbed(replace(TASK, optimizer=failing_here, step=stubborn_step))


@rule(
    "A worker whose optimizer raises counts as dead, whatever its script does with the error",
    "A step",
    broken_by=Edit("shoal.training.step", "            self._torn, context.leaving = result.failure, True\n", ""),
)
@pytest.mark.parametrize("step", [Engine.step, stubborn_step])
def test_a_worker_whose_optimizer_fails_counts_as_dead_whatever_its_script_does_then(step: Any) -> None:
    task = replace(TASK, optimizer=failing)
    with Crew("abc", task, {"c": replace(task, optimizer=failing_here, step=step)}) as crew:
        torn = crew.workers["c"]
        assert crew.finish() == undisturbed(task)
        assert crew.job.durable.roster["c"].standing is Standing.DEAD
        assert "ArithmeticError: no more" in crew.job.durable.roster["c"].why
        assert torn.failure and torn.link.inventories[1:] == []
        assert [world.lost_steps for world in crew.job.durable.history] == [0] * len(crew.job.durable.history)
