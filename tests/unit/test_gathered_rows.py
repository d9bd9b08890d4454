"""Rows that an evaluation gathers: the same on all members, in the samples' order, with the bits of a world of one."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, train
from hypothesis import given
from hypothesis import strategies as st
from integration.scripts import Samples
from lightning_utilities.core.imports import RequirementCache
from matrices import shortened
from rule import Edit, holds, rule
from shoal.core.tree import MOST_PARTS, add, total
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training import gathered_rows
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from torch import Tensor

DATA = Samples(22)
"""The last micro-batches of some lanes are short."""
OPTIONS = {"max_steps": 4, "dropout": 0.0}


def evaluate(engine: Engine) -> None:
    with engine.evaluating():
        for batch in engine.shard(DATA):
            loss = engine.module(**batch)
            engine.report(loss=loss)
            engine.gather(tokens=batch["tokens"][:, 0], twice=2.0 * batch["targets"].double())


def step_and_evaluate(engine: Engine) -> None:
    if engine.step() and engine.global_step in (2, 4):
        evaluate(engine)


def alone(step: Any = step_and_evaluate) -> Engine:
    with ONE_AT_A_TIME:
        task = Task(OPTIONS, step=step)
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        return engine


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@rule(
    "Rows that an evaluation gathers are those of its newest evaluation, one for each sample, in the order of "
    "the samples",
    "Data, evaluations and the doors",
    broken_by=[
        Edit("shoal.training.gathered_rows", "for sample in sorted(places)]", "for sample in places]"),
        Edit("shoal.training.gathered_rows", "            if step == newest and size\n", "            if size\n"),
        Edit(
            "shoal.training.gathered_rows",
            "    order = torch.tensor([places[sample] for sample in sorted(places)], dtype=torch.int64)\n",
            "    order = torch.argsort(joined[SAMPLE], stable=True) if places else joined[SAMPLE]\n",
        ),
        Edit(
            "shoal.training.gathered_rows",
            "            self._step, self._mine, self._bytes = self._context.state.step, [], 0\n",
            "            self._step = self._context.state.step\n",
        ),
    ],
)
@rule(
    "Rows that no exchange has carried are exchanged at the boundary after the next vote, again where the world "
    "broke, and after the last step too",
    "Data, evaluations and the doors",
    broken_by=[
        Edit("shoal.training.evaluation", " or self.rows.is_pending)", ")"),
        Edit("shoal.training.requests", "        if self._rows.is_pending:\n            mine.append(GATHER)\n", ""),
    ],
)
@holds("The sum of an evaluation is")
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_all_members_get_the_rows_and_numbers_of_a_world_of_one(names: str) -> None:
    """Those of the evaluation after the last step too."""
    right = alone()
    assert right.gathers["sample"].tolist() == list(range(22)) and right.gathers["twice"].shape == (22, 16)
    seen: dict[int, dict[str, Tensor]] = {}
    task = Task(
        OPTIONS, step=step_and_evaluate, prepare=lambda e: e.on_step(lambda e: seen.update({e.global_step: e.gathers}))
    )
    with Crew(names, task) as crew:
        crew.finish()
        for worker in crew.workers.values():
            assert same(worker.engine.gathers, right.gathers)
            assert worker.engine.reports == right.reports
    assert [step for step in seen if seen[step]] == [3, 4], "callbacks of the next step find them"


@holds("Rows that no exchange has carried")
def test_rows_arrive_though_no_step_and_no_number_follows() -> None:
    engine = alone(Engine.step)
    with engine.evaluating():
        for batch in engine.shard(DATA):
            engine.gather(tokens=batch["tokens"][:, 0])
    assert engine.gathers["sample"].tolist() == list(range(22)) and engine.reports == {}


@holds("Rows that no exchange has carried")
@pytest.mark.parametrize("point", shortened(["vote", "in_vote", "hand_out"], "in_vote"))
def test_rows_of_survivors_are_not_lost_where_the_world_breaks(point: str) -> None:
    """And all have the same ones, those of the dead if they were exchanged."""

    def step(engine: Engine) -> None:
        if engine.step() and engine.global_step == 2:
            evaluate(engine)

    with Crew("abc", Task({**OPTIONS, "max_steps": 5}, step=step)) as crew:
        crew.train_to(2)
        crew.plant("c", 3, point)
        crew.finish()
        found = [worker.engine.gathers for worker in crew.members()]
    assert all(same(one, found[0]) for one in found)
    undisturbed = alone(step).gathers
    right = dict(zip(undisturbed["sample"].tolist(), undisturbed["tokens"].tolist(), strict=True))
    mine = dict(zip(found[0]["sample"].tolist(), found[0]["tokens"].tolist(), strict=True))
    assert len(mine) >= 10 and mine.items() <= right.items()


@holds("Rows that an evaluation gathers are")
def test_rows_of_an_older_evaluation_and_of_a_lane_that_ran_twice_count_once() -> None:
    def step(engine: Engine) -> None:
        if not engine.step() or engine.global_step not in (2, 4):
            return
        with engine.evaluating():
            for turn in range(2):
                for batch in engine.shard(DATA):
                    rows = batch["tokens"][:, 0] * 10 + turn
                    if engine.global_step == 2:
                        engine.gather(first=rows)
                    elif engine.rank == 0:
                        engine.gather(second=rows)

    with Crew("ab", Task(OPTIONS, step=step)) as crew:
        crew.finish()
        one, other = (worker.engine.gathers for worker in crew.workers.values())
        held = {sample for sample in range(22) if sample % 4 in crew.workers["a"].engine.lanes}
    assert same(one, other) and set(one) == {"sample", "second"}
    assert one["sample"].tolist() == sorted(held)
    assert {value % 10 for value in one["second"].tolist()} == {1}, "what came later counts"


@holds("Rows that an evaluation gathers are")
def test_torchmetrics_of_gathered_rows_are_those_of_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    check = RequirementCache._check_requirement

    def check_but_torchvision(cache: RequirementCache) -> None:
        """One that is built for another torch cannot be imported, and torchmetrics would import it."""
        check(cache)
        cache.available = cache.available and not cache.requirement.startswith("torchvision")

    monkeypatch.setattr(RequirementCache, "_check_requirement", check_but_torchvision)
    from torchmetrics.classification import BinaryAUROC

    def step(engine: Engine) -> None:
        if engine.step() and engine.global_step == 2:
            with engine.evaluating():
                for batch in engine.shard(DATA):
                    for call in (engine.gather, engine.report):
                        with pytest.raises(
                            UserError, match="got auroc, a BinaryAUROC that has seen this worker's lanes"
                        ):
                            call(auroc=BinaryAUROC())  # type: ignore[arg-type]
                    engine.gather(score=batch["tokens"][:, 0] / 255, label=batch["targets"][:, 0] % 2)

    def measured(names: str) -> float:
        values: list[float] = []

        def measure(engine: Engine) -> None:
            if engine.gathers and not values:
                auroc = BinaryAUROC()
                auroc.update(engine.gathers["score"], engine.gathers["label"])
                values.append(float(auroc.compute()))

        with Crew(names, Task(OPTIONS, step=step, prepare=lambda engine: engine.on_step(measure))) as crew:
            crew.finish()
        return values[0]

    assert 0 < measured("a") == measured("abc") < 1


def test_rows_of_another_shape_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = alone(Engine.step)
    with pytest.raises(UserError, match=r"engine\.gather is for the batches of engine\.shard"):
        engine.gather(a=torch.ones(2))
    with engine.evaluating():
        for _ in engine.shard(DATA):
            for wrong in (torch.ones(3), torch.tensor(1.0), [1, 2]):
                with pytest.raises(UserError, match=r"gather got a of shape .*; expected a tensor with one row"):
                    engine.gather(a=wrong)  # type: ignore[arg-type]
            for name in ("sample", "__metadata__"):
                with pytest.raises(UserError, match="under another name"):
                    engine.gather(**{name: torch.ones(2)})
            monkeypatch.setattr(gathered_rows, "MOST_BYTES", 4)
            with pytest.raises(UserError, match=r"more than 0 MiB on this worker in one evaluation; gather less"):
                engine.gather(a=torch.ones(2))
            break


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (
            torch.ones(2, 3),
            torch.ones(2, 4),
            "rows of shape (4,), and before, in the same evaluation, of torch.float32 with",
        ),
        (torch.ones(2), torch.ones(2).double(), "got a of torch.float64 with rows of shape (), and before"),
        (torch.ones(2), torch.ones(2).to_sparse(), "and torch.sparse_coo, which cannot be sent"),
        (torch.ones(2), torch.ones(2, dtype=torch.complex128), "got a of torch.complex128 and torch.strided, which"),
    ],
)
def test_rows_that_cannot_lie_beside_others_are_refused_where_they_are_given(
    first: Tensor, second: Tensor, sentence: str
) -> None:
    engine = alone(Engine.step)
    with engine.evaluating(), pytest.raises(UserError) as refused:
        batches = engine.shard(DATA)
        next(batches)
        engine.gather(a=first)
        next(batches)
        engine.gather(a=second)
    assert sentence in str(refused.value)


def test_rows_that_differ_between_members_fail_all_of_them_in_one_sentence() -> None:
    def step(engine: Engine) -> None:
        if engine.step() and engine.global_step == 2:
            with engine.evaluating():
                for batch in engine.shard(DATA):
                    engine.gather(padded=batch["tokens"][:, : 3 + engine.rank])

    with Crew("ab", Task(OPTIONS, step=step)) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert "pad rows to one shape for all batches" in crew.job.durable.reason


@rule(
    "The sum of an evaluation is exact, and one sum has one form, so its mean has the same bits whoever "
    "evaluated which lane; one of zero is a number too",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.core.tree",
            "    while len(parts) < MOST_PARTS and (largest := math.fsum(rest)):\n",
            "    while len(parts) < MOST_PARTS and (largest := sum(rest)):\n",
        ),
        Edit("shoal.core.tree", "    while len(parts) < MOST_PARTS and", "    while len(parts) < 1 and"),
        Edit(
            "shoal.core.tree",
            "    if not math.isfinite(rounded := sum(rest)):\n",
            "    if rest == (rounded := 0.0):\n",
        ),
        Edit(
            "shoal.exchange.vote",
            "total(sums.get(name, [])) / lanes for name, lanes in counts.items() if lanes",
            "total(sums[name]) / counts[name] for name in sums if counts[name]",
        ),
        Edit(
            "shoal.training.evaluation",
            "        self._arrived = {}\n        return self._in_vote\n",
            "        self._in_vote, self._arrived = self._arrived, {}\n        return self._in_vote\n",
        ),
    ],
)
@given(st.lists(st.floats(0.5, 1.0), max_size=40), st.randoms())
def test_a_sum_has_the_same_bits_in_any_order_and_grouping(values: list[float], chance: random.Random) -> None:
    """Of numbers of one kind; and it is the exact sum, rounded once."""
    values = [math.ldexp(chance.choice([-1, 1]) * value, chance.randrange(20)) for value in values]
    shuffled = chance.sample(values, len(values))
    cut = chance.randint(0, len(values))
    first: list[float] = []
    for value in values:
        add(first, value)
    left: list[float] = []
    right: list[float] = []
    for value in shuffled[:cut]:
        add(left, value)
    for value in shuffled[cut:]:
        add(right, value)
    for part in right:
        add(left, part)
    assert total(first) == total(left) == math.fsum(values)
    assert len(first) <= MOST_PARTS


@holds("The sum of an evaluation is")
def test_a_sum_with_what_is_not_finite_is_not_finite() -> None:
    parts: list[float] = []
    for value in (1.0, math.inf, 2.0):
        add(parts, value)
    assert total(parts) == math.inf
    add(parts, -math.inf)
    assert math.isnan(total(parts))
