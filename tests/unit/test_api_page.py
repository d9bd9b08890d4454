"""docs/api.md says all of what a script may use, and nothing that is not there."""

from __future__ import annotations

import ast
import pydoc
import re
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from crew import Task, engine_of
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine

DOCS = Path(__file__).resolve().parents[2] / "docs"
PUBLIC = [
    "averaged", "backward", "buffer", "device", "evaluating", "export", "fingerprint", "gather", "gathered", "gathers",
    "generation", "global_step", "lanes", "loss", "loss_fn", "micro_batches", "module", "on_commit", "on_evaluation",
    "on_step", "rank", "register_state", "report", "reports", "run", "save_checkpoint", "shard", "skip", "step", "stop",
    "turn", "warming_up", "world_size",
]  # fmt: skip
"""What scripts rely on. A change is a change of the interface."""


def test_the_public_names_of_the_engine_are_these() -> None:
    engine = engine_of(Task(), AloneLink(), Faults([]))
    assert [name for name in dir(engine) if not name.startswith("_")] == PUBLIC
    assert all(hasattr(engine, name) for name in PUBLIC)


def test_the_page_tells_every_public_name_and_no_other() -> None:
    named = set(re.findall(r"\bengine\.(\w+)", (DOCS / "api.md").read_text()))
    assert sorted(named) == PUBLIC


def test_every_public_method_says_what_it_does() -> None:
    assert [n for n in PUBLIC if hasattr(Engine, n) and not (getattr(Engine, n).__doc__ or "").strip()] == []


@pytest.mark.parametrize("page", ["api.md", "evaluation.md"])
def test_the_code_of_a_page_is_python(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_what_the_page_counts_goes_on_after_a_resume_with_the_same_bits(tmp_path: Path) -> None:
    """It is brought up to date before what is saved has it; behind `engine.step()` a step would be missing."""
    [code] = re.findall(r"```python\n(class MeanLoss:\n.*?)\n\n\nmean = ", (DOCS / "api.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    trained: list[int] = []

    def train(steps: int, saves: Path) -> float:
        task = Task({"max_steps": steps, "shoal": {"checkpoint": {"path": str(saves), "every_steps": 2}}})
        engine = engine_of(task, AloneLink(), Faults([]))
        mean = names["MeanLoss"]()
        engine.register_state("mean loss", mean)
        engine.on_commit(mean.update)
        for batch in engine:
            trained.append(engine.global_step)
            engine.backward(engine.module(**batch))
            engine.step()
        engine.parts.saving.close()
        assert mean.steps == steps
        return float(mean.loss)

    right = train(4, tmp_path / "right")
    train(2, tmp_path / "resumed")
    trained.clear()
    assert train(4, tmp_path / "resumed") == right
    assert min(trained) == 2


def test_help_lists_what_the_package_gives() -> None:
    text = pydoc.plain(pydoc.render_doc(shoal))
    for name in ("initialize(model", "class Engine(", "class UserError("):
        assert name in text
