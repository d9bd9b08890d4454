"""Buffers that a script declares: MoCo's queue, as one process has it that is fed with one lane after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from integration.scripts import Model
from matrices import shortened
from queue_buffers import LENGTH, Queue, declare
from rule import Edit, holds, rule
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from tensor_parallel import CellTask, Parallel, crew_of
from torch import Tensor, nn

STEPS = 5
WARNING = "lanes_differ_in_a_buffer"

Keys = tuple[Tensor, Tensor]  # (batch, WIDTH) and (batch,) int64
Recorded = dict[tuple[int, int, int], Keys]


class Moco(nn.Module):
    """A model that reads its queue in each forward and then writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.memory = Model(0.1, True), Queue()
        self.written: Keys

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        keys = nn.functional.normalize(self.inner.embedding(tokens).mean(dim=1), dim=1)
        loss: Tensor = self.inner(tokens, targets) + (keys @ self.memory.queue.clone()).pow(2).mean()
        self.written = keys.detach().clone(), tokens[:, 0] % 2
        self.memory.put(*self.written)
        return loss


def warned(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Names of the buffers that the log warns of."""
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if WARNING in line]
    return sorted(line["buffer"] for line in lines)


def is_bad(batch: Any) -> bool:
    return int(batch["tokens"].sum()) % 3 == 0


def body_into(recorded: Recorded, skips: bool = False) -> Callable[[Engine, Any], None]:
    """A loop's body that notes which keys which lane writes; `skips`: that gives some micro-batches up."""

    def body(engine: Engine, batch: Any) -> None:
        loop = engine.context.loop
        counts = loop.in_flight and not engine.warming_up
        if counts and engine.global_step % 2 and loop.begins_lane:
            with engine.evaluating():
                engine.module(**batch)  # writes the queue too, and is undone
        loss = engine.module(**batch)
        if skips and is_bad(batch):
            engine.skip()
            return
        assert isinstance(engine.module, Moco)
        if counts:
            recorded[(engine.global_step, *loop.place)] = engine.module.written
        engine.backward(loss)
        engine.step()

    return body


def moco(recorded: Recorded, skips: bool = False, **options: Any) -> Task:
    return Task({"max_steps": STEPS, **options}, model=Moco, prepare=declare, body=body_into(recorded, skips))


def fed(recorded: Recorded) -> dict[str, Tensor]:
    """One process is given the lanes one after the other."""
    queue = Queue()
    for place in sorted(recorded):
        queue.put(*recorded[place])
    return {f"memory.{name}": value for name, value in queue.state_dict().items()}


def check_memory(engine: Engine, recorded: Recorded) -> None:
    committed, expected = engine.context.state.buffers.committed, fed(recorded)
    for name, value in expected.items():
        assert committed[name].dtype == value.dtype and committed[name].equal(value), name


@rule(
    "Rows of a buffer that lanes write are joined as if one process had written them lane after lane, and a sum is "
    "what all lanes have added, in every world",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.exchange.buffer_joins", "            moved += len(at)\n", "            moved += 1\n"),
        Edit("shoal.exchange.buffer_exchange", "for lane in sorted(each)]", "for lane in each]"),
        Edit("shoal.exchange.lane_results", "if name in changed or join.pointer in changed:", "if name in changed:"),
        Edit("shoal.exchange.buffer_joins", 'before if self.kind == "mean" else torch.zeros_like(before)', "before"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("names", shortened(["a", "ab", "abc", "abcd", "abcde"], "ab", "abcde"))
def test_mocos_queue_is_that_of_one_process_in_every_world(names: str, stage: int) -> None:
    recorded: Recorded = {}
    task = moco(recorded, stage=stage, lanes=5)
    with Crew(names, task) as crew:
        digest = crew.finish()
        for worker in crew.workers.values():
            check_memory(worker.engine, recorded)
    assert int(fed(recorded)["memory.seen"]) == 10 * STEPS
    assert digest == undisturbed(task)


@holds("Rows of a buffer that lanes write")
@pytest.mark.parametrize("names", ["a", "abc"])
def test_lanes_of_several_micro_batches_and_skipped_ones_write_what_is_left_of_them(names: str) -> None:
    recorded: Recorded = {}
    task = moco(recorded, skips=True, micro_batches_per_lane=2)
    with Crew(names, task) as crew:
        digest = crew.finish()
        check_memory(crew.workers["a"].engine, recorded)
    assert 0 < len(recorded) < 8 * STEPS, "some, not all, are skipped"
    assert digest == undisturbed(task)


@holds("Rows of a buffer that lanes write")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "point", shortened(["forward", "backward", "exchange", "vote", "in_vote", "optimizer"], "vote")
)
def test_kills_and_joins_change_nothing_of_it(stage: int, point: str) -> None:
    recorded: Recorded = {}
    task = moco(recorded, stage=stage)
    with Crew("abc", task) as crew:
        crew.plant("b", 2, point)
        crew.train_to(2)
        crew.add("d")
        digest = crew.finish()
        for name in "ad":
            check_memory(crew.workers[name].engine, recorded)
    assert digest == undisturbed(task)


@holds("Rows of a buffer that lanes write")
def test_a_job_that_goes_on_from_a_checkpoint_goes_on_with_its_queue(tmp_path: Path) -> None:
    recorded: Recorded = {}
    saves = {"shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}}
    with Crew("ab", moco(recorded, **{**saves, "max_steps": 4})) as crew:
        crew.finish()
    with Crew("abc", moco(recorded, **{**saves, "max_steps": 8})) as crew:
        digest = crew.finish()
        check_memory(crew.workers["a"].engine, recorded)
    assert digest == undisturbed(moco({}, max_steps=8))


class ParallelQueue(Parallel):
    """Each process of a cell has a queue of its own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.memory = Queue()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        keys = self.embedding(tokens).detach().mean(dim=1) + self.group.rank()
        self.memory.put(keys, tokens[:, 0] % 2)
        return loss


@holds("Rows of a buffer that lanes write")
def test_cells_write_what_one_cell_writes_and_a_void_lane_writes_nothing() -> None:
    task, found = CellTask({"max_steps": 4}, model=ParallelQueue, prepare=declare), {}
    for names in ("ab", "abcd"):
        with crew_of(names, task) as crew:
            crew.train_to(1)
            if names == "abcd":
                crew.plant("c", 2, "between")
            found[names] = crew.finish()
            assert all(
                int(worker.engine.module.get_buffer("memory.seen")) == 32
                for worker in crew.workers.values()
                if not worker.killed
            )
    assert found["ab"] == found["abcd"]


# ---- members that declare otherwise


def otherwise(engine: Engine) -> None:
    declare_but(engine, modulo=LENGTH + 1)


def declare_but(engine: Engine, modulo: int) -> None:
    engine.buffer("memory.at", join="sum", modulo=modulo)


@rule(
    "Members that declare other joins of a buffer are refused by its name before a message depends on it, a joiner "
    "before it is a member",
    "A step",
    broken_by=[
        Edit("shoal.exchange.buffer_exchange", "for rank in range(group.size) if not", "for rank in () if not"),
        Edit("shoal.state.training_state", '        self.buffers.joins.check_same(given.get("joins", {}))\n', ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("prepare", "found"),
    [(otherwise, r"sum, modulo 23"), (lambda _: None, "no declaration")],
)
def test_a_member_that_declares_otherwise_is_named_with_the_buffer(prepare: Any, found: str) -> None:
    task = moco({})
    with Crew("abc", task, odd={"b": replace(task, prepare=prepare)}) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed"
        assert f'worker b joins the lanes of buffer "memory.at" by {found}, worker ' in crew.story()
        assert "by sum, modulo 22: engine.buffer has to declare the same on all workers" in crew.story()


@holds("Members that declare other joins")
@pytest.mark.parametrize("job_declares", [True, False])
def test_a_joiner_that_declares_otherwise_is_refused_and_the_others_train_on(job_declares: bool) -> None:
    recorded: Recorded = {}
    with_it = moco(recorded)
    task, odd = (with_it, otherwise) if job_declares else (replace(with_it, prepare=lambda _: None), declare)
    with Crew("ab", task) as crew:
        crew.train_to(1)
        crew.add("c", replace(task, prepare=odd))
        crew.allow(3)
        crew.until("the refusal", lambda: "this script joins the lanes" in crew.workers["c"].failure)
        assert 'of buffer "memory.at" by sum, modulo' in crew.workers["c"].failure
        assert crew.finish() == undisturbed(task)


# ---- what a script may not declare, and what it is told


def test_a_declaration_comes_before_the_loop() -> None:
    with pytest.raises(UserError, match=r"engine\.buffer\('memory\.at', …\) was called in the loop; call it before"):
        undisturbed(replace(moco({}), in_loop=declare, body=None))


def test_a_lane_whose_rows_are_no_part_of_a_ring_is_named_with_the_buffer() -> None:
    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        engine.module.get_buffer("memory.queue").add_(1)
        engine.step()

    sentence = rf'lane 0 changed all {LENGTH} rows, or more rows than there are, in buffer "memory\.queue", which'
    with pytest.raises(UserError, match=sentence):
        undisturbed(replace(moco({}), body=body))


@holds("Rows of a buffer that lanes write")
@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_declared_mean_and_a_declared_value_of_lane_0_are_what_undeclared_ones_are(
    names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def keep(engine: Engine) -> None:
        engine.buffer("memory.queue", join="mean")
        for name in ("labels", "at", "seen"):
            engine.buffer(f"memory.{name}", join="lane0")

    task = moco({})
    with Crew(names, replace(task, prepare=keep)) as crew:
        digest = crew.finish()
    assert not warned(capsys)
    assert digest == undisturbed(replace(task, prepare=lambda _: None))


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_lanes_that_differ_in_an_undeclared_buffer_are_a_warning_by_name_once(
    names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pointer and the count are alike in all lanes, and running statistics are what means are made for."""
    with Crew(names, replace(moco({}), prepare=lambda _: None)) as crew:
        crew.finish()
    assert warned(capsys) == ["memory.labels", "memory.queue"]


def test_nothing_is_warned_of_where_all_is_declared_or_owned_by_a_norm_layer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for task in (moco({}), Task({"max_steps": 3})):
        with Crew("ab", task) as crew:
            crew.finish()
    assert not warned(capsys)


def test_lanes_that_all_put_a_nan_into_a_buffer_do_not_differ(capsys: pytest.CaptureFixture[str]) -> None:
    class Spoilt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(0.1, True)
            self.register_buffer("range", torch.zeros(2))

        def forward(self, tokens: Tensor, targets: Tensor) -> Any:
            self.get_buffer("range").fill_(float("nan"))
            return self.inner(tokens, targets)

    with Crew("ab", Task({"max_steps": 2}, Spoilt)) as crew:
        crew.finish()
    assert not warned(capsys)


def test_a_sum_of_a_half_is_made_in_float32_and_has_the_same_bits_in_every_world() -> None:
    class Loads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Task().model()
            self.register_buffer("loads", torch.zeros(3, dtype=torch.float16))

        def forward(self, tokens: Tensor, targets: Tensor) -> Any:
            with torch.no_grad():
                self.get_buffer("loads")[int(tokens.sum()) % 3] += 0.1
            return self.inner(tokens, targets)

    task = Task({"max_steps": 3}, model=Loads, prepare=lambda engine: engine.buffer("loads", join="sum"))
    with Crew("abc", task) as crew:
        assert crew.finish() == undisturbed(task)
        loads = crew.workers["a"].engine.context.state.buffers.committed["loads"]
    assert loads.dtype == torch.float16 and abs(float(loads.sum()) - 1.2) < 0.01


@holds("Rows of a buffer that lanes write")
@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_lane_that_leaves_a_sum_alone_adds_nothing_to_it(names: str) -> None:
    class Seldom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(0.1, True)
            self.register_buffer("count", torch.tensor(5))

        def forward(self, tokens: Tensor, targets: Tensor) -> Any:
            return self.inner(tokens, targets)

    counted: set[tuple[int, int, int]] = set()

    def count(engine: Engine) -> None:
        loop = engine.context.loop
        if loop.in_flight and not engine.warming_up and (loop.place[0] + engine.global_step) % 4 == 1:
            engine.module.get_buffer("count").add_(1)
            counted.add((engine.global_step, *loop.place))

    declared = Task({"max_steps": 4}, Seldom, prepare=lambda engine: engine.buffer("count", join="sum"), in_loop=count)
    with Crew(names, declared) as crew:
        assert crew.finish() == undisturbed(declared)
        assert int(crew.workers["a"].engine.context.state.buffers.committed["count"]) == 5 + len(counted)


def test_an_engine_alone_takes_declarations_as_a_world_does() -> None:
    recorded: Recorded = {}
    task = moco(recorded)
    with ONE_AT_A_TIME:
        engine = engine_of(task, AloneLink(), Faults([]))
        declare(engine)
        assert task.body is not None
        for batch in engine:
            task.body(engine, batch)
    check_memory(engine, recorded)
