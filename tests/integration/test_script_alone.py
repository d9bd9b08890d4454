"""One script of docs/scripts.md as it stands there, beside its original. `make scripts` runs all, in every world."""

from __future__ import annotations

from scripts.measuring import measure
from scripts.table import script


def test_the_tutorial_of_ddp_has_the_loss_of_its_original() -> None:
    measured = measure(script("ddp_tutorial"), worlds=(1,), through_a_kill=False)
    assert (measured.steps, measured.wrong()) == (128, [])
