"""Random modules and programs over them end with the same bits in stages 1 and 2, whatever the world, as alone in 0."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from crew import Crew, Task, undisturbed
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matrices import examples
from random_modules import PRECISIONS, RandomModel, optimizer_of
from tiers import check

pytestmark = check("trains many small jobs")

POINTS = (
    "forward", "backward", "exchange", "mirror", "vote", "optimizer", "hand_out", "fill", "prepare", "promote", "begin",
)  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2])
@given(st.integers(0, 1 << 30), st.sampled_from(PRECISIONS), st.sampled_from(POINTS), st.data())
@settings(
    max_examples=examples(6), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], database=None
)
def test_a_random_module_has_the_same_bits_in_stages_1_and_2_through_a_loss_and_a_join(
    stage: int, number: int, precision: dict[str, Any], point: str, data: st.DataObject
) -> None:
    lanes, micro_batches = data.draw(st.integers(2, 5)), data.draw(st.sampled_from([1, 1, 2]))
    names = "abcd"[: data.draw(st.integers(2, min(4, lanes)))]
    options = {"max_steps": 5, "lanes": lanes, "micro_batches_per_lane": micro_batches, "precision": precision}

    def task(stage: int) -> Task:
        return Task(
            {**options, "stage": stage},
            model=lambda: RandomModel(number, is_half=bool(precision)),
            optimizer=optimizer_of(number),
        )

    right = undisturbed(task(0))
    with patch("shoal.blocks.flat.TAKEN_BYTES", 1), Crew(names, task(stage)) as crew:
        crew.plant(data.draw(st.sampled_from(names)), data.draw(st.integers(2, 4)), point)
        crew.train_to(1)
        crew.add("e")
        assert crew.finish() == right
