"""Lanes whose sequences are divided in a cell: each member contributes to the gradient of every parameter."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from context_parallel import BOTH, CONTEXT, FOUR, Divided, Ring, Whole, losses_of_the_whole
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples, shortened
from rule import Edit, holds, rule
from shoal.exchange.tree_sum import TreeSum
from shoal.training.engine import Engine
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, coordinate_of, crew_of, trained
from tiers import check
from torch import Tensor, nn


def task_of(shape: Shape, stage: int = 1, model: Any = Divided, **options: Any) -> CellTask:
    return CellTask({"stage": stage, **options}, shape=shape, model=model)


@cache
def one_cell(shape: Shape, model: Any = Divided) -> str:
    """The fingerprint of a world of one cell."""
    with crew_of("abcd"[: shape.processes], task_of(shape, model=model)) as crew:
        return crew.finish()


SPANS = st.sampled_from([[(0, 4), (4, 5)], [(0, 2), (2, 4), (4, 5)], [(0, 1), (1, 2), (2, 4), (4, 5)]])


@rule(
    "Each context of a cell has a tree of gradients over lanes, and their roots are added in the order of coordinates, "
    "whichever member owns the block and trains which lanes",
    "Cells",
    broken_by=[
        Edit("shoal.exchange.tree_sum", "in roots[1:]:", "in roots[:0:-1]:"),
        Edit("shoal.exchange.tree_sum", "for sources in contributors:", "for sources in [sum(contributors, [])]:"),
    ],
)
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(SPANS, min_size=3, max_size=3), st.data())
def test_the_roots_of_three_contexts_are_added_in_the_order_of_coordinates(
    spans: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(1)
    lanes = torch.randn(3, 5, 64, generator=generator)
    senders = data.draw(st.permutations([(context, n) for context, own in enumerate(spans) for n in range(len(own))]))
    ranks = {sender: rank for rank, sender in enumerate(senders)}
    sources = [[(span, ranks[context, n]) for n, span in enumerate(own)] for context, own in enumerate(spans)]

    def whole(leaves: Tensor) -> Tensor:  # (lanes, elements) → (elements,)
        return leaves[0] if len(leaves) == 1 else leaves[0] + leaves[1]

    def of(context: int, span: tuple[int, int]) -> Tensor:  # (elements,)
        leaves = lanes[context, slice(*span)]
        return whole(leaves[:2]) + whole(leaves[2:]) if len(leaves) > 2 else whole(leaves)

    one, two, three = (of(context, (0, 4)) + of(context, (4, 5)) for context in range(3))
    tree_sum = TreeSum(sources, data.draw(st.integers(0, len(senders))), 5)
    [total] = tree_sum.add_up([of(context, span).clone() for context, own in enumerate(spans) for span in own])
    assert torch.equal(total, (one + two) + three)


def gradient_descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("shape", "model", "stage"),
    [
        (CONTEXT, Divided, 2),
        (BOTH, Divided, 1),
        pytest.param(BOTH, Divided, 2, marks=check("as its bits, which are those of stage 1")),
        pytest.param(CONTEXT, Ring, 1, marks=check("as by an exchange of heads")),
        pytest.param(BOTH, Ring, 1, marks=check("as by an exchange of heads")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
@rule(
    "Loss and gradient of a micro-batch are the means over the contexts of a cell",
    "Cells",
    broken_by=[
        Edit("shoal.exchange.vote", "return total / coordinates.portions", "return total"),
        Edit("shoal.exchange.canonical", "div_(self._traffic.leaves)", "div_(self._traffic.plan.lanes)"),
        Edit("shoal.exchange.round_reduction", "div_(self._traffic.leaves)", "div_(self._traffic.plan.lanes)"),
    ],
)
def test_losses_are_those_of_the_whole_model_in_one_process(shape: Shape, model: Any, stage: int) -> None:
    found: dict[str, list[float]] = {}

    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step() and engine.loss is not None:
            found.setdefault(engine.context.link.worker, []).append(engine.loss)

    options = {"stage": stage, "gradient_clipping": 0.0}
    task = CellTask(options, body=body, shape=shape, model=model, optimizer=gradient_descent)
    with crew_of("abcd", task) as crew:
        crew.finish()
    assert len(found) == 4 and len({tuple(losses) for losses in found.values()}) == 1, "all members know the loss"
    assert found["a"] == pytest.approx(losses_of_the_whole(gradient_descent), abs=1e-5)


@pytest.mark.parametrize(
    ("shape", "names", "stage"),
    [
        (CONTEXT, "abcde", 1),
        (CONTEXT, "abcde", 2),
        (BOTH, "abcdefgh", 1),
        *(pytest.param(CONTEXT, "abcdef", stage, marks=check("as two cells")) for stage in (0, 1, 2)),
        (BOTH, "abcdefgh", 2),
        pytest.param(BOTH, "abcdefgh", 0, marks=check("as in stage 1")),
        pytest.param(BOTH, "abcdefghijklm", 2, marks=check("three cells and a spare")),
    ],
    ids=str,
)
@holds("Each context of a cell has a tree")
def test_any_number_of_cells_ends_in_the_same_bits(shape: Shape, names: str, stage: int) -> None:
    with crew_of(names, task_of(shape, stage)) as crew:
        assert trained(crew) == one_cell(shape)


@rule(
    "… on shards too, where it is seen with more than two contexts",
    "Cells",
    after="Each context of a cell has a tree",
    broken_by=[
        Edit(
            "shoal.exchange.round_reduction",
            "[(first, other) for other in others]",
            "[(first, o) for o in others[::-1]]",
        )
    ],
)
def test_gradients_of_four_contexts_are_added_in_the_same_order_whole_and_on_shards() -> None:
    digests = set()
    for names, stage in (("abcd", 1), ("abcdefgh", 2)):
        with crew_of(names, task_of(FOUR, stage, Ring, max_steps=3)) as crew:
            digests.add(crew.finish())
    assert len(digests) == 1


MORE = [pytest.param(point, marks=check("as at the other points")) for point in ("vote", "exchange", "mirror")]


@pytest.mark.parametrize("point", ["between", "meet", "backward", *MORE])
@pytest.mark.parametrize("model", [Divided, pytest.param(Ring, marks=check("as by an exchange of heads"))])
def test_a_process_that_is_killed_changes_no_bit(point: str, model: Any) -> None:
    with crew_of("abcde", task_of(CONTEXT, model=model)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, point)
        assert trained(crew) == one_cell(CONTEXT, model)


@pytest.mark.parametrize("point", ["between", "meet", "backward", *MORE])
def test_a_process_that_is_killed_in_stage_2_changes_no_bit(point: str) -> None:
    with crew_of("abcde", task_of(CONTEXT, stage=2)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, point)
        assert trained(crew) == one_cell(CONTEXT)


@check("many processes and steps")
@pytest.mark.parametrize("stage", shortened([1, 2], 2))
def test_a_process_of_both_dimensions_is_killed_and_another_joins_and_no_bit_changes(stage: int) -> None:
    with crew_of("abcdefgh", task_of(BOTH, stage, max_steps=20)) as crew:
        crew.train_to(2)
        crew.plant("g", 4, "between")
        crew.train_to(6)
        crew.add("k", task_of(BOTH, stage, max_steps=20).at(coordinate_of("k", BOTH)))
        crew.train_until("two cells", lambda: len(crew.job.durable.current.cells) == 2)  # type: ignore[union-attr]
        several = trained(crew)
    with crew_of("abcd", task_of(BOTH, max_steps=20)) as crew:
        assert trained(crew) == several


class Undivided(Whole):
    """All tokens in every process."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


@pytest.mark.parametrize(("model", "warnings"), [(Undivided, 1), (Divided, 0), (Ring, 0)])
def test_a_script_that_divides_no_sequence_is_told_so_once(
    model: Any, warnings: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with crew_of("ab", task_of(CONTEXT, model=model, max_steps=3)) as crew:
        trained(crew)
    assert capsys.readouterr().err.count("the_sequence_is_not_divided") == warnings
