"""Stage 2 where a cell divides layers, and gradients of which each of its processes has a part, in every stage."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from rule import Edit, holds, rule
from shoal.training.engine import Engine
from tensor_parallel import CellTask, Parallel, Sequenced, coordinate_of, crew_of, losses_of_the_whole, trained
from tiers import check

HALF = {"precision": {"bf16": {"enabled": True}}}


def task_of(stage: int, model: Any = Parallel, **options: Any) -> CellTask:
    return CellTask({"stage": stage, **options}, model=model)


@cache
def one_cell(model: Any = Parallel, in_half: bool = False, max_steps: int = 6) -> str:
    """The fingerprint of a world of one cell in stage 1."""
    options = HALF if in_half else {}
    with crew_of("ab", task_of(1, model, max_steps=max_steps, **options)) as crew:
        return crew.finish()


@pytest.mark.parametrize("names", ["ab", "abcd", "abcde", pytest.param("abcdef", marks=check("as two cells"))])
@holds("Any number of cells ends in the same bits")
def test_sharded_gradients_end_in_the_bits_of_whole_ones(names: str) -> None:
    with crew_of(names, task_of(2)) as crew:
        assert trained(crew) == one_cell()


MORE = ("forward", "exchange", "mirror", "hand_out", "optimizer", "in_vote")


@pytest.mark.parametrize(
    "point", ["between", "backward", "vote", *(pytest.param(point, marks=check("as the others")) for point in MORE)]
)
@pytest.mark.parametrize("model", [Parallel, pytest.param(Sequenced, marks=check("as without parts of sums"))])
def test_a_process_that_is_killed_while_a_spare_is_there_changes_no_bit(point: str, model: Any) -> None:
    with crew_of("abcdef", task_of(2, model)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, point)
        assert trained(crew) == one_cell(model)


def test_cells_that_were_broken_at_different_coordinates_are_paired_anew() -> None:
    with crew_of("abcd", task_of(2, Sequenced)) as crew:
        crew.train_to(2)
        crew.kill("a")
        crew.kill("d")
        assert trained(crew) == one_cell(Sequenced)


@check("a join takes many steps")
def test_half_a_cell_joins_and_is_a_spare_until_the_other_half_comes() -> None:
    task = task_of(2, Sequenced, max_steps=30)
    with crew_of("ab", task) as crew:
        crew.train_to(2)
        crew.add("c", task.at(coordinate_of("c")))
        crew.train_until("a spare", lambda: len(crew.job.durable.current.members) == 3)  # type: ignore[union-attr]
        crew.add("d", task.at(coordinate_of("d")))
        crew.train_until("two cells", lambda: len(crew.job.durable.current.cells) == 2)  # type: ignore[union-attr]
        assert trained(crew) == one_cell(Sequenced, max_steps=30)


@pytest.mark.parametrize(
    ("stage", "names", "in_half"),
    [
        (1, "abcd", False),
        (1, "abcdefgh", True),
        (2, "abcd", False),
        (2, "ab", True),
        pytest.param(0, "abcd", False, marks=check("as stage 1")),
        pytest.param(2, "abcdefgh", True, marks=check("as in one cell")),
    ],
)
@rule(
    "Gradients of which each process of a cell has a part are added up over it in full precision once a lane's "
    "backward is over, and leave as they are then",
    "Cells",
    broken_by=[
        Edit("shoal.core.layout", "return self.wide_dtype if self.is_summed else self.dtype", "return self.dtype"),
        Edit("shoal.training.reducing", "if not bucket.is_summed]", "]"),
        Edit("shoal.training.reducing", "lambda bucket: not self._is_summed[bucket]", "lambda _: True"),
        Edit("shoal.blocks.shard_sums", "if self.over_cell is not None and is_lanes_last", "if False"),
        Edit("shoal.blocks.lane_sums", "if self.over_cell is not None and is_lanes_last", "if False"),
    ],
)
def test_parts_of_sums_over_a_cell_end_in_the_same_bits_in_any_number_of_cells(
    stage: int, names: str, in_half: bool
) -> None:
    options = HALF if in_half else {}
    with crew_of(names, task_of(stage, Sequenced, **options)) as crew:
        assert trained(crew) == one_cell(Sequenced, in_half)


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 2, "lanes": 3, "micro_batches_per_lane": 2}, {"stage": 1}])
@holds("Gradients of which each process of a cell has a part")
def test_losses_are_those_of_the_whole_model_in_one_process(options: dict[str, Any]) -> None:
    found: dict[str, list[float]] = {}

    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step() and engine.loss is not None:
            found.setdefault(engine.context.link.worker, []).append(engine.loss)

    with crew_of("abcd", CellTask(options, model=Sequenced, body=body)) as crew:
        crew.finish()
    assert len(found) == 4 and len({tuple(losses) for losses in found.values()}) == 1, "all members know the loss"
    assert found["a"] == pytest.approx(losses_of_the_whole({**options, "stage": 1}), abs=1e-5)
